"""Compiled blocks follow the curve of plain ones, on all ranks or on none."""

import contextlib
import io
import os
import shutil
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from torch._dynamo.utils import counters

from tests.harness import run_distributed
from tests.resuming import prepared, saved_at
from tests.tiny import TINY, curve, flags, metrics_of, run_main
from training import compiling
from training.config import load_config

# Six rows of validation in batches of four and two; the last batch is smaller.
SHORT = {"iterations": 6, "val_interval": 3, "val_windows": 6, "batch_size": 4}


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    return prepared(tmp_path_factory.mktemp("compiling"))


@dataclass
class Compiled:
    """What a rank did: said on stdout, compiled blocks and graphs at the first step and after."""

    said: str
    blocks: list[int]
    graphs: list[int]


def run_watched(argv: list[str], backend: Any = None, without: int | None = None) -> Compiled:
    """The job; with a backend instead of inductor, and a rank that has no compiler."""
    import train_ddp

    watched = Compiled("", [], [])
    step = train_ddp.training_step
    if without is not None:
        backend = no_compiler if os.environ["RANK"] == str(without) else "eager"

    def watch(job: Any) -> Any:
        result = step(job)
        blocks = [block for block in job.model.blocks if block._compiled_call_impl is not None]
        watched.blocks.append(len(blocks))
        watched.graphs.append(counters["stats"]["unique_graphs"])
        return result

    said = io.StringIO()
    with (
        mock.patch.object(compiling, "BACKEND", backend or compiling.BACKEND),
        mock.patch.object(train_ddp, "training_step", watch),
        contextlib.redirect_stdout(said),
    ):
        run_main(argv)
    watched.said = said.getvalue()
    watched.graphs.append(counters["stats"]["unique_graphs"])
    return watched


def no_compiler(*_: Any) -> Any:
    raise RuntimeError("no C++ compiler\nand more of this")


def run(
    world_size: int, data_dir: Any, out_dir: Any, *how: Any, **options: Any
) -> tuple[Any, list[Compiled]]:
    argv = flags(**{**TINY, **SHORT, "data_dir": data_dir, "out_dir": out_dir, **options})
    ranks = run_distributed(run_watched, world_size, argv, *how, process_group=False, timeout=300.0)
    return metrics_of(out_dir), ranks


def assert_one_curve(entries: Any, reference: Any, relative: float) -> None:
    for name in ("loss_train", "grad_norm", "val_loss"):
        assert curve(entries, name) == pytest.approx(curve(reference, name), rel=relative), name


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_compiled_blocks_follow_the_plain_curve(tmp_path, data_dir):
    plain, _ = run(1, data_dir, tmp_path / "plain")
    entries, (rank,) = run(1, data_dir, tmp_path / "run", compile="on")
    assert rank.blocks == [2] * 6
    assert "compile: the blocks took" in rank.said
    assert_one_curve(entries, plain, 1e-4)


def test_ranks_with_compiled_blocks_follow_the_plain_curve(tmp_path, data_dir):
    """And nothing is compiled after the first step: neither for validation nor for its rest.

    The dropout is that of the plain run, so compiling has taken no random number.
    """
    options: dict[str, Any] = {"dropout": 0.1, "bucket_cap_mb": 0.05}
    options |= {"gradient_accumulation_steps": 2, "activation_checkpointing": "true"}
    plain, _ = run(2, data_dir, tmp_path / "plain", **options)
    entries, ranks = run(2, data_dir, tmp_path / "run", "aot_eager", compile="on", **options)
    assert_one_curve(entries, plain, 1e-5)
    for rank in ranks:
        assert rank.blocks == [2] * 6
        assert rank.graphs == [1] * 7
    weights, expected = (saved_at(tmp_path / name, 6)["model"] for name in ("run", "plain"))
    assert weights.keys() == expected.keys()


def test_a_rank_that_cannot_compile_makes_all_train_uncompiled(tmp_path, data_dir):
    plain, ranks = run(2, data_dir, tmp_path / "plain", None, 1)
    assert [rank.said.count("compile:") for rank in ranks] == [0, 0]  # auto: off on the CPU
    entries, ranks = run(2, data_dir, tmp_path / "run", None, 1, compile="on")
    line = "compile: not possible on rank 1, so on none, the blocks stay as they are: "
    assert f"{line}no C++ compiler\n" in ranks[0].said
    assert [rank.blocks for rank in ranks] == [[0] * 6] * 2
    assert_one_curve(entries, plain, 0.0)


@pytest.mark.parametrize(
    ("written", "meant"), [("on", True), ("off", False), ("true", True), ("auto", "auto")]
)
def test_the_option_is_spelt_in_a_file_as_on_the_command_line(tmp_path, written, meant):
    file = tmp_path / "config.yaml"
    file.write_text(f"compile: {written}\n")
    for argv in (["--compile", written], ["--config", str(file)]):
        assert load_config("", argv).device.compile is meant or meant == "auto"
        assert load_config("", argv).device.compile == meant


def test_gpus_compile_unless_told_otherwise():
    for device, wanted, expected in (("cuda", "auto", 1), ("cpu", "auto", 0), ("cuda", False, 0)):
        job = mock.Mock(is_last=False)
        job.world.device, job.config.device.compile = torch.device(device), wanted
        block = mock.Mock()
        job.model.blocks = [block]
        with mock.patch.object(compiling, "_first_pass", return_value=None):
            compiling.compile_blocks(job)
        assert block.compile.call_count == expected
