# What the launchers share; they source it, nobody runs it.
# shellcheck shell=bash

# Print the comment that opens the calling script.
usage() {
    sed -n '2,/^$/s/^# \{0,1\}//p' "$0"
}

# Answer a launcher's first argument if it asks for help.
answer_help() {
    case $1 in
    -h | --help)
        usage
        exit 0
        ;;
    esac
}

fail() {
    echo "${0##*/}: $*" >&2
    exit 2
}

# GPUs that a process started here may use: those of the driver, or the ones that
# CUDA_VISIBLE_DEVICES leaves of them. CUDA reads its entries up to the first invalid one.
number_of_gpus() {
    local listing device count=0
    listing=$(nvidia-smi -L 2>/dev/null) || true
    if [[ -n $listing && -n ${CUDA_VISIBLE_DEVICES+set} ]]; then
        for device in ${CUDA_VISIBLE_DEVICES//,/ }; do
            [[ $device != -* ]] || break
            count=$((count + 1))
        done
    else
        # MIG slices of a GPU stand indented below it.
        while read -r device; do
            [[ $device != GPU\ * ]] || count=$((count + 1))
        done <<<"$listing"
    fi
    echo "$count"
}

# Set `processes` to the number given first, else to the GPUs here, else 1; `gpus` counts those.
choose_processes() {
    gpus=$(number_of_gpus)
    processes=$((gpus > 0 ? gpus : 1))
    if [[ ${1-} =~ ^[0-9]+$ ]]; then
        processes=$((10#$1))
    fi
    ((processes > 0)) || fail "0 processes cannot train: give 1 or more"
    command -v torchrun >/dev/null ||
        fail "torchrun is not on PATH: activate the environment that requirements.txt went into"
}

# Set what torchrun and its processes find in their environment; what the user has set stays.
set_environment() {
    local processes=$1 cores share
    # Left alone, torchrun gives each process one thread, and plain Python gives each all of them.
    cores=$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
    share=$((cores / processes))
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((share > 0 ? share : 1))}
    # Let torchrun pass SIGUSR1 on, too, and give ranks more than 30 seconds to save before it kills
    # them. These are variables and no options, because an older torchrun would refuse options.
    export PET_SIGNALS_TO_HANDLE=${PET_SIGNALS_TO_HANDLE:-SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1}
    export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-300}
}

# Wait for the end of a background process and return its status. `wait` alone also returns when a
# trapped signal comes; once the process has ended, it knows its status as often as it is asked.
wait_for() {
    while kill -0 "$1" 2>/dev/null; do
        wait "$1" || true
    done
    wait "$1"
}
