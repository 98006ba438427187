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
#   MAX_REQUEUES      how often the job may start again before this script lets it end (100)
#
# Some minutes before the time limit, and where the cluster does so before a preemption, Slurm sends
# SIGUSR1 to this script: the ranks save, the run leaves, and the job is queued again under the same
# number. So it is when --max_minutes has stopped the run, and after a SIGTERM that came from the
# time limit or a preemption. A job whose node fails is queued again by Slurm. The job then goes on
# from its newest checkpoint: --resume auto stands before your options, so yours win at first; in a
# job that starts again and has a checkpoint in its --out_dir, that one wins. Give each job an
# --out_dir of its own.
#
#   scancel JOB                          save and leave for good, as far as KillWait allows
#   scancel --batch --signal=USR1 JOB    save, leave and go on in a new start
#   sbatch --signal=B:USR1@600 ...       where saving may take longer
#
# Nothing is queued again after the last step, a crash or scancel. The exit status is that of srun: 0
# after the last step, and after saving and leaving for SIGUSR1 or --max_minutes; 2 after a wrong
# option; 1 or above after another mistake, a fault, a failed save, or a SIGTERM that torchrun saw.

#SBATCH --job-name=train_ddp
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=4
#SBATCH --time=24:00:00
#SBATCH --output=slurm-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@180

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

# Whether a run that ends like this should go on in a new start of the job.
#   $1  the marker that it left in its folder
#   $2  what Slurm says about the job
goes_on() {
    case $1 in
    "to be continued: SIGUSR1" | "to be continued: max_minutes" | "to be continued: launcher gone")
        # Somebody may have cancelled the job meanwhile; Slurm ends it at the time limit, too.
        [[ ! $2 =~ JobState=(CANCELLED|COMPLETING) || $2 == *Reason=TimeLimit* ]]
        ;;
    "to be continued: SIGTERM")
        # Of a person, who knows why, or of Slurm. It queues a preempted job again only if that
        # does not end in time, and one at its time limit never.
        [[ $2 == *Reason=TimeLimit* || $2 =~ JobState=RUNNING.*[[:space:]]PreemptTime=[0-9] ]]
        ;;
    *) return 1 ;;
    esac
}

# Queue this job again if its run has more to do; the last thing that this script does.
requeue() {
    local status='' job restarts=${SLURM_RESTART_COUNT:-0}
    { read -r status <"$marker"; } 2>/dev/null || true
    [[ $status == "to be continued: "* ]] || return 0
    job=$(scontrol show job "$SLURM_JOB_ID" 2>/dev/null) || true
    goes_on "$status" "$job" || return 0
    if ((restarts >= ${MAX_REQUEUES:-100})); then
        echo "slurm.sh: $status; not queued again after $restarts starts: see MAX_REQUEUES" >&2
    elif scontrol requeue "$SLURM_JOB_ID"; then
        echo "slurm.sh: $status; queued again"
    else
        echo "slurm.sh: $status; it could not be queued again: submit it once more" >&2
    fi
}

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

# srun passes SIGUSR1 on, but at a SIGTERM it ends all tasks at once. Before there is a step, there
# is nothing to save: a SIGUSR1, which would end this script, is passed over.
step=
trap '[[ -z $step ]] || kill -s USR1 "$step" 2>/dev/null || true' USR1
trap '[[ -n $step ]] || exit 143; scancel --signal=TERM "$SLURM_JOB_ID" 2>/dev/null || true' TERM

# Forget how an earlier start ended: what is there afterwards was written by this one. Only the
# training's own parser knows which folder the options mean; a mistake would not get further there.
marker=$(PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} python3 -m training.run_status forget "$@") || {
    (($? != 2)) || exit 2
    marker=
    echo "slurm.sh: the run folder cannot be found out: the job will not be queued again" >&2
}

options=(--resume auto "$@")
if [[ -n $marker ]] && ((${SLURM_RESTART_COUNT:-0} > 0)); then
    checkpoints=("$(dirname -- "$marker")"/checkpoints/*.pt)
    [[ ! -e ${checkpoints[0]} ]] || options+=(--resume auto)
fi

srun "$root/launch/node.sh" --nnodes="$SLURM_NNODES" --nproc_per_node="$processes" \
    --rdzv_id="$SLURM_JOB_ID" --rdzv_backend=c10d --rdzv_endpoint="$head:$port" \
    "$root/train_ddp.py" "${options[@]}" &
step=$!
# shellcheck source=launch/machine.sh
source "$root/launch/machine.sh" # for wait_for
status=0
wait_for "$step" || status=$?

trap '' USR1 TERM # queueing again brings them, too
requeue
exit "$status"
