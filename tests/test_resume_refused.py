"""What may start in a run folder and from what: what is refused, in one line, before anything is
touched, and what --allow_changed, --init_from and --overwrite then do."""

import fcntl
import json
import math
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from tests.resuming import (
    assert_same_bits,
    names_in,
    path_of,
    prepared,
    refusal,
    run_leg,
    samples_of,
    saved_at,
    start,
)
from tests.tiny import curve, metrics_of, run_main
from training import run_lock
from training.checkpoint_file import load_checkpoint


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory) -> Path:
    return prepared(tmp_path_factory.mktemp("refused"))


@pytest.fixture(scope="module")
def source(tmp_path_factory, data_dir) -> Path:
    """A run of ten steps."""
    out_dir = tmp_path_factory.mktemp("source") / "run"
    start(run_main, 2, data_dir, out_dir, iterations=10)
    return out_dir


@pytest.fixture
def copied(tmp_path, source) -> Path:
    """A copy of that run to go on with."""
    return shutil.copytree(source, tmp_path / "copied")


def contents(folder: Path) -> dict[str, bytes]:
    """Of all files below, but of the lock, which every start signs."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".lock"
    }


# The data.


def test_other_text_of_the_same_shape_is_refused_unless_it_is_allowed(tmp_path, data_dir, copied):
    other = shutil.copytree(data_dir, tmp_path / "data")
    tokens = np.load(other / "train.npy")
    np.save(other / "train.npy", np.roll(tokens, 1))
    before = contents(copied)
    options = {"resume": "auto", "iterations": 12}
    message = refusal(run_main, 2, other, copied, **options)
    assert "these are not the token files that the checkpoint was trained on" in message
    assert message.endswith("--allow_changed data")
    assert contents(copied) == before
    legs = start(run_leg, 2, other, copied, allow_changed="data", **options)
    assert "changed since: data: " in legs[0].said
    assert sorted(samples_of(legs)) == list(range(80, 96))


def test_another_tokenizer_is_refused_unless_it_is_allowed(tmp_path, data_dir, copied):
    other = prepared(tmp_path / "other", seed=1)
    options = {"resume": "auto", "iterations": 12}
    message = refusal(run_main, 2, other, copied, **options)
    assert "prepared with another tokenizer" in message
    assert message.endswith("--allow_changed tokenizer data")
    legs = start(run_leg, 2, other, copied, **options, allow_changed="[tokenizer, data]")
    assert "changed since: tokenizer: " in legs[0].said
    now = json.loads(saved_at(copied, 12)["tokenizer"])
    assert now == json.loads((other / "tokenizer.json").read_text())


# The file.


def weights_alone(source: Path, path: Path) -> Path:
    """What a user saves by hand: a dict of tensors."""
    torch.save(dict(saved_at(source, 10)["model"]), path)
    return path


def test_a_file_of_weights_alone_is_refused(tmp_path, data_dir, source):
    path = weights_alone(source, tmp_path / "weights.pt")
    for options in ({"resume": path}, {"init_from": path}):
        message = refusal(run_main, 2, data_dir, tmp_path / "run", **options)
        assert message == f"{path} is no checkpoint of train_ddp.py"
    assert not list((tmp_path / "run").glob("checkpoints/*"))


def test_a_file_of_weights_alone_among_checkpoints_is_set_aside_and_named(data_dir, copied):
    weights_alone(copied, path_of(copied, 99))
    (leg, _) = start(run_leg, 2, data_dir, copied, resume="auto", iterations=12)
    aside = "set aside as ckpt_00000099.pt.damaged"
    assert f"{path_of(copied, 99)} is no checkpoint of train_ddp.py; {aside}" in leg.said
    assert f"resumed from {path_of(copied, 10)} after 10 steps" in leg.said
    assert len(curve(metrics_of(copied))) == 12


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"iterations": "many"}, "option iterations"),
        ({"lr_max": "fast"}, "option lr_max"),
        ({"seed": 1.5}, "option seed"),
        ({"resume": "auto", "overwrite": "true"}, "resume and overwrite exclude each other"),
        ({"allow_changed": "sed"}, "allow_changed does not know sed; did you mean seed?"),
        ({"max_minutes": 0}, "max_minutes is 0.0, it must be above 0"),
    ],
)
def test_a_wrong_option_is_refused_before_the_folder_is_touched(data_dir, copied, options, message):
    before = contents(copied)
    assert message in refusal(run_main, 2, data_dir, copied, **options)
    assert contents(copied) == before


# A new run from weights.


def test_a_new_run_from_weights_begins_at_0_with_them_and_nothing_else(tmp_path, data_dir, source):
    """At another number of ranks, rate and seed."""
    path = path_of(source, 10)
    options = {"init_from": path, "lr_max": 1e-3, "lr_min": 1e-3, "seed": 5}
    start(run_main, 1, data_dir, tmp_path / "begun", iterations=0, **options)
    begun = saved_at(tmp_path / "begun", 0)
    assert begun["model"].keys() == saved_at(source, 10)["model"].keys()
    for name, tensor in saved_at(source, 10)["model"].items():
        assert torch.equal(tensor, begun["model"][name]), name
    assert (begun["optimizer"], begun["samples"], begun["best_val_loss"]) == ({}, 0, math.inf)

    (leg,) = start(run_leg, 1, data_dir, tmp_path / "run", iterations=5, **options)
    assert f"weights taken from {path}, of step 10; all else begins anew" in leg.said
    assert sorted(leg.read) == list(range(40))
    entries = metrics_of(tmp_path / "run")
    assert [entry["iteration"] for entry in entries if "lr" in entry] == [1, 2, 3, 4, 5]
    assert curve(entries, "lr") == pytest.approx([1e-3 * min(1, n / 4) for n in range(1, 6)])
    saved = saved_at(tmp_path / "run", 5)
    assert {int(entries["step"]) for entries in saved["optimizer"].values()} == {5}


def test_the_validation_loss_of_a_new_run_begins_where_the_weights_own_run_ended(
    tmp_path, data_dir, source
):
    options = {"init_from": path_of(source, 10), "iterations": 0}
    ended = curve(metrics_of(source), "val_loss")[-1]
    for world_size, relative in ((2, 0.0), (4, 1e-6)):
        out_dir = tmp_path / str(world_size)
        start(run_main, world_size, data_dir, out_dir, **options)
        begins = curve(metrics_of(out_dir), "val_loss")
        assert begins == [pytest.approx(ended, rel=relative, abs=0)]


def test_the_folders_own_checkpoint_wins_over_weights_to_begin_with(tmp_path, data_dir, source):
    """So a job that is queued again with the same options goes on."""
    options = {"init_from": path_of(source, 10), "resume": "auto", "iterations": 8, "seed": 5}
    straight = start(run_leg, 2, data_dir, tmp_path / "straight", **options)
    legs = [start(run_leg, 2, data_dir, tmp_path / "run", stop, **options) for stop in (5, None)]
    assert "weights taken from" in legs[0][0].said
    assert "weights taken from" not in legs[1][0].said
    assert "resumed from" in legs[1][0].said
    assert samples_of([*legs[0], *legs[1]]) == samples_of(straight)
    assert_same_bits(saved_at(tmp_path / "run", 8), saved_at(tmp_path / "straight", 8))


def test_weights_to_begin_with_that_do_not_fit_are_refused(tmp_path, data_dir, source, copied):
    path = path_of(source, 10)
    other = prepared(tmp_path / "other", seed=1)
    refused: list[tuple[Path, dict[str, Any], str]] = [
        (data_dir, {"d_model": 32}, "embedding.weight is (448, 64) there and (448, 32) here"),
        (data_dir, {"num_layers": 1}, "blocks.1."),
        (data_dir, {"num_heads": 4}, "num_heads 2 -> 4, num_kv_heads 2 -> 4: these weights"),
        (other, {}, "prepared with another tokenizer"),
        (data_dir, {"resume": path}, "init_from starts a new run and resume goes on with one"),
        (data_dir, {"init_from": tmp_path / "none.pt"}, "none.pt does not exist"),
    ]
    for data, options, message in refused:
        argv = {"init_from": path, **options}
        assert message in refusal(run_main, 2, data, tmp_path / "run", **argv), options
        assert not list((tmp_path / "run").glob("checkpoints/*"))
    before = contents(copied)
    message = refusal(run_main, 2, data_dir, copied, init_from=path)
    assert "holds a run of 10 steps" in message
    assert contents(copied) == before
    allowed = {"init_from": path, "allow_changed": "tokenizer", "iterations": 1}
    start(run_main, 2, other, tmp_path / "run", **allowed)
    assert len(curve(metrics_of(tmp_path / "run"))) == 1


# The folder.


def test_overwrite_deletes_what_a_run_wrote_and_nothing_that_is_named_alike(data_dir, copied):
    """A run with everything that one can leave behind, beside a user's own files."""
    best = copied / "checkpoints" / "best.pt"
    shutil.copy(best, path_of(copied, 20))
    start(run_main, 1, data_dir, copied, resume=path_of(copied, 10), iterations=12)
    for _ in range(2):
        path_of(copied, 30).write_bytes(b"half")
        start(run_main, 1, data_dir, copied, resume="auto", iterations=12)
    (copied / "checkpoints" / ".ckpt_00000040.pt.4711.tmp").write_bytes(b"half")
    assert names_in(copied / "checkpoints")[1:] == [
        "best.pt",
        "ckpt_00000010.pt",
        "ckpt_00000012.pt",
        "ckpt_00000020.pt.superseded",
        "ckpt_00000030.pt.damaged",
        "ckpt_00000030.pt.damaged.1",
    ]
    mine = [
        copied / name
        for name in (
            "notes.txt",
            "metrics.jsonl.bak",
            "plots/loss.png",
            "checkpoints/ckpt_good.pt",
            "checkpoints/ckpt_00000010.pt.bak",
            "checkpoints/best.pt.bak",
            "checkpoints/other.pt",
            "tensorboard/notes.txt",
        )
    ]
    for path in mine:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    start(run_main, 1, data_dir, copied, overwrite="true", iterations=3, val_interval=0)
    assert [path.name for path in mine if not path.exists()] == []
    left = {path for path in copied.rglob("*") if path.is_file()} - set(mine)
    events = list((copied / "tensorboard").glob("events*"))
    assert len(events) == 1
    assert sorted(str(path.relative_to(copied)) for path in left - set(events)) == [
        ".lock",
        "checkpoints/ckpt_00000003.pt",
        "config.yaml",
        "metrics.jsonl",
        "status",
    ]
    assert [entry["iteration"] for entry in metrics_of(copied)] == [1, 2, 3]


def run_impatiently(argv: list[str]) -> None:
    """The job, which does not wait for a folder that another run is about to leave."""
    with mock.patch.object(run_lock, "SECONDS_FOR_THE_LAST_ONE", 0.1):
        run_main(argv)


@pytest.mark.parametrize(
    "options", [{}, {"resume": "auto"}, {"overwrite": "true"}], ids=lambda options: str(options)
)
def test_a_folder_in_which_a_run_is_under_way_is_left_alone(data_dir, copied, options):
    before = contents(copied)
    with (copied / ".lock").open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        message = refusal(run_impatiently, 2, data_dir, copied, iterations=12, **options)
    assert "is in use by another run (process " in message
    assert contents(copied) == before


def test_a_run_that_has_ended_leaves_its_folder_free(data_dir, copied):
    start(run_impatiently, 2, data_dir, copied, resume="auto", iterations=12)
    assert load_checkpoint(path_of(copied, 12))["iteration"] == 12
