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
#
# Ctrl-C, or SIGTERM, SIGINT, SIGHUP or SIGUSR1 sent to this script's process, which becomes
# torchrun: the ranks save and leave after the step that they are in; `--resume auto` goes on from
# there. Exit status: 0 after the last step and after --max_minutes, torchrun's 1 after a signal, a
# mistake or a fault. A torchrun that does not know SIGUSR1 dies of it while the ranks still save.
#
#   TORCH_ELASTIC_SHUTDOWN_TIMEOUT    seconds that ranks may save before torchrun kills them (300);
#                                     a torchrun that does not know it waits 30

set -euo pipefail

root=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=launch/machine.sh
source "$root/launch/machine.sh"

answer_help "${1-}"

choose_processes "${1-}"
[[ ! ${1-} =~ ^[0-9]+$ ]] || shift

set_environment "$processes"
echo "local.sh: $processes process(es), $OMP_NUM_THREADS thread(s) each; GPUs here: $gpus"

# exec: a signal sent to this script must reach torchrun, which passes it on to the ranks.
exec torchrun --standalone --nproc_per_node="$processes" "$root/train_ddp.py" "$@"
