#!/usr/bin/env bash
# You have a 3B model, WebDataset shards and a node of eight GPUs.
#
#   pip install 'vlmpack[mcore,report]'   # megatron-core; matplotlib, for pictures
#   eight_gpus.sh MODEL TRAIN VALIDATION WORK [KEY=VALUE ...]
#
# MODEL: a folder of Qwen2.5-VL. TRAIN, VALIDATION: shards, a glob in quotes. WORK: where everything
# is written. Further arguments change the recipe. GPUS (default 8) is the number of processes,
# STOP_AFTER (seconds, default none) stops the first launch, as a cluster does. IMAGE and QUESTION
# are what the trained model is asked.
set -euo pipefail
model=$1 train=$2 validation=$3 work=$4
shift 4
gpus=${GPUS:-8}
mkdir -p "$work"

# 1. The shipped recipe for this model and node, on this data.
[ -e "$work/3b.yaml" ] || vlmpack recipe new qwen2_5_vl-3b-mcore-8gpu -o "$work/3b.yaml"
set -- "$work/3b.yaml" "model.path=$model" "data.train=$train" "data.validation=$validation" \
    "run_dir=$work/run" "$@"
vlmpack recipe check "$@" --world-size "$gpus"

# 2. Index the shards once, before eight processes wait for it. (The glob is for the shell here.)
vlmpack index $train

# 3. Steps, padding, bytes of a rank. With a GPU here, --measure says the hours, too.
vlmpack plan "$@" --world-size "$gpus" --html "$work/plan.html"

# 4. Train. A launch that is told to stop saves; the same command goes on.
launch=(torchrun --standalone --nproc-per-node "$gpus" -m vlmpack finetune "$@")
if [ -n "${STOP_AFTER:-}" ]; then
    timeout --signal TERM "$STOP_AFTER" "${launch[@]}" || {
        code=$?
        [ "$code" = 124 ] || exit "$code" # what timeout says of a launch that it has stopped
        echo "stopped: the same command goes on"
    }
fi
"${launch[@]}"

# 5. What did it train on, and what does it answer? Serving it: docs/guides/serving.md.
vlmpack data audit "$work/run"
vlmpack generate --model "$work/run/export" ${IMAGE:+--image "$IMAGE"} \
    "${QUESTION:-What is in this picture?}" | tee "$work/answer.txt"
