#!/usr/bin/env bash
# Train on this machine, on all its GPUs, or in as many processes as you say.
#
#   launch/local.sh [processes] [options of train_ddp.py...]
#
#   launch/local.sh                              one process a GPU; without GPUs one on the CPU
#   launch/local.sh 2 --iterations 100           two processes
#   launch/local.sh --config configs/gpt2-124m.yaml --out_dir runs/a
#   CUDA_VISIBLE_DEVICES=2,3 launch/local.sh     two of the GPUs
#   OMP_NUM_THREADS=1 launch/local.sh 2          other than cores / processes
#   launch/local.sh 1 --help                     the options of train_ddp.py
#
# Call it from any folder: paths, also the default ones of data and runs, are relative to where you
# stand. The port is a free one, so that jobs can run side by side.

set -euo pipefail

root=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=launch/machine.sh
source "$root/launch/machine.sh"

case ${1-} in
-h | --help)
    usage
    exit 0
    ;;
esac

choose_processes "${1-}"
[[ ! ${1-} =~ ^[0-9]+$ ]] || shift

set_threads "$processes"
echo "local.sh: $processes process(es), $OMP_NUM_THREADS thread(s) each; GPUs here: $gpus"

# exec: a signal sent to this script must reach torchrun.
exec torchrun --standalone --nproc_per_node="$processes" "$root/train_ddp.py" "$@"
