"""local.sh: how many processes and threads it starts, where, and what it hands on."""

import subprocess

import pytest

from tests.launch.stand_ins import ROOT


def test_local_starts_one_process_where_there_is_no_gpu(machine):
    launch = machine.run("local.sh")
    assert launch.status == 0
    assert launch.arguments() == [
        "--standalone",
        "--nproc_per_node=1",
        str(ROOT / "train_ddp.py"),
    ]


def test_local_starts_a_process_for_each_gpu(machine_with_gpus):
    assert machine_with_gpus.run("local.sh").option("nproc_per_node") == "4"


@pytest.mark.parametrize(
    ("visible", "processes"), [("1,3", "2"), ("GPU-8f1a", "1"), ("", "1"), ("1,2,-1,3", "2")]
)
def test_local_counts_only_the_gpus_that_are_visible(machine_with_gpus, visible, processes):
    launch = machine_with_gpus.run("local.sh", CUDA_VISIBLE_DEVICES=visible)
    assert launch.option("nproc_per_node") == processes


def test_local_takes_a_driver_without_gpus_for_none(machine):
    machine.add("nvidia-smi", "echo 'NVIDIA-SMI has failed'; exit 9")
    assert machine.run("local.sh").option("nproc_per_node") == "1"


def test_local_does_not_count_visible_gpus_where_there_is_no_driver(machine):
    launch = machine.run("local.sh", CUDA_VISIBLE_DEVICES="0,1")
    assert launch.option("nproc_per_node") == "1"


def test_local_takes_a_first_number_as_the_processes_and_passes_the_rest_on(machine_with_gpus):
    launch = machine_with_gpus.run("local.sh", "2", "--iterations", "3")
    assert launch.option("nproc_per_node") == "2"
    assert launch.options_of_the_training() == ["--iterations", "3"]


def test_local_takes_a_first_argument_that_is_no_number_as_an_option(machine):
    launch = machine.run("local.sh", "--iterations", "3")
    assert launch.option("nproc_per_node") == "1"
    assert launch.options_of_the_training() == ["--iterations", "3"]


def test_local_refuses_zero_processes(machine):
    launch = machine.run("local.sh", "0")
    assert launch.status == 2
    assert "0 processes" in launch.stderr
    assert not launch.called("torchrun")


@pytest.mark.parametrize(("processes", "threads"), [("1", "8"), ("2", "4"), ("3", "2"), ("9", "1")])
def test_local_shares_the_cores_among_the_processes_and_says_so(machine, processes, threads):
    launch = machine.run("local.sh", processes)
    assert launch.environment()["OMP_NUM_THREADS"] == threads
    assert launch.stdout.count("\n") == 1
    assert f"{processes} process(es), {threads} thread(s) each" in launch.stdout


def test_local_leaves_the_thread_count_of_the_user(machine):
    launch = machine.run("local.sh", "2", OMP_NUM_THREADS="3")
    assert launch.environment()["OMP_NUM_THREADS"] == "3"
    assert "3 thread(s) each" in launch.stdout


def test_local_counts_cores_where_there_is_no_nproc(machine):
    machine.remove("nproc")
    machine.add("getconf", "[[ $1 == _NPROCESSORS_ONLN ]] && echo 6")
    assert machine.run("local.sh", "2").environment()["OMP_NUM_THREADS"] == "3"


def test_local_stays_in_the_folder_where_the_user_stands(machine, tmp_path):
    for cdpath in ("", str(ROOT)):
        launch = machine.run("local.sh", folder=tmp_path, CDPATH=cdpath)
        assert launch.environment()["PWD"] == str(tmp_path)
        assert str(ROOT / "train_ddp.py") in launch.arguments()


def test_local_can_be_called_by_a_relative_path(machine):
    link = machine.folder / "repository"
    link.symlink_to(ROOT)
    records = machine.folder / "records"
    records.mkdir()
    environment = {"PATH": str(machine.bin), "RECORDS": str(records), "CDPATH": str(ROOT)}
    subprocess.run(["launch/local.sh"], cwd=link, env=environment, check=True, timeout=20)
    assert (records / "torchrun.arguments").read_text().endswith("/train_ddp.py\0")


def test_local_ends_with_the_status_of_torchrun(machine):
    machine.add("torchrun", "exit 7")
    assert machine.run("local.sh").status == 7
