#!/usr/bin/env bash
# Run examples/train_torchrun.sh as if on several machines. NCCL treats each simulated machine as a host and connects
# them over sockets. They share the first GPUs of this machine, or use no GPU.
#
#   NODES=2 RANKS_PER_NODE=2 SECONDS_AT_MOST=300 several_machines.sh CONFIG.yaml ARGUMENTS..
set -euo pipefail
: "${NODES:?}" "${RANKS_PER_NODE:?}" "${SECONDS_AT_MOST:?}"
here=$(dirname "$(realpath "$0")")
PATH="$(dirname "${PYTHON:-$(command -v python3)}"):$PATH"
export PATH NODES RANKS_PER_NODE HEAD=localhost NCCL_SOCKET_IFNAME=lo NCCL_IB_DISABLE=1
export PORT=$((20000 + $$ % 10000))
for ((machine = 0; machine < NODES; machine++)); do  # `timeout` also ends all child processes of its command
    NCCL_HOSTID=machine$machine timeout "$SECONDS_AT_MOST" "$here/../../../examples/train_torchrun.sh" "$@" &
done
trap 'kill $(jobs -p) 2> /dev/null || true' EXIT
for ((machine = 0; machine < NODES; machine++)); do wait -n; done
