#!/usr/bin/env bash
# Train on a Slurm cluster. Submit it from the repository root; what follows the script's name are
# options of train_ddp.py:
#
#   sbatch launch/slurm.sh --config configs/gpt2-124m.yaml --out_dir runs/a
#   sbatch --nodes=2 --gpus-per-node=8 --cpus-per-task=96 launch/slurm.sh --out_dir runs/b
#
# What is given to sbatch wins over the #SBATCH lines below. One torchrun runs on each node and
# starts one process a GPU that Slurm gave the job, else one. These variables, set before sbatch,
# win over what the script finds out itself:
#
#   NPROC_PER_NODE    processes on each node
#   OMP_NUM_THREADS   threads of each process (CPUs of the job on a node / processes)
#   MASTER_ADDR       node where the processes meet (the first of the job)
#   MASTER_PORT       port there (made from the job's number)
#
# A job that is preempted, or whose node fails, is queued again under the same number and goes on
# from its newest checkpoint: --resume auto stands before your options, so yours win. Give each job
# an --out_dir of its own.

#SBATCH --job-name=train_ddp
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=4
#SBATCH --time=24:00:00
#SBATCH --output=slurm-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue

set -euo pipefail

usage() {
    sed -n '2,/^$/s/^# \{0,1\}//p' "$0"
}

fail() {
    echo "slurm.sh: $*" >&2
    exit 2
}

case ${1-} in
-h | --help)
    usage
    exit 0
    ;;
esac

for variable in SLURM_JOB_ID SLURM_JOB_NODELIST SLURM_NNODES; do
    if [[ -z ${!variable-} ]]; then
        usage >&2
        fail "$variable is not set, so this is no Slurm job: submit the script with sbatch"
    fi
done

# sbatch runs a copy of this file from a folder of its own, which is why the script's own place says
# nothing about where the repository is.
root=${SLURM_SUBMIT_DIR:-$PWD}
[[ -f $root/train_ddp.py ]] ||
    fail "there is no train_ddp.py in $root: call sbatch in the repository root"
command -v torchrun >/dev/null ||
    fail "torchrun is not on PATH: activate the environment that requirements.txt went into"

# Slurm's short form of a node list, like n[001-003,7], is Slurm's to read.
head=${MASTER_ADDR:-}
if [[ -z $head && $SLURM_JOB_NODELIST == *[[,]* ]]; then
    command -v scontrol >/dev/null ||
        fail "scontrol is not on PATH and alone can read the node list $SLURM_JOB_NODELIST:" \
            "set MASTER_ADDR to its first node"
    hostnames=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
    head=${hostnames%%$'\n'*}
fi
head=${head:-$SLURM_JOB_NODELIST}

# Two jobs on one node need two ports. These end below 32768, where Linux begins to hand out ports
# to whoever connects to something.
port=${MASTER_PORT:-$((10000 + SLURM_JOB_ID % 20000))}

processes=${NPROC_PER_NODE:-${SLURM_GPUS_ON_NODE:-1}}
((processes > 0)) || processes=1
threads=$((${SLURM_CPUS_ON_NODE:-1} / processes))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}

# Since Slurm 22.05 srun does not take over the job's CPUs per task by itself: where tasks are bound
# to CPUs, torchrun and all its processes would share one. And a node that fails must end the step
# on the others.
[[ -z ${SLURM_CPUS_PER_TASK-} ]] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
export SLURM_KILL_BAD_EXIT=1

echo "slurm.sh: job $SLURM_JOB_ID${SLURM_RESTART_COUNT:+, restart $SLURM_RESTART_COUNT}:" \
    "$SLURM_NNODES node(s), $processes process(es) on each, $OMP_NUM_THREADS thread(s) each," \
    "meeting at $head:$port"

# exec: a signal sent to the batch script must reach srun.
exec srun torchrun --nnodes="$SLURM_NNODES" --nproc_per_node="$processes" \
    --rdzv_id="$SLURM_JOB_ID" --rdzv_backend=c10d --rdzv_endpoint="$head:$port" \
    "$root/train_ddp.py" --resume auto "$@"
