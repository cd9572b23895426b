#!/usr/bin/env bash
# The figures of the README and docs/results.md: `runs/measure_default.sh OUT EVAL_FOLDER`, on a machine doing nothing else.
#
# EVAL_FOLDER holds mt_bench, humaneval, gsm8k, alpaca and sum as JSON lines with `turns` or `messages`. Each record
# names its machine. On 2 cores without AVX-512 it takes about 45 minutes, half of them the reference tree.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
out="$1"
sets=("$2"/{mt_bench,humaneval,gsm8k,alpaca,sum}.jsonl)
mkdir -p "$out"
# The default tree, plain and speculative in turn, float32: speed-up, and text equal on all 100 prompts.
aquiline eval "${sets[@]}" --limit 20 --max-new-tokens 128 --dtype float32 --json "$out/default-tree.json"
# The plain step against Transformers' generate.
python "$here/runs/versus_transformers.py" "$out/versus-transformers.json" 3 64 "${sets[@]}"
# Tau with the reference tree.
aquiline eval "${sets[@]}" --limit 20 --max-new-tokens 128 --dtype float32 --tree 6:8:60 --no-plain \
    --json "$out/reference-tree.json"
