#!/usr/bin/env bash
# The head in aquiline/assets: from the target's stored answers to the shipped folder.
#
#     runs/default_head.sh WORK ANSWERS.jsonl...
#
# Run again after it was stopped, it goes on. Hardware, minutes and the accepted length reached are in the run.json that
# ships with the head; `minutes` there counts training and the making of features, not the time it was stopped.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
work="$1"
shift
mkdir -p "$work"
[ -f "$work/train.jsonl" ] || python "$here/runs/select_answers.py" "$work/train.jsonl" 700000 "$@"
nice -n 19 aquiline train "$work/train.jsonl" --out "$work/out" --features "$work/features" \
    --ttt-steps 4 --epochs 2 --held-out 32 --eval-every 125 --save-every 25
assets="$here/aquiline/assets/smollm2-135m-instruct"
mkdir -p "$assets"
cp "$work/out/head/"{model.safetensors,config.json,run.json} "$assets/"
echo "the head is in $assets; its README.md is written by hand"
