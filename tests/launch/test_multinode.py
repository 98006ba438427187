"""multinode.sh: what one machine of several tells torchrun."""

import pytest

from tests.launch.stand_ins import ROOT


def test_multinode_tells_torchrun_its_place_and_where_to_meet(machine_with_gpus):
    launch = machine_with_gpus.run("multinode.sh", "3", "2", "10.0.0.1", "--seed", "5")
    assert launch.status == 0
    assert launch.arguments() == [
        "--nnodes=3",
        "--node_rank=2",
        "--master_addr=10.0.0.1",
        "--master_port=29400",
        "--nproc_per_node=4",
        str(ROOT / "train_ddp.py"),
        "--seed",
        "5",
    ]
    assert launch.environment()["OMP_NUM_THREADS"] == "2"
    assert "machine 2 of 3, meeting at 10.0.0.1:29400" in launch.stdout


def test_multinode_takes_a_port_and_the_processes(machine):
    launch = machine.run("multinode.sh", "2", "0", "head:1234", "4", "--seed", "5")
    assert launch.option("master_addr") == "head"
    assert launch.option("master_port") == "1234"
    assert launch.option("nproc_per_node") == "4"
    assert launch.options_of_the_training() == ["--seed", "5"]


def test_multinode_leaves_an_address_of_ipv6_whole(machine):
    launch = machine.run("multinode.sh", "2", "0", "fe80::1")
    assert launch.option("master_addr") == "fe80::1"
    assert launch.option("master_port") == "29400"


@pytest.mark.parametrize("arguments", [[], ["2"], ["2", "0"]])
def test_multinode_answers_missing_arguments_with_its_usage(machine, arguments):
    launch = machine.run("multinode.sh", *arguments)
    assert launch.status == 2
    assert "launch/multinode.sh NODES NODE_RANK HEAD[:PORT]" in launch.stderr
    assert not launch.called("torchrun")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["two", "0", "head"], "NODES two"),
        (["0", "0", "head"], "NODES 0"),
        (["2", "2", "head"], "NODE_RANK 2 must be a number from 0 to 1"),
        (["2", "-1", "head"], "NODE_RANK -1"),
        (["2", "head", "1"], "NODE_RANK head"),
        (["2", "1", "head", "0"], "0 processes"),
    ],
)
def test_multinode_refuses_impossible_numbers_with_their_values(machine, arguments, message):
    launch = machine.run("multinode.sh", *arguments)
    assert launch.status == 2
    assert message in launch.stderr
    assert not launch.called("torchrun")
