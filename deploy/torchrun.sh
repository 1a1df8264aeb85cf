#!/bin/bash
# Plain torchrun, on every host: NODES is their number, NODE_RANK this one's, HEAD the first one's name, OUT a run
# directory on a disk that all of them see. The exit code is the run's own; 11 asks for a start without the nodes that
# OUT/exclude.json names, and whoever starts this script has to do that. On one machine `unsilent launch` does.
set -u

unsilent exec --run "$OUT" -- \
    torchrun --nnodes "$NODES" --node-rank "$NODE_RANK" --nproc-per-node "${GPUS:-8}" \
    --master-addr "$HEAD" --master-port 29500 --max-restarts 0 \
    -m unsilent train --preset 60m --steps 10000 --save-every 500 --quarantine auto --out "$OUT"
