#!/usr/bin/env bash
# What a GPU makes of decoding, within ten minutes and without network: `runs/gpu_check.sh OUT EVAL.jsonl...`
#
# Equality in float32, speed-up and tau at batch 1 in bf16, tau with the reference tree, and throughput at
# batch 1 to 64 against plain decoding, on the first 4 prompts of each file. Each part has its own limit of seconds; one that is cut off, or fails, does not
# keep the others from running, and the exit status says how many did. Nothing is installed: as for runs/gpu_head.sh.
# Tried on a CPU (DEVICE=cpu, and LIMIT prompts of each file, TOKENS tokens, BATCHES); no GPU was at hand.
set -uo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
export PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
out="$1"
shift
mkdir -p "$out"
limit="${LIMIT:-4}" tokens="${TOKENS:-128}" failed=0
device=(--device "${DEVICE:-cuda}")

part() { # NAME SECONDS ARGUMENTS...
    echo "== $1"
    timeout --kill-after=10 "$2" "${PYTHON:-python3}" -m aquiline "${@:3}" "${device[@]}" --json "$out/$1.json" 2>&1 |
        tee "$out/$1.log" || failed=$((failed + 1))
}

part equality 100 eval "$@" --limit "$limit" --max-new-tokens "$tokens" --dtype float32
part batch-1 100 eval "$@" --limit "$limit" --max-new-tokens "$tokens" --dtype bfloat16
part reference-tree 100 eval "$@" --limit "$limit" --max-new-tokens "$tokens" --dtype bfloat16 --tree 6:8:60 --no-plain
part batches 180 bench "$@" --batch "${BATCHES:-1,4,16,64}" --repeats 1 --max-new-tokens "$tokens" --dtype bfloat16
exit "$failed"
