"""Signals reach the ranks, and a Slurm job goes on in a new start when there is a reason to.

torchrun and the ranks are stand-ins that behave as the real ones: torchrun dies of a signal that it
does not know, a rank saves and leaves the marker. One test starts the real torchrun.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.launch.stand_ins import ROOT, Launch, Machine, Started

TORCHRUN = """
import os, signal, subprocess, sys
rank = subprocess.Popen([sys.executable, "-S", os.environ["RANK_STAND_IN"]], start_new_session=True)
def forward(number, frame):
    rank.send_signal(number)
    rank.wait(20)
    os._exit(1)
signal.signal(signal.SIGTERM, forward)
sys.exit(rank.wait())
"""
RANK = r"""
import os, pathlib, signal, sys, time
marker, does = pathlib.Path(os.environ["MARKER"]), os.environ.get("DOES", "listen")
folder = marker.parent
def note(event):
    with open(os.environ["RECORDS"] + "/events", "a") as events:
        events.write(event + "\n")
def leave(number, frame):
    time.sleep(0.2)
    if does == "listen":
        (folder / "checkpoints" / "ckpt_00000003.pt").touch()
        note("saved")
    marker.write_text(f"to be continued: {signal.Signals(number).name}\n")
    os._exit(0 if does == "listen" else 1)
if does == "crash early":
    sys.exit(3)
(folder / "checkpoints").mkdir(parents=True, exist_ok=True)
marker.write_text("running\n")
if does == "crash":
    sys.exit(3)
if does not in ("listen", "fail to save"):
    marker.write_text(does + "\n")
    sys.exit(0)
for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
    signal.signal(number, leave)
note("rank listens")
time.sleep(30)
"""
SCONTROL = """
case $1 in
requeue)
    echo "requeue $2" >>"$RECORDS/events"
    [[ ${REQUEUE_STATUS:-0} == 0 ]] || exit "$REQUEUE_STATUS"
    kill -s TERM "$PPID" ;; # as Slurm ends the job that it is to start again
*) [[ $2 == hostnames ]] && echo n1 || echo "${JOB_SAYS-JobState=RUNNING Reason=None}" ;;
esac
"""
PREEMPTED = "JobState=RUNNING Reason=None\n   PreemptEligibleTime=2026-01-01 PreemptTime=2026-01-01"


@pytest.fixture
def slurm(cluster):
    rank = cluster.folder / "rank.py"
    rank.write_text(RANK)
    torchrun = cluster.folder / "torchrun.py"
    torchrun.write_text(TORCHRUN)
    cluster.add("torchrun", f'exec "{sys.executable}" -S "{torchrun}" "$@"')
    cluster.add("scontrol", SCONTROL)
    cluster.add(
        "scancel", 'echo "scancel $*" >>"$RECORDS/events"; kill -s TERM "$(<"$RECORDS/srun")"'
    )
    cluster.add("srun", 'echo $$ >"$RECORDS/srun"; exec "$@"')
    cluster.environment["RANK_STAND_IN"] = str(rank)
    return cluster


def stopped(slurm: Machine, number: int, *options: str, **environment: Any) -> Launch:
    """A job whose batch shell gets a signal once its rank trains."""
    job = slurm.start("slurm.sh", *options, **environment)
    job.wait_until("rank listens")
    job.process.send_signal(number)
    return job.end()


def test_slurm_warning_makes_the_ranks_save_and_then_queues_the_job_once(slurm):
    launch = stopped(slurm, signal.SIGUSR1)
    assert launch.events == ["rank listens", "saved", "requeue 4711"]
    assert launch.status == 0
    assert "to be continued: SIGUSR1; queued again" in launch.stdout


def test_next_start_has_the_options_of_the_first_and_its_own_checkpoint_wins(slurm):
    options = ["--out_dir", "runs/a", "--resume", "runs/b/checkpoints/best.pt"]
    first = stopped(slurm, signal.SIGUSR1, *options)
    assert first.options_of_the_training() == ["--resume", "auto", *options]
    second = stopped(slurm, signal.SIGUSR1, *options, SLURM_RESTART_COUNT="1")
    assert second.options_of_the_training() == ["--resume", "auto", *options, "--resume", "auto"]
    assert second.events == ["rank listens", "saved", "requeue 4711"]


def test_new_job_on_a_folder_with_checkpoints_starts_from_what_the_user_says(slurm):
    stopped(slurm, signal.SIGUSR1)
    options = ["--resume", "runs/b/checkpoints/best.pt"]
    launch = slurm.run("slurm.sh", *options, DOES="finished")
    assert launch.options_of_the_training() == ["--resume", "auto", *options]


def test_next_start_without_a_checkpoint_begins_as_the_first(slurm):
    options = ["--resume", "runs/b/checkpoints/best.pt"]
    launch = slurm.run("slurm.sh", *options, SLURM_RESTART_COUNT="1", DOES="crash")
    assert launch.options_of_the_training() == ["--resume", "auto", *options]


@pytest.mark.parametrize("reason", ["max_minutes", "launcher gone"])
def test_run_that_left_in_time_by_itself_is_queued_again(slurm, reason):
    launch = slurm.run("slurm.sh", DOES=f"to be continued: {reason}")
    assert launch.events == ["requeue 4711"]
    assert launch.status == 0


def test_failed_save_is_queued_again_and_its_status_stays(slurm):
    launch = stopped(slurm, signal.SIGUSR1, DOES="fail to save")
    assert launch.events == ["rank listens", "requeue 4711"]
    assert launch.status == 1


@pytest.mark.parametrize(
    ("does", "status"), [("finished", 0), ("crash", 3), ("to be continued: SIGINT", 0)]
)
def test_run_that_has_no_more_to_do_here_is_not_queued_again(slurm, does, status):
    launch = slurm.run("slurm.sh", DOES=does)
    assert launch.events == []
    assert launch.status == status


def test_crash_before_the_marker_does_not_find_that_of_the_start_before(slurm):
    assert stopped(slurm, signal.SIGUSR1).events[-1] == "requeue 4711"
    launch = slurm.run("slurm.sh", SLURM_RESTART_COUNT="1", DOES="crash early")
    assert launch.events == []
    assert launch.status == 3


def test_job_ends_when_it_has_started_again_as_often_as_allowed(slurm):
    does = "to be continued: SIGUSR1"
    for restarts, limit, events in [("2", "3", ["requeue 4711"]), ("3", "3", []), ("", "0", [])]:
        launch = slurm.run("slurm.sh", DOES=does, SLURM_RESTART_COUNT=restarts, MAX_REQUEUES=limit)
        assert launch.events == events
        assert launch.status == 0
    assert "MAX_REQUEUES" in launch.stderr
    assert slurm.run("slurm.sh", DOES=does, SLURM_RESTART_COUNT="100").events == []


def test_job_that_slurm_does_not_queue_again_says_so(slurm):
    launch = slurm.run("slurm.sh", DOES="to be continued: SIGUSR1", REQUEUE_STATUS="1")
    assert launch.events == ["requeue 4711"]
    assert launch.status == 0
    assert "submit it once more" in launch.stderr


@pytest.mark.parametrize(
    ("signal_name", "job", "is_queued"),
    [
        ("SIGUSR1", "JobState=COMPLETING Reason=TimeLimit", True),
        ("SIGUSR1", "JobState=COMPLETING Reason=None", False),  # scancel
        ("SIGUSR1", "JobState=CANCELLED Reason=None", False),
        ("SIGUSR1", PREEMPTED, True),
        ("SIGUSR1", "", True),
        ("SIGTERM", "JobState=COMPLETING Reason=TimeLimit", True),
        ("SIGTERM", PREEMPTED, True),
        ("SIGTERM", PREEMPTED.replace("PreemptTime=2026-01-01", "PreemptTime=None"), False),
        ("SIGTERM", PREEMPTED.replace("RUNNING", "COMPLETING"), False),  # Slurm does it
        ("SIGTERM", "JobState=COMPLETING Reason=None", False),
        ("SIGTERM", "", False),
    ],
)
def test_job_that_somebody_ends_is_not_queued_again(slurm, signal_name, job, is_queued):
    launch = slurm.run("slurm.sh", DOES=f"to be continued: {signal_name}", JOB_SAYS=job)
    assert launch.events == ["requeue 4711"] * is_queued


def test_sigterm_to_the_batch_shell_goes_to_the_tasks_and_not_to_srun(slurm):
    launch = stopped(slurm, signal.SIGTERM)
    assert launch.events == ["rank listens", "scancel --signal=TERM 4711", "saved"]
    assert launch.status == 0


def test_signal_before_there_is_a_step_does_not_end_the_job(slurm):
    slurm.add("python3", "kill -s USR1 $PPID; echo $MARKER")
    launch = slurm.run("slurm.sh", DOES="finished")
    assert launch.called("srun")
    assert launch.status == 0


def test_wrong_option_ends_the_job_before_it_starts(slurm):
    slurm.add("python3", "echo 'unknown option outdir' >&2; exit 2")
    launch = slurm.run("slurm.sh", "--outdir", "a")
    assert launch.status == 2
    assert launch.stderr == "unknown option outdir\n"
    assert not launch.called("srun")


def test_job_whose_folder_cannot_be_found_out_trains_and_says_that_it_ends(slurm):
    slurm.add("python3", "echo 'no module named training' >&2; exit 1")
    launch = slurm.run("slurm.sh", DOES="to be continued: SIGUSR1")
    assert launch.events == []
    assert launch.status == 0
    assert "will not be queued again" in launch.stderr


def test_job_whose_folder_cannot_be_found_out_does_not_look_for_checkpoints_elsewhere(slurm):
    """What is printed before a failure names no folder."""
    (slurm.folder / "checkpoints").mkdir()
    (slurm.folder / "checkpoints" / "best.pt").touch()
    slurm.add("python3", f"echo '{slurm.folder}/status'; exit 1")
    options = ["--resume", "runs/b/checkpoints/best.pt"]
    launch = slurm.run("slurm.sh", *options, SLURM_RESTART_COUNT="1", DOES="finished")
    assert launch.options_of_the_training() == ["--resume", "auto", *options]


def test_slurm_asks_the_training_itself_which_folder_its_options_mean(slurm):
    launch = slurm.run("slurm.sh", "--config", "my configs/a.yaml", DOES="finished")
    forget = ["-m", "training.run_status", "forget", "--config", "my configs/a.yaml"]
    assert launch.arguments("python3") == forget
    path = launch.environment("python3")["PYTHONPATH"]
    assert path == slurm.environment["SLURM_SUBMIT_DIR"]


def node(slurm: Machine) -> Started:
    job = slurm.start("node.sh")
    job.wait_until("rank listens")
    return job


@pytest.mark.parametrize("name", ["SIGUSR1", "SIGTERM", "SIGINT"])
def test_node_passes_signals_to_the_ranks_and_ends_as_torchrun_does(slurm, name):
    job = node(slurm)
    job.process.send_signal(signal.Signals[name])
    launch = job.end()
    assert launch.events == ["rank listens", "saved"]
    assert launch.status == 0
    assert Path(slurm.environment["MARKER"]).read_text() == f"to be continued: {name}\n"


def test_torchrun_survives_a_signal_that_slurm_sends_to_every_process(slurm):
    job = node(slurm)
    os.kill(int(job.environment("torchrun")["PID"]), signal.SIGUSR1)
    time.sleep(0.1)
    assert job.process.poll() is None
    job.process.send_signal(signal.SIGUSR1)
    launch = job.end()
    assert launch.events == ["rank listens", "saved"]
    assert launch.status == 0


def test_node_ends_a_torchrun_that_has_no_ranks_yet(slurm):
    slurm.add("torchrun", f"echo waits >>$RECORDS/events; exec {shutil.which('sleep')} 20")
    job = slurm.start("node.sh")
    job.wait_until("waits")
    job.process.send_signal(signal.SIGUSR1)  # nothing to save, nothing to end
    time.sleep(0.1)
    assert job.process.poll() is None
    job.process.send_signal(signal.SIGTERM)
    assert job.end().status == 128 + signal.SIGTERM


def test_real_torchrun_passes_sigusr1_of_a_local_launch_to_the_ranks(tmp_path):
    (tmp_path / "launch").symlink_to(ROOT / "launch")
    (tmp_path / "train_ddp.py").write_text(
        "import os, time\n"
        "from training.interrupt import StopRequest\n"
        "stop = StopRequest()\n"
        "with stop.listening():\n"
        "    open(f'listens{os.environ[\"RANK\"]}', 'w').close()\n"
        "    while stop.reason is None:\n"
        "        time.sleep(0.01)\n"
        "    time.sleep(0.5)\n"
        "    with open(f'reason{os.environ[\"RANK\"]}', 'w') as file:\n"
        "        file.write(stop.reason)\n"
    )
    process = subprocess.Popen(
        [tmp_path / "launch" / "local.sh", "2"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 60
        while len(list(tmp_path.glob("listens?"))) < 2:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGUSR1)
        process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 1
    assert [(tmp_path / f"reason{rank}").read_text() for rank in (0, 1)] == ["SIGUSR1"] * 2
