#!/usr/bin/env bash
# The head in aquiline/assets: from the target's stored answers to the shipped folder.
#
#     runs/default_head.sh WORK ANSWERS.jsonl...
#
# Two parts: all answers from scratch, then, beginning with that head, the rows without the sources that are least like
# chats, tasks and summaries.
#
# ANSWERS are what `aquiline data answer` writes, or rows with `prompt_ids` and `response_ids`. Run again after it was
# stopped, it goes on. With AQUILINE_PAUSE_FILE set it stands still while something is timed. Hardware, minutes and the
# accepted length reached are in the run.json that ships with the head.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
work="$1"
shift
mkdir -p "$work"
nice -n 19 aquiline train "$@" --out "$work/out" --features "$work/features" \
    --ttt-steps 4 --epochs 1.1208 --held-out 32 --eval-every 200 --save-every 50
least='taskbench_requests|tldr_shell|clinc150|commonsense_qa|topical_chat|synthetic_persona_chat|mathqa_aqua|mmlu'
grep -hvE "\"source\": *\"($least)\"" "$@" > "$work/late.jsonl"
nice -n 19 aquiline train "$work/late.jsonl" --out "$work/late" --features "$work/late-features" \
    --warm-start "$work/out/head" --ttt-steps 4 --epochs 0.75 --held-out 32 --eval-every 200 --save-every 50 --decode-every 0
assets="$here/aquiline/assets/smollm2-135m-instruct"
mkdir -p "$assets"
cp "$work/late/head/"{model.safetensors,config.json,run.json} "$assets/"
echo "the head is in $assets; its README.md is written by hand"
