#!/usr/bin/env bash
# The head in aquiline/assets: from prompts and the target's stored answers to the shipped folder.
#
#     runs/default_head.sh WORK PROMPTS_FOLDER ANSWERS.jsonl...
#
# Four parts: all answers from scratch; then, beginning with that head, the rows without the sources that are least like
# chats, tasks and summaries; then these and 700 more answers, to long inputs, second turns and conversations; and the
# same once more at lower rates. In the file the matrices have four bits of mantissa, so that a repository stores it in
# fewer bytes.
#
# ANSWERS are what `aquiline data answer` writes, or rows with `prompt_ids` and `response_ids`; PROMPTS_FOLDER holds what
# runs/more_prompts.py reads. Run again after it was stopped, it goes on. With AQUILINE_PAUSE_FILE set it stands still
# while something is timed. Hardware, minutes and the accepted length reached are in the run.json that ships with the
# head.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
work="$1" prompts="$2"
shift 2
mkdir -p "$work"
train() {
    nice -n 19 aquiline train "$@" --ttt-steps 4 --held-out 32 --save-every 50
}
train "$@" --out "$work/out" --features "$work/features" --epochs 1.1208 --eval-every 200
least='taskbench_requests|tldr_shell|clinc150|commonsense_qa|topical_chat|synthetic_persona_chat|mathqa_aqua|mmlu'
grep -hvE "\"source\": *\"($least)\"" "$@" > "$work/late.jsonl"
train "$work/late.jsonl" --out "$work/late" --features "$work/late-features" --warm-start "$work/out/head" \
    --epochs 0.75 --eval-every 200 --decode-every 0
python "$here/runs/more_prompts.py" "$work/more.jsonl" "$prompts" "${@/#/--answered=}" \
    --long 800 --second-turns 300 --conversations 100
aquiline data answer "$work/more.jsonl" "$work/more-answers.jsonl" --temperature 0,0.7,1 --max-new-tokens 320 \
    --in-flight 32 --limit 700
rows=("$work/late.jsonl" "$work/more-answers.jsonl" --features "$work/more-features" --decode-every 0)
train "${rows[@]}" --out "$work/more" --warm-start "$work/late/head" --epochs 1 --eval-every 300 \
    --learning-rate 0.002 --adamw-learning-rate 0.001
train "${rows[@]}" --out "$work/last" --warm-start "$work/more/head" --epochs 0.684 --eval-every 275 \
    --learning-rate 0.0012 --adamw-learning-rate 0.0006 --seed 1
assets="$here/aquiline/assets/smollm2-135m-instruct"
python "$here/runs/round_head.py" "$work/last/head" "$assets" --bits 4
echo "the head is in $assets; its README.md is written by hand"
