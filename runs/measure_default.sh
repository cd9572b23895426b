#!/usr/bin/env bash
# The figures of the README and docs/results.md, on a machine doing nothing else:
#
#     runs/measure_default.sh OUT EVAL_FOLDER [--peer NAME=PYTHON ...]
#
# EVAL_FOLDER holds mt_bench, humaneval, gsm8k, alpaca and sum as JSON lines with `turns` or `messages`. Each record
# names its machine, its dtype and its load. Other engines are those of runs/versus_peers.py.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
out="$1"
sets=("$2"/{mt_bench,humaneval,gsm8k,alpaca,sum}.jsonl)
mkdir -p "$out"
# The default tree, plain and speculative in turn, in the machine's own dtype: speed-up.
aquiline eval "${sets[@]}" --limit 20 --max-new-tokens 192 --json "$out/default-tree.json"
aquiline eval "${sets[@]}" --limit 20 --max-new-tokens 192 --temperature 1 --json "$out/default-tree-t1.json"
# Other engines on the same prompts.
python "$here/runs/versus_peers.py" "$out/versus-peers.json" "${sets[@]}" --limit 2 "${@:3}"
# Batches; and which fixed tree decodes fastest, on prompts that nothing else here is measured with.
aquiline bench "${sets[@]:0:4}" --batch 1,2,4,8,16,32,64 --repeats 3 --max-new-tokens 128 --tree auto \
    --json "$out/batches.json"
mkdir -p "$out/last"
for set in "${sets[@]}"; do tail -n 2 "$set" > "$out/last/${set##*/}"; done
trees=(auto 1:7:7 2:4:5 2:4:7 2:8:15 3:3:7 3:4:7 3:4:9 3:5:11 3:6:15 4:1:4 4:4:11 5:6:31)
aquiline bench "$out"/last/*.jsonl --batch 1 --repeats 3 --max-new-tokens 96 "${trees[@]/#/--tree=}" \
    --json "$out/trees.json"
for record in batches trees; do aquiline plot "$out/$record.json" "$out/$record.svg"; done
# Tau with the reference tree, greedy and at temperature 1, and with a chain.
longer=(--limit 40 --max-new-tokens 192 --no-plain)
aquiline eval "${sets[@]}" "${longer[@]}" --tree 6:8:60 --json "$out/reference-tree.json"
aquiline eval "${sets[@]}" "${longer[@]}" --tree 6:8:60 --temperature 1 --json "$out/reference-tree-t1.json"
aquiline eval "${sets[@]}" "${longer[@]}" --tree 7:1:7 --json "$out/chain.json"
# Text equal on all 100 prompts in float32 too.
aquiline eval "${sets[@]}" --limit 20 --max-new-tokens 128 --dtype float32 --json "$out/default-tree-float32.json"
