"""The training job as a whole: one curve, exact resume, and one clear line for bad input."""

import os
import signal
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import prepare
from tests.harness import (
    DistributedError,
    run_distributed,
    run_python,
    run_torchrun,
    start_torchrun,
)
from tests.tiny import TINY, curve, flags, metrics_of, run_main, train, write_corpus
from training.checkpoint_file import load_checkpoint


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    texts = write_corpus(folder / "texts")
    options = prepare.PrepareConfig(
        input=[str(texts)], out_dir=str(folder / "data"), vocab_size=400
    )
    prepare.prepare(options, show_progress=False)
    return folder / "data"


@pytest.fixture(scope="session")
def reference(tmp_path_factory, data_dir) -> Path:
    """A run of 50 steps at one process, its whole batch in one piece."""
    out_dir = tmp_path_factory.mktemp("reference") / "run"
    train(1, data_dir, out_dir, iterations=50)
    return out_dir


def final(out_dir: Path, iteration: int) -> dict:
    return load_checkpoint(out_dir / "checkpoints" / f"ckpt_{iteration:08d}.pt")


def assert_same_bits(one: dict, other: dict) -> None:
    assert one["iteration"] == other["iteration"]
    assert one["model"].keys() == other["model"].keys()
    for name, tensor in one["model"].items():
        assert torch.equal(tensor, other["model"][name]), name
    assert one["optimizer"].keys() == other["optimizer"].keys()
    for name, state in one["optimizer"].items():
        for key, value in state.items():
            theirs = other["optimizer"][name][key]
            same = torch.equal(value, theirs) if torch.is_tensor(value) else value == theirs
            assert same, (name, key)


def error_of(world_size: int, data_dir: Path, out_dir: Path, **options) -> str:
    """What rank 0 says to a mistake; every rank must have met it."""
    with pytest.raises(DistributedError) as caught:
        train(world_size, data_dir, out_dir, **options)
    failures = caught.value.failures
    assert set(failures) == set(range(world_size)), failures
    mistakes = {
        "CommandLineError",
        "CorpusError",
        "CheckpointError",
        "ModelConfigError",
        "ProcessGroupError",
    }
    assert failures[0].kind in mistakes, failures[0]
    return failures[0].message


# One curve.


@pytest.mark.parametrize(
    ("world_size", "options"),
    [
        (1, {"gradient_accumulation_steps": 4}),
        (2, {"shard_optimizer": "false"}),
        (2, {"gradient_accumulation_steps": 2, "shard_optimizer": "true"}),
        (4, {"bucket_cap_mb": 0.01, "shard_optimizer": "false"}),
        (4, {"gradient_accumulation_steps": 2, "bucket_cap_mb": 0.1, "shard_optimizer": "true"}),
    ],
)
def test_the_curve_does_not_depend_on_how_many_compute_it(
    tmp_path, data_dir, reference, world_size, options
):
    entries = train(world_size, data_dir, tmp_path / "run", iterations=50, **options)
    for name in ("loss_train", "val_loss", "grad_norm"):
        expected = curve(metrics_of(reference), name)
        tolerance = 2e-4 if name == "grad_norm" else 2e-5
        assert curve(entries, name) == pytest.approx(expected, rel=tolerance), name
    assert len(curve(entries)) == 50
    weights = final(tmp_path / "run", 50)["model"]
    for name, tensor in final(reference, 50)["model"].items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-3, atol=2e-4)


def test_the_same_run_twice_is_the_same_to_the_bit(tmp_path, data_dir):
    for name in ("one", "other"):
        train(2, data_dir, tmp_path / name, dropout=0.1)
    assert_same_bits(final(tmp_path / "one", 20), final(tmp_path / "other", 20))
    one, other = metrics_of(tmp_path / "one"), metrics_of(tmp_path / "other")
    assert curve(one) == curve(other)


def test_another_seed_is_another_run(tmp_path, data_dir, reference):
    entries = train(1, data_dir, tmp_path / "run", seed=1, iterations=2)
    assert curve(entries) != curve(metrics_of(reference))[:2]


def test_ranks_draw_their_dropout_from_generators_of_their_own(tmp_path, data_dir):
    train(2, data_dir, tmp_path / "run", dropout=0.5, iterations=1)
    first, second = (state["torch"] for state in final(tmp_path / "run", 1)["rng"])
    assert not torch.equal(first, second)


def test_validating_more_often_changes_nothing_in_training(tmp_path, data_dir):
    often = train(2, data_dir, tmp_path / "often", val_interval=1, dropout=0.1)
    never = train(2, data_dir, tmp_path / "never", val_interval=0, dropout=0.1)
    assert curve(often) == curve(never)
    assert len(curve(often, "val_loss")) == 21
    assert curve(never, "val_loss") == []


def test_the_loss_shown_is_the_mean_over_all_ranks_and_micro_batches(tmp_path, data_dir):
    """With a learning rate of 0 every split of the batch sees the same weights."""
    frozen = {"lr_max": 0, "lr_min": 0, "iterations": 3, "val_interval": 1}
    one = train(1, data_dir, tmp_path / "one", **frozen)
    four = train(4, data_dir, tmp_path / "four", gradient_accumulation_steps=2, **frozen)
    assert curve(four) == pytest.approx(curve(one), rel=1e-6)
    assert curve(four, "val_loss") == pytest.approx(curve(one, "val_loss"), rel=1e-6)
    assert len(set(curve(one))) == 3
    assert len(set(curve(one, "val_loss"))) == 1


def test_bfloat16_follows_float32_and_keeps_its_weights_wide(tmp_path, data_dir, reference):
    entries = train(2, data_dir, tmp_path / "run", dtype="bfloat16", iterations=50)
    assert curve(entries)[-1] == pytest.approx(curve(metrics_of(reference))[-1], rel=0.02)
    saved = final(tmp_path / "run", 50)
    moments = [state["exp_avg"] for state in saved["optimizer"].values()]
    for tensor in [*saved["model"].values(), *moments]:
        assert tensor.dtype == torch.float32


# Counting, epochs, checkpoints.


@pytest.mark.parametrize(("iterations", "expected"), [(0, [0]), (1, [1]), (5, [5]), (6, [5, 6])])
def test_exactly_as_many_updates_as_asked_for_and_the_last_is_saved(
    tmp_path, data_dir, iterations, expected
):
    entries = train(
        1, data_dir, tmp_path / "run", iterations=iterations, checkpoint_interval=5, val_interval=0
    )
    assert len(curve(entries)) == iterations
    folder = tmp_path / "run" / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == [
        f"ckpt_{number:08d}.pt" for number in expected
    ]
    state = final(tmp_path / "run", iterations)["optimizer"]
    assert {int(entry["step"]) for entry in state.values()} == ({iterations} - {0})


def test_the_newest_checkpoints_and_the_best_are_kept(tmp_path, data_dir):
    options = {"checkpoint_interval": 1, "keep_checkpoints": 2, "iterations": 12, "val_interval": 4}
    entries = train(1, data_dir, tmp_path / "run", **options)
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert names == ["best.pt", "ckpt_00000011.pt", "ckpt_00000012.pt"]
    best = load_checkpoint(tmp_path / "run" / "checkpoints" / "best.pt")
    assert best["best_val_loss"] == min(curve(entries, "val_loss")[1:])


def test_epochs_train_on_every_window_in_turn(tmp_path, data_dir):
    entries = train(2, data_dir, tmp_path / "two", epochs=0.05)
    alone = train(1, data_dir, tmp_path / "one", epochs=0.05)
    assert curve(entries) == pytest.approx(curve(alone), rel=2e-5)
    assert len(curve(entries)) < 50


# Exact resume.


@pytest.mark.parametrize(("world_size", "shard"), [(1, "false"), (2, "true")])
def test_a_resumed_run_is_the_run_that_was_never_stopped(tmp_path, data_dir, world_size, shard):
    options = {"dropout": 0.1, "shard_optimizer": shard, "cos_cycle_iters": 20}
    straight = train(world_size, data_dir, tmp_path / "straight", **options)
    train(world_size, data_dir, tmp_path / "stopped", iterations=13, **options)
    resumed = train(world_size, data_dir, tmp_path / "stopped", resume="auto", **options)
    assert_same_bits(final(tmp_path / "straight", 20), final(tmp_path / "stopped", 20))
    for name in ("loss_train", "lr", "grad_norm"):
        assert curve(resumed, name) == curve(straight, name), name
    steps = [entry["iteration"] for entry in resumed if "loss_train" in entry]
    assert steps == list(range(1, 21))


@pytest.mark.parametrize(("before", "after"), [(4, 1), (1, 2), (2, 4)])
def test_a_run_resumed_at_another_world_size_follows_the_same_curve(
    tmp_path, data_dir, reference, before, after
):
    options = {"cos_cycle_iters": 50, "val_interval": 0}
    sharded, plain = ({"shard_optimizer": flag} for flag in ("true", "false"))
    train(before, data_dir, tmp_path / "run", iterations=10, **options, **sharded)
    shape = {"iterations": 20, "resume": "auto"}
    resumed = train(after, data_dir, tmp_path / "run", **options, **shape, **plain)
    assert curve(resumed) == pytest.approx(curve(metrics_of(reference))[:20], rel=2e-5)


def test_resuming_a_finished_run_does_nothing(tmp_path, data_dir):
    before = train(1, data_dir, tmp_path / "run")
    saved = (tmp_path / "run" / "config.yaml").read_text()
    for iterations in (20, 5):
        options = {"resume": "auto", "iterations": iterations}
        assert train(1, data_dir, tmp_path / "run", **options) == before
    assert (tmp_path / "run" / "config.yaml").read_text() == saved


def test_a_longer_run_made_of_a_saved_configuration_has_its_own_schedule(tmp_path, data_dir):
    options = {"warmup_iters": "null"}
    train(1, data_dir, tmp_path / "short", iterations=4, **options)
    saved = tmp_path / "short" / "config.yaml"
    argv = flags(config=saved, iterations=20, out_dir=tmp_path / "long")
    run_distributed(run_main, 1, argv, process_group=False)
    straight = train(1, data_dir, tmp_path / "straight", iterations=20, **options)
    assert curve(metrics_of(tmp_path / "long"), "lr") == curve(straight, "lr")


def test_a_run_that_goes_on_in_a_new_folder_finds_a_best_model_there(tmp_path, data_dir, reference):
    best = reference / "checkpoints" / "best.pt"
    # A learning rate of 1 ruins the model: nothing gets better than what it began with.
    ruin = {"lr_max": 1, "lr_min": 1, "warmup_iters": 0, "val_interval": 1}
    train(1, data_dir, tmp_path / "run", resume=best, iterations=52, **ruin)
    assert (tmp_path / "run" / "checkpoints" / "best.pt").exists()


def test_resume_auto_in_an_empty_folder_starts_afresh(tmp_path, data_dir):
    assert len(curve(train(1, data_dir, tmp_path / "run", resume="auto", iterations=2))) == 2


def test_a_damaged_newest_checkpoint_is_passed_over(tmp_path, data_dir):
    straight = train(1, data_dir, tmp_path / "run")
    newest = tmp_path / "run" / "checkpoints" / "ckpt_00000020.pt"
    newest.write_bytes(newest.read_bytes()[:5000])
    assert curve(train(1, data_dir, tmp_path / "run", resume="auto")) == curve(straight)


def test_a_full_disk_stops_the_save_and_not_the_training(tmp_path, data_dir):
    options = {**TINY, "data_dir": data_dir, "cos_cycle_iters": 30, "dropout": 0.1}
    straight = train(2, **{**options, "out_dir": tmp_path / "straight", "iterations": 30})
    train(2, **{**options, "out_dir": tmp_path / "run", "iterations": 10})
    folder = tmp_path / "run" / "checkpoints"
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    argv = flags(**{**options, "out_dir": tmp_path / "run", "iterations": 30, "resume": "auto"})
    with pytest.raises(DistributedError) as caught:
        run_distributed(run_main, 2, argv, 100_000, process_group=False)
    failures = caught.value.failures.values()
    assert {failure.kind for failure in failures} == {"CheckpointError"}
    assert all("step 30 not saved" in failure.message for failure in failures)
    assert curve(metrics_of(tmp_path / "run")) == curve(straight)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before

    train(2, **{**options, "out_dir": tmp_path / "run", "iterations": 30, "resume": "auto"})
    assert_same_bits(final(tmp_path / "run", 30), final(tmp_path / "straight", 30))


def test_a_run_that_has_only_its_best_checkpoint_goes_on_from_it(tmp_path, data_dir):
    options = {"val_interval": 5, "checkpoint_interval": 0}
    straight = train(1, data_dir, tmp_path / "run", **options)
    folder = tmp_path / "run" / "checkpoints"
    (folder / "ckpt_00000020.pt").unlink()  # as after a kill before the last step
    assert "holds a run" in error_of(1, data_dir, tmp_path / "run", **options)
    resumed = train(1, data_dir, tmp_path / "run", resume="auto", **options)
    assert curve(resumed) == curve(straight)


def test_a_checkpoint_of_one_run_does_not_go_on_in_the_folder_of_another(
    tmp_path, data_dir, reference
):
    before = train(1, data_dir, tmp_path / "run", iterations=5)
    other = reference / "checkpoints" / "ckpt_00000050.pt"
    message = error_of(1, data_dir, tmp_path / "run", resume=other, iterations=60)
    assert "holds a run of 5 steps" in message
    assert metrics_of(tmp_path / "run") == before


def test_a_batch_of_another_size_is_refused_on_resume(tmp_path, data_dir):
    train(1, data_dir, tmp_path / "run", iterations=5)
    message = error_of(1, data_dir, tmp_path / "run", resume="auto", batch_size=4)
    assert "batch_size 8 -> 4: this would change which text each step trains on" in message


@pytest.mark.parametrize(
    "options", [{"num_heads": 4}, {"tie_weights": "true"}, {"rope_theta": 500.0}]
)
def test_a_model_that_would_read_the_weights_otherwise_is_refused(tmp_path, data_dir, options):
    train(1, data_dir, tmp_path / "run", iterations=2, qk_norm="false")
    options = {"qk_norm": "false", "resume": "auto", **options}
    message = error_of(1, data_dir, tmp_path / "run", **options)
    assert "another model's" in message


def test_a_fresh_start_deletes_nothing_that_no_run_wrote(tmp_path, data_dir):
    foreign = [tmp_path / "run" / name for name in ("checkpoints", "tensorboard", ".")]
    for folder in foreign:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "mine.st").write_text("mine")
    for overwrite in ("false", "true"):
        train(1, data_dir, tmp_path / "run", iterations=1, overwrite=overwrite)
        assert all((folder / "mine.st").read_text() == "mine" for folder in foreign)
    assert len(list((tmp_path / "run" / "tensorboard").glob("events*"))) == 1


def test_what_a_killed_save_left_is_cleared_away(tmp_path, data_dir):
    train(1, data_dir, tmp_path / "run", iterations=5)
    left = tmp_path / "run" / "checkpoints" / ".ckpt_00000010.pt.4711.tmp"
    left.write_bytes(b"half")
    train(1, data_dir, tmp_path / "run", resume="auto")
    assert not left.exists()


def test_an_older_checkpoint_that_is_named_starts_another_history(tmp_path, data_dir):
    straight = train(1, data_dir, tmp_path / "run")
    folder = tmp_path / "run" / "checkpoints"
    resumed = train(1, data_dir, tmp_path / "run", resume=folder / "ckpt_00000010.pt")
    assert curve(resumed) == curve(straight)
    assert (folder / "ckpt_00000020.pt.superseded").exists()


# A step whose gradient is not finite.


def test_a_run_that_diverges_ends_with_a_clear_line_on_all_ranks(tmp_path, data_dir):
    with pytest.raises(DistributedError) as caught:
        # Weights of 1e30 overflow in the next forward pass.
        train(2, data_dir, tmp_path / "run", lr_max=1e30, lr_min=1e30, max_skipped_steps=3)
    failures = caught.value.failures
    assert {failure.kind for failure in failures.values()} == {"DivergedError"}
    assert "3 steps in a row had no update" in failures[0].message


# Bad input: one clear line each, before anything is written.


def test_a_batch_that_does_not_divide_is_refused(tmp_path, data_dir):
    message = error_of(2, data_dir, tmp_path / "run", batch_size=6, gradient_accumulation_steps=2)
    assert (
        message == "batch_size 6 does not divide by 2 processes x 2 accumulation steps: use 4 or 8"
    )
    assert not (tmp_path / "run").exists()


def test_a_width_that_does_not_divide_by_the_heads_is_refused(tmp_path, data_dir):
    message = error_of(2, data_dir, tmp_path / "run", num_heads=3)
    assert "d_model 64 does not divide by num_heads 3" in message
    assert not (tmp_path / "run").exists()


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused(tmp_path, data_dir):
    message = error_of(1, data_dir, tmp_path / "run", vocab_size=300)
    assert "vocab_size 300 is smaller than the tokenizer's 400" in message


def test_a_context_longer_than_the_corpus_is_refused_with_both_numbers(tmp_path, data_dir):
    message = error_of(2, data_dir, tmp_path / "run", max_seq_len=1_000_000)
    assert "1000001" in message
    assert not (tmp_path / "run").exists()


def test_a_missing_data_folder_is_refused_with_what_to_do(tmp_path):
    message = error_of(2, tmp_path / "nothing", tmp_path / "run")
    assert "nothing" in message
    assert "prepare.py" in message


def test_a_missing_checkpoint_is_refused(tmp_path, data_dir):
    message = error_of(2, data_dir, tmp_path / "run", resume=tmp_path / "none.pt")
    assert "none.pt does not exist" in message
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_of_another_model_is_refused_by_its_first_difference(
    tmp_path, data_dir, reference
):
    other = reference / "checkpoints" / "ckpt_00000050.pt"
    message = error_of(2, data_dir, tmp_path / "run", resume=other, d_model=32)
    assert "another model's: embedding.weight is (448, 64) there and (448, 32) here" in message


def test_a_folder_that_holds_a_run_is_not_touched_without_a_word(tmp_path, data_dir):
    before = train(1, data_dir, tmp_path / "run", iterations=10)
    message = error_of(2, data_dir, tmp_path / "run", iterations=10)
    assert "holds a run of 10 steps" in message
    assert metrics_of(tmp_path / "run") == before
    anew = train(1, data_dir, tmp_path / "run", iterations=5, overwrite="true")
    assert len(curve(anew)) == 5


def test_more_processes_than_a_batch_has_rows_is_refused(tmp_path, data_dir):
    assert "use 4" in error_of(4, data_dir, tmp_path / "run", batch_size=2)


# The real commands.


def test_a_mistake_is_one_line_once_for_all_ranks(tmp_path, data_dir):
    done = run_torchrun("train_ddp.py", 2, "--batch_szie", "8", "--data_dir", data_dir, timeout=60)
    assert done.returncode != 0
    said = [line for line in done.stderr.splitlines() if line.startswith("train_ddp.py:")]
    assert said == [
        "train_ddp.py: unknown option batch_szie; did you mean batch_size? (--help lists all)"
    ]


def test_a_killed_run_goes_on_where_its_last_checkpoint_was(tmp_path, data_dir):
    options = {
        **TINY,
        "data_dir": data_dir,
        "out_dir": tmp_path / "killed",
        "iterations": 60,
        "checkpoint_interval": 5,
        "val_interval": 0,
        "dropout": 0.1,
    }
    with start_torchrun("train_ddp.py", 2, *flags(**options)) as job:
        wait_for(tmp_path / "killed" / "checkpoints" / "ckpt_00000010.pt", job)
        for pid in job.rank_pids().values():
            os.kill(pid, signal.SIGKILL)
        assert job.wait(60).returncode != 0
    train(2, **{**options, "resume": "auto"})
    straight = train(2, **{**options, "out_dir": tmp_path / "straight"})
    assert_same_bits(final(tmp_path / "killed", 60), final(tmp_path / "straight", 60))
    assert curve(metrics_of(tmp_path / "killed")) == curve(straight)


def wait_for(path: Path, job) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, job.stderr
        time.sleep(0.01)


def test_prepare_train_resume_and_generate_through_the_real_commands(tmp_path):
    write_corpus(tmp_path / "texts")
    prepared = run_python(
        "prepare.py", "--input", "texts", "--out_dir", "d", "--vocab_size", "400", cwd=tmp_path
    )
    assert prepared.returncode == 0, prepared.stderr

    shape = flags(**{**TINY, "data_dir": "d", "out_dir": "runs/a", "cos_cycle_iters": 30})
    first = run_torchrun("train_ddp.py", 2, *shape, cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    assert "step 20/20 | loss " in first.stdout
    shares = "4 sequences x 1 micro-batches x 2 processes x 64 tokens = 512 tokens a step"
    assert f"batch: {shares}" in first.stdout
    assert "validation loss" in first.stdout
    more = ["--iterations", "30", "--resume", "auto"]
    second = run_torchrun("train_ddp.py", 2, *shape, *more, cwd=tmp_path)
    assert second.returncode == 0, second.stderr
    assert "resumed from runs/a/checkpoints/ckpt_00000020.pt after 20 steps" in second.stdout
    assert "changed since: iterations: 20 -> 30" in second.stdout

    losses = curve(metrics_of(tmp_path / "runs" / "a"))
    assert len(losses) == 30
    assert losses[-1] < losses[0] - 0.5
    board = EventAccumulator(str(tmp_path / "runs" / "a" / "tensorboard")).Reload()
    assert [event.step for event in board.Scalars("loss_train")] == list(range(1, 31))

    text = run_python(
        "generate.py", "runs/a/checkpoints/best.pt", "abc", "--max_new_tokens", "20", cwd=tmp_path
    )
    assert text.returncode == 0, text.stderr
    assert text.stdout.startswith("abc")
    assert len(text.stdout) > 10


def signalled_at_the_start(argv: list[str]) -> None:
    """As by a cluster that takes its machine back while the job is still reading its checkpoint."""
    import train_ddp

    begin = train_ddp.resume_or_start

    def signalled(*args):
        os.kill(os.getpid(), signal.SIGTERM)
        begin(*args)

    with mock.patch.object(train_ddp, "resume_or_start", signalled):
        run_main(argv)


def test_a_signal_while_the_run_starts_lets_it_save_and_leave(tmp_path, data_dir):
    argv = flags(**{**TINY, "data_dir": data_dir, "out_dir": tmp_path / "run"})
    run_distributed(signalled_at_the_start, 2, argv, process_group=False)
    assert final(tmp_path / "run", 1)["iteration"] == 1
    assert (tmp_path / "run" / "status").read_text() == "to be continued: SIGTERM\n"
