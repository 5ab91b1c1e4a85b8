#!/bin/bash
#SBATCH --job-name=vlmpack
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@300      # to this script, five minutes before the end
#SBATCH --requeue
#SBATCH --open-mode=append
# sbatch docs/launch/slurm.sh my.yaml        RUN_DIR=... on a file system that all nodes share
set -u
RECIPE=${1:?usage: sbatch slurm.sh RECIPE}
RUN_DIR=${RUN_DIR:-runs/$SLURM_JOB_NAME-$SLURM_JOB_ID}
GPUS=${GPUS:-8}
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

asked=0
stop() { asked=1; kill -TERM "$steps" 2>/dev/null; }   # srun passes it on; vlmpack saves and ends
trap stop USR1 TERM

srun bash -c 'exec torchrun --nnodes "$SLURM_NNODES" --node-rank "$SLURM_NODEID" --nproc-per-node "$0" --master-addr "$MASTER_ADDR" --master-port 29500 --max-restarts 3 -m vlmpack finetune "$1" run_dir="$2"' \
    "$GPUS" "$RECIPE" "$RUN_DIR" &
steps=$!
while kill -0 "$steps" 2>/dev/null; do wait "$steps"; done   # a signal ends a wait
wait "$steps"; code=$?

if [ "$code" = 0 ]; then exit 0; fi   # at its end; stopped in between it is not 0
if [ "$asked" = 1 ]; then scontrol requeue "$SLURM_JOB_ID"; exit 0; fi
exit "$code"
