"""What holds for every launcher."""

import os

import pytest

from tests.launch.stand_ins import ROOT

CALLS = {
    "local.sh": ["2"],
    "multinode.sh": ["2", "0", "head", "2"],
    "slurm.sh": [],
}


@pytest.mark.parametrize("script", CALLS)
def test_arguments_arrive_whole(cluster, script):
    cluster.add("nproc", "echo 8")
    options = ["--data_dir", "my texts/a  b", "", "*", '"$HOME"', "line\nbreak"]
    launch = cluster.run(script, *CALLS[script], *options)
    assert launch.options_of_the_training()[-len(options) :] == options


@pytest.mark.parametrize("script", ["local.sh", "multinode.sh"])
def test_launcher_becomes_torchrun_so_that_signals_arrive(machine, script):
    launch = machine.run(script, *CALLS[script])
    assert launch.environment()["PID"] == str(launch.pid)
    assert "SIGUSR1" in launch.environment()["PET_SIGNALS_TO_HANDLE"].split(",")


@pytest.mark.parametrize("script", CALLS)
def test_ranks_get_longer_than_30_seconds_to_save_or_what_the_user_says(cluster, script):
    cluster.add("nproc", "echo 8")
    variable = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
    assert int(cluster.run(script, *CALLS[script]).environment()[variable]) > 30
    launch = cluster.run(script, *CALLS[script], **{variable: "7"})
    assert launch.environment()[variable] == "7"


@pytest.mark.parametrize("script", CALLS)
@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_shows_the_usage_and_starts_nothing(cluster, script, flag):
    launch = cluster.run(script, flag)
    assert launch.status == 0
    assert f"launch/{script}" in launch.stdout
    assert "set -euo" not in launch.stdout
    assert not launch.called("torchrun")


@pytest.mark.parametrize("script", CALLS)
def test_missing_torchrun_is_said_with_the_remedy(cluster, script):
    cluster.remove("torchrun")
    launch = cluster.run(script, *CALLS[script])
    assert launch.status == 2
    assert launch.stderr.count("\n") == 1
    assert "activate the environment" in launch.stderr


@pytest.mark.parametrize("script", CALLS)
def test_launcher_can_be_executed(script):
    assert os.access(ROOT / "launch" / script, os.X_OK)
