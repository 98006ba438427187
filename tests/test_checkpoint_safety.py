"""What a checkpoint file holds, whatever the mode that wrote it, and that reading one runs no code:
not on resume, not as weights to begin with, not in generate.py."""

import contextlib
import io
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import generate
from model.config import ModelConfig
from model.transformer import Transformer
from tests.resuming import path_of, prepared, refusal, run_leg, saved_at, start
from tests.tiny import curve, metrics_of, run_main
from training.checkpoint_file import CheckpointError, load_checkpoint

MODES: dict[str, tuple[int, dict[str, Any]]] = {
    "alone": (1, {"gradient_accumulation_steps": 2, "dropout": 0.1}),
    "plain": (2, {"shard_optimizer": "false", "activation_checkpointing": "true"}),
    "sharded": (2, {"gradient_accumulation_steps": 2, "bucket_cap_mb": 0.05}),
    "tied": (2, {"tie_weights": "true", "async_checkpoint": "false"}),
    "narrow": (2, {"param_dtype": "bfloat16", "dtype": "bfloat16", "gradient_dtype": "bfloat16"}),
    "epochs": (3, {"epochs": 0.2, "batch_size": 18}),  # 5 steps
}


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory) -> Path:
    return prepared(tmp_path_factory.mktemp("safety"))


@pytest.fixture(scope="module")
def runs(tmp_path_factory, data_dir) -> dict[str, Path]:
    """A run of each mode, with two numbered checkpoints and a best one."""
    folder = tmp_path_factory.mktemp("modes")
    options = {"iterations": 6, "checkpoint_interval": 3, "val_interval": 3}
    for name, (world_size, mode) in MODES.items():
        start(run_main, world_size, data_dir, folder / name, **options, **mode)
    return {name: folder / name for name in MODES}


def files_of(out_dir: Path) -> list[Path]:
    paths = sorted((out_dir / "checkpoints").iterdir())
    assert len(paths) == 3
    return paths


# What is in the file.


@pytest.mark.parametrize("mode", MODES)
def test_names_are_the_bare_models_in_every_mode(runs, mode):
    for path in files_of(runs[mode]):
        saved = load_checkpoint(path)
        config = saved["config"]
        fields = {name: config[name] for name in ModelConfig.__dataclass_fields__}
        model = Transformer(ModelConfig(**fields))
        assert list(saved["model"]) == list(model.state_dict())
        assert set(saved["optimizer"]) == {name for name, _ in model.named_parameters()}
        for name, parameter in model.named_parameters():
            for key in ("exp_avg", "exp_avg_sq"):
                moment = saved["optimizer"][name][key]
                assert (moment.shape, moment.dtype) == (parameter.shape, torch.float32)
        assert len(saved["rng"]) == MODES[mode][0]


READER = """
import importlib.util, sys, torch

assert importlib.util.find_spec("training") is None
PLAIN = (dict, list, tuple, str, int, float, bool, type(None), torch.Tensor)

def look(value, place):
    assert type(value) in PLAIN, (place, type(value))
    if isinstance(value, dict):
        for key, entry in value.items():
            assert type(key) is str, (place, key)
            look(entry, f"{place} {key}")
    elif isinstance(value, (list, tuple)):
        for number, entry in enumerate(value):
            look(entry, f"{place} {number}")

for path in sys.argv[1:]:
    for options in ({}, {"mmap": True}):
        checkpoint = torch.load(path, weights_only=True, **options)
        look(checkpoint, path)
        print(len(checkpoint["model"]), checkpoint["iteration"])
"""


def test_a_process_without_this_project_reads_the_file_of_every_mode(tmp_path, runs):
    paths = [path for out_dir in runs.values() for path in files_of(out_dir)]
    command = [sys.executable, "-I", "-c", READER, *map(str, paths)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2 * len(paths)
    tensors, steps = zip(*(map(int, line.split()) for line in lines), strict=True)
    assert min(tensors) > 10
    assert set(steps) == {3, 5, 6}


# What reading it does.


def run_audited(argv: list[str], prompt_from: str | None = None) -> list[tuple[str, ...]]:
    """The job, or generate.py, with a look at every class that any pickle asks for."""
    found: list[tuple[str, ...]] = []

    def on_event(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "pickle.find_class":
            found.append(arguments)

    pickle.loads(pickle.dumps(Path))  # the hook's own trial
    sys.addaudithook(on_event)
    pickle.loads(pickle.dumps(Path))
    assert found, "the hook sees nothing"
    found.clear()
    if prompt_from is not None:
        generate.main([prompt_from, "abc", "--max_new_tokens", "3"])
    else:
        run_main(argv)
    return found


@pytest.mark.parametrize("use", ["resume", "auto", "init_from", "generate"])
def test_no_use_of_a_checkpoint_unpickles_any_class(tmp_path, data_dir, runs, use):
    """With one rank: several send each other random states, which are no file's."""
    path = path_of(runs["tied"], 6)
    options: dict[str, Any] = {"tie_weights": "true", "iterations": 8}
    out_dir, prompt_from = tmp_path / "run", None
    if use == "auto":
        out_dir = shutil.copytree(runs["tied"], out_dir)
        options["resume"] = "auto"
    elif use == "generate":
        prompt_from = str(path)
    else:
        options[use] = path
    (found,) = start(run_audited, 1, data_dir, out_dir, prompt_from, **options)
    assert found == []
    if use != "generate":
        assert saved_at(out_dir, 8)["iteration"] == 8


class Trap:
    """Unpickled, it would make a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


def lay_trap(kind: str, source: Path, path: Path, sprung: Path) -> None:
    """Write a file that looks like a checkpoint, and runs code when it is unpickled."""
    content = {**load_checkpoint(source), "note": Trap(sprung)}
    if kind == "pickle":
        path.write_bytes(pickle.dumps({"format_version": 1, "note": Trap(sprung)}))
    else:
        torch.save(content, path, _use_new_zipfile_serialization=kind == "archive")


@pytest.mark.parametrize("kind", ["archive", "legacy", "pickle"])
def test_a_file_that_would_run_code_is_refused_in_one_line_everywhere(
    tmp_path, data_dir, runs, kind
):
    trap, sprung = tmp_path / "trap.pt", tmp_path / "sprung"
    lay_trap(kind, path_of(runs["alone"], 6), trap, sprung)
    with pytest.raises(CheckpointError) as caught, contextlib.redirect_stdout(io.StringIO()):
        generate.main([str(trap), "abc"])
    messages = [str(caught.value)]
    for option in ("resume", "init_from"):
        argv = {option: trap}
        messages.append(refusal(run_main, 2, data_dir, tmp_path / "run", **argv))
    for message in messages:
        assert message.startswith(f"{trap} is damaged or no checkpoint")
        assert "\n" not in message
    out_dir = shutil.copytree(runs["alone"], tmp_path / "folder")
    lay_trap(kind, path_of(runs["alone"], 6), path_of(out_dir, 99), sprung)
    (leg, _) = start(run_leg, 2, data_dir, out_dir, resume="auto", iterations=8)
    said = [line for line in leg.said.splitlines() if "ckpt_00000099" in line]
    assert len(said) == 1
    assert said[0].startswith(f"not resumed from: {path_of(out_dir, 99)} is damaged")
    assert said[0].endswith("set aside as ckpt_00000099.pt.damaged")
    assert f"resumed from {path_of(out_dir, 6)} after 6 steps" in leg.said
    assert len(curve(metrics_of(out_dir))) == 8
    assert not sprung.exists()
    with contextlib.suppress(RuntimeError):  # a bare pickle is no file of torch's, once it has run
        torch.load(trap, weights_only=False)
    assert sprung.exists()  # the trap would have worked
