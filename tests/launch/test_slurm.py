"""slurm.sh: what it makes of Slurm's variables, and what it does where they are missing."""

import shutil

import pytest

from tests.launch.stand_ins import ROOT


def test_slurm_starts_one_torchrun_on_each_node(cluster):
    launch = cluster.run("slurm.sh", "--seed", "5", SLURM_GPUS_ON_NODE="4")
    assert launch.status == 0
    command = [
        cluster.environment["SLURM_SUBMIT_DIR"] + "/launch/node.sh",
        "--nnodes=2",
        "--nproc_per_node=4",
        "--rdzv_id=4711",
        "--rdzv_backend=c10d",
        "--rdzv_endpoint=n1:14711",
        cluster.environment["SLURM_SUBMIT_DIR"] + "/train_ddp.py",
        "--resume",
        "auto",
        "--seed",
        "5",
    ]
    assert launch.arguments("srun") == command
    assert launch.arguments("torchrun") == command[1:]
    assert "job 4711: 2 node(s), 4 process(es) on each, 2 thread(s) each" in launch.stdout


@pytest.mark.parametrize(
    ("nodelist", "hostnames"),
    [
        ("alpha,beta", ["alpha", "beta"]),
        ("n[001-003,7]", ["n001", "n002", "n003", "n7"]),
        ("a-[1-2]-b", ["a-1-b", "a-2-b"]),
    ],
)
def test_slurm_meets_at_the_first_node_of_the_list(cluster, nodelist, hostnames):
    cluster.add("scontrol", f"printf '%s\\n' {' '.join(hostnames)}")
    launch = cluster.run("slurm.sh", SLURM_JOB_NODELIST=nodelist, SLURM_NNODES=str(len(hostnames)))
    assert launch.arguments("scontrol") == ["show", "hostnames", nodelist]
    assert launch.option("rdzv_endpoint").split(":")[0] == hostnames[0]
    assert launch.option("nnodes") == str(len(hostnames))


def test_slurm_needs_no_scontrol_for_one_node(cluster):
    cluster.remove("scontrol")
    launch = cluster.run("slurm.sh", SLURM_JOB_NODELIST="x1", SLURM_NNODES="1")
    assert launch.status == 0
    assert launch.option("rdzv_endpoint").split(":")[0] == "x1"
    assert launch.option("nnodes") == "1"


def test_slurm_says_what_to_do_without_scontrol(cluster):
    cluster.remove("scontrol")
    launch = cluster.run("slurm.sh")
    assert launch.status == 2
    assert "n[1-2]: set MASTER_ADDR" in launch.stderr
    assert not launch.called("srun")
    launch = cluster.run("slurm.sh", MASTER_ADDR="n1.example")
    assert launch.option("rdzv_endpoint") == "n1.example:14711"


def test_slurm_stops_where_scontrol_fails(cluster):
    cluster.add("scontrol", "echo 'Invalid hostlist' >&2; exit 1")
    launch = cluster.run("slurm.sh")
    assert launch.status == 1
    assert "Invalid hostlist" in launch.stderr
    assert not launch.called("srun")


def test_slurm_gives_two_jobs_two_ports_and_takes_the_users(cluster):
    ports = [
        cluster.run("slurm.sh", SLURM_JOB_ID=job).option("rdzv_endpoint").split(":")[1]
        for job in ("4711", "4712", "123456789")
    ]
    assert ports == ["14711", "14712", "26789"]
    launch = cluster.run("slurm.sh", MASTER_PORT="29500")
    assert launch.option("rdzv_endpoint") == "n1:29500"


@pytest.mark.parametrize(
    ("variables", "processes", "threads"),
    [
        ({}, "1", "8"),
        ({"SLURM_GPUS_ON_NODE": "2"}, "2", "4"),
        ({"SLURM_GPUS_ON_NODE": "0"}, "1", "8"),
        ({"NPROC_PER_NODE": "3"}, "3", "2"),
        ({"NPROC_PER_NODE": "3", "SLURM_GPUS_ON_NODE": "2"}, "3", "2"),
        ({"NPROC_PER_NODE": "9"}, "9", "1"),
        ({"OMP_NUM_THREADS": "5"}, "1", "5"),
        ({"SLURM_CPUS_ON_NODE": ""}, "1", "1"),
    ],
)
def test_slurm_shares_the_cpus_of_the_job_among_its_processes(
    cluster, variables, processes, threads
):
    launch = cluster.run("slurm.sh", **variables)
    assert launch.option("nproc_per_node") == processes
    assert launch.environment()["OMP_NUM_THREADS"] == threads


def test_slurm_hands_all_cpus_of_the_job_to_the_step(cluster):
    environment = cluster.run("slurm.sh", SLURM_CPUS_PER_TASK="8").environment("srun")
    assert environment["SRUN_CPUS_PER_TASK"] == "8"
    assert environment["SLURM_KILL_BAD_EXIT"] == "1"


def test_slurm_runs_again_on_the_same_folder_after_a_requeue(cluster):
    first = cluster.run("slurm.sh", "--out_dir", "runs/a")
    second = cluster.run("slurm.sh", "--out_dir", "runs/a", SLURM_RESTART_COUNT="1")
    assert second.arguments("srun") == first.arguments("srun")
    assert "restart" not in first.stdout
    assert "job 4711, restart 1:" in second.stdout


def test_slurm_lets_the_users_resume_come_last(cluster):
    options = cluster.run("slurm.sh", "--resume", "runs/b").options_of_the_training()
    assert options == ["--resume", "auto", "--resume", "runs/b"]


@pytest.mark.parametrize("variable", ["SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_NNODES"])
def test_slurm_answers_a_missing_variable_with_its_usage(cluster, variable):
    del cluster.environment[variable]
    launch = cluster.run("slurm.sh")
    assert launch.status == 2
    assert f"{variable} is not set" in launch.stderr
    assert "sbatch launch/slurm.sh" in launch.stderr
    assert not launch.called("srun")


def test_slurm_refuses_a_job_that_was_not_submitted_from_the_repository_root(cluster, tmp_path):
    launch = cluster.run("slurm.sh", SLURM_SUBMIT_DIR=str(tmp_path))
    assert launch.status == 2
    assert f"no train_ddp.py in {tmp_path}" in launch.stderr
    assert not launch.called("srun")


def test_slurm_runs_from_the_copy_that_sbatch_makes(cluster, tmp_path):
    copy = tmp_path / "slurm_script"
    shutil.copy(ROOT / "launch" / "slurm.sh", copy)
    launch = cluster.run(str(copy), "--help")  # its usage is read from the copy, too
    assert "sbatch launch/slurm.sh" in launch.stdout
    assert cluster.run(str(copy)).option("nnodes") == "2"


def test_slurm_directives_stand_before_the_first_command():
    """Slurm stops reading them there, and says nothing."""
    lines = (ROOT / "launch" / "slurm.sh").read_text().splitlines()
    first_command = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    directives = [line for line in lines[:first_command] if line.startswith("#SBATCH ")]
    assert directives == [line for line in lines if line.startswith("#SBATCH ")]
    assert {"#SBATCH --requeue", "#SBATCH --open-mode=append"} <= set(directives)
    assert "#SBATCH --ntasks-per-node=1" in directives
