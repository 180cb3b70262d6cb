#!/usr/bin/env bash
# Train on several machines with torchrun. Run the same command on each machine:
#
#   NODES=2 HEAD=first-machine examples/train_torchrun.sh CONFIG.yaml --out /shared/runs/NAME
#
#   NODES            number of machines (default 1)
#   HEAD             name of the machine where the ranks meet (default localhost; required for several machines)
#   PORT             a free port on HEAD (default 29500)
#   RANKS_PER_NODE   GPUs of a machine (default all)
#
# parallel.ranks of the configuration must be NODES * RANKS_PER_NODE. --out must be a folder that all machines share.
set -euo pipefail
if [[ $# == 0 ]]; then
    echo "train_torchrun.sh: the configuration is missing. Run train_torchrun.sh CONFIG.yaml --out FOLDER." >&2
    exit 2
fi
if [[ ${NODES:-1} != 1 && -z ${HEAD:-} ]]; then  # each machine would wait for the others at its own localhost
    echo "train_torchrun.sh: HEAD must be the name of the machine where the ranks meet, because NODES is $NODES." >&2
    exit 2
fi
if ! command -v torchrun > /dev/null; then
    echo "train_torchrun.sh: torchrun must be on PATH. Activate the environment of megatron_sb." >&2
    exit 2
fi
export PYTHONSAFEPATH=1  # otherwise Python would import the sources of a checkout, not the installed megatron_sb
exec torchrun --nnodes "${NODES:-1}" --nproc-per-node "${RANKS_PER_NODE:-gpu}" \
    --rdzv-backend c10d --rdzv-endpoint "${HEAD:-localhost}:${PORT:-29500}" --rdzv-id megatron_sb \
    -m megatron_sb.training "$@"
