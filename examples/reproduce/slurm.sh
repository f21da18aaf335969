#!/bin/bash
# All tables and figures of the paper as a Slurm job: sbatch examples/reproduce/slurm.sh
# A job that is preempted or reaches its time limit is queued again and continues where it stopped.
#SBATCH --job-name=usetta-paper
#SBATCH --gpus=1
#SBATCH --cpus-per-task=8
#SBATCH --mem=32G
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --signal=B:TERM@120
set -euo pipefail
SCRATCH="${SCRATCH:?a folder with space for datasets and features}"
export USETTA_DATA="${USETTA_DATA:-$SCRATCH/datasets}"  # HF_TOKEN, for ImageNet, comes from your environment

trap 'scontrol requeue "$SLURM_JOB_ID"' TERM  # two minutes before the time limit
usetta reproduce all --precision auto --cache "$SCRATCH/usetta-features" --out "$SLURM_SUBMIT_DIR/runs" &
wait $!
