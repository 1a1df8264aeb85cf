#!/bin/bash
# NVIDIA Resiliency Extension, on every host; variables as in torchrun.sh. ft_launcher starts workers again by itself and
# would take a bad node along, so it may not here (--max-restarts 0): whoever starts this script does, on exit code 11
# without the nodes that OUT/exclude.json names, and on any other code as he likes.
set -u

unsilent exec --run "$OUT" -- \
    ft_launcher --nnodes "$NODES" --node-rank "$NODE_RANK" --nproc-per-node "${GPUS:-8}" \
    --rdzv-backend c10d --rdzv-endpoint "$HEAD:29500" --rdzv-id unsilent --max-restarts 0 \
    -m unsilent train --preset 60m --steps 10000 --save-every 500 --quarantine auto --out "$OUT"
