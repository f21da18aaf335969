#!/bin/bash
# All tables and figures of the paper on a Ray cluster, four workers to a GPU.
# Run it on the head node, or with: ray job submit --working-dir . -- bash examples/reproduce/ray-job.sh
# The datasets lie on storage that all nodes share. A worker or a node that dies is replaced; the command resumes.
set -euo pipefail
SHARED="${SHARED:?the folder that all nodes share}"
usetta reproduce all --data "$SHARED/datasets" --out "$SHARED/runs" \
  --engine ray --address auto --gpus-per-worker 0.25
