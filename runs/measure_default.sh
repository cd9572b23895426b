#!/usr/bin/env bash
# The figures of the README and docs/results.md: `runs/measure_default.sh OUT EVAL_FOLDER`, on a machine doing nothing else.
#
# EVAL_FOLDER holds mt_bench, humaneval, gsm8k, alpaca and sum as JSON lines with `turns` or `messages`. Each record
# names its machine, its dtype and its load.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
out="$1"
sets=("$2"/{mt_bench,humaneval,gsm8k,alpaca,sum}.jsonl)
mkdir -p "$out"
# The default tree, plain and speculative in turn, in the machine's own dtype: speed-up.
aquiline eval "${sets[@]}" --limit 20 --max-new-tokens 128 --json "$out/default-tree.json"
# The plain step against Transformers' generate.
python "$here/runs/versus_transformers.py" "$out/versus-transformers.json" 3 64 "${sets[@]}"
# Tau with the reference tree, greedy and at temperature 1, and with a chain.
longer=(--limit 40 --max-new-tokens 192 --no-plain)
aquiline eval "${sets[@]}" "${longer[@]}" --tree 6:8:60 --json "$out/reference-tree.json"
aquiline eval "${sets[@]}" "${longer[@]}" --tree 6:8:60 --temperature 1 --json "$out/reference-tree-t1.json"
aquiline eval "${sets[@]}" "${longer[@]}" --tree 7:1:7 --json "$out/chain.json"
# Text equal on all 100 prompts in float32 too.
aquiline eval "${sets[@]}" --limit 20 --max-new-tokens 128 --dtype float32 --json "$out/default-tree-float32.json"
