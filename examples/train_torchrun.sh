#!/usr/bin/env bash
# One job over several machines with torchrun. The same command on each machine:
#
#   NODES=2 HEAD=first-machine examples/train_torchrun.sh CONFIG.yaml --out /shared/runs/NAME
#
# NODES: machines (1). HEAD: the one that all can reach by this name (localhost). RANKS_PER_NODE: GPUs of a machine (all).
# PORT: free on HEAD (29500). parallel.ranks of the configuration must be NODES * RANKS_PER_NODE, and --out a folder that
# all machines share.
set -euo pipefail
export PYTHONSAFEPATH=1  # in a checkout, else, its sources hide the megatron_sb that is installed
torchrun --nnodes "${NODES:-1}" --nproc-per-node "${RANKS_PER_NODE:-gpu}" \
    --rdzv-backend c10d --rdzv-endpoint "${HEAD:-localhost}:${PORT:-29500}" --rdzv-id megatron_sb \
    -m megatron_sb.training "$@"
