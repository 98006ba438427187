#!/usr/bin/env bash
# Run torchrun on one node of a Slurm job and pass signals to its ranks. slurm.sh starts it.
#
#   launch/node.sh [arguments of torchrun...]
#
# Signals go past torchrun, for it is in the way: it dies of SIGUSR1 unless it is told of it, and
# Slurm then kills the ranks; of one that it knows it ends them, with SIGKILL where saving takes
# longer than it waits. So it notices nothing, and ends when its ranks have saved and left.

set -euo pipefail

# shellcheck source=launch/machine.sh
source "${BASH_SOURCE[0]%/*}/machine.sh"

# Send a signal to all children of torchrun: Slurm may have reached them already, or torchrun alone.
# Reads /proc, because not every node has pgrep.
pass_on() {
    local signal=$1 file line parent has_ranks=
    for file in /proc/[0-9]*/stat; do
        { read -r line <"$file"; } 2>/dev/null || continue # ended meanwhile
        # Behind the name, which may hold anything: the state, then the parent.
        read -r _ parent _ <<<"${line##*) }"
        [[ $parent == "$torchrun" ]] || continue
        file=${file%/stat}
        kill -s "$signal" "${file##*/}" 2>/dev/null || true
        has_ranks=yes
    done
    # Before there are ranks there is nothing to save, and torchrun may end as it is asked.
    [[ -n $has_ranks ]] || kill -s "$signal" "$torchrun" 2>/dev/null || true
}

# Some clusters signal every process of a task, so torchrun may notice after all: let it wait.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-300}

# What is ignored here is ignored by all that start from here: by torchrun, and by the ranks until
# they listen to it themselves.
trap '' USR1
torchrun "$@" &
torchrun=$!
trap 'pass_on USR1' USR1
trap 'pass_on TERM' TERM
trap 'pass_on INT' INT
wait_for "$torchrun"
