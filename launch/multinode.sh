#!/usr/bin/env bash
# Train on several machines without a scheduler: run the same line on each, with its own NODE_RANK.
#
#   launch/multinode.sh NODES NODE_RANK HEAD[:PORT] [processes] [options of train_ddp.py...]
#
#   launch/multinode.sh 2 0 10.0.0.1 --out_dir runs/a           on 10.0.0.1 itself
#   launch/multinode.sh 2 1 10.0.0.1 --out_dir runs/a           on the second machine
#   launch/multinode.sh 2 1 10.0.0.1:29401 4 --out_dir runs/a   other port, 4 processes a machine
#
# NODES is how many machines, NODE_RANK counts them from 0. HEAD is the address of machine 0 and
# PORT (29400) a free port there; two jobs that share a head need two. Processes are those of one
# machine, the same number on each: its GPUs, else 1. Data and runs must lie on a file system that
# all machines see.
#
# A signal to the launcher of one machine makes all machines save and leave; launch/local.sh --help
# says which signals, the exit statuses, and how long ranks may save.

set -euo pipefail

root=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=launch/machine.sh
source "$root/launch/machine.sh"

answer_help "${1-}"

if (($# < 3)); then
    usage >&2
    fail "NODES, NODE_RANK and HEAD are needed, $# argument(s) given"
fi
nodes=$1 node_rank=$2 head=$3 port=29400
shift 3
[[ $nodes =~ ^[1-9][0-9]*$ ]] || fail "NODES $nodes must be a number of at least 1"
if [[ ! $node_rank =~ ^(0|[1-9][0-9]*)$ ]] || ((node_rank >= nodes)); then
    fail "NODE_RANK $node_rank must be a number from 0 to $((nodes - 1)), another on each machine"
fi
if [[ $head =~ ^([^:]+):([0-9]+)$ ]]; then
    head=${BASH_REMATCH[1]} port=${BASH_REMATCH[2]}
fi

choose_processes "${1-}"
[[ ! ${1-} =~ ^[0-9]+$ ]] || shift

set_environment "$processes"
echo "multinode.sh: machine $node_rank of $nodes, meeting at $head:$port;" \
    "$processes process(es), $OMP_NUM_THREADS thread(s) each; GPUs here: $gpus"

# The static rendezvous, torchrun's default: ranks follow NODE_RANK, and a machine that is lost ends
# the job instead of being waited for. exec: a signal sent to this script must reach torchrun.
exec torchrun --nnodes="$nodes" --node_rank="$node_rank" --master_addr="$head" \
    --master_port="$port" --nproc_per_node="$processes" "$root/train_ddp.py" "$@"
