"""The configuration of a run: what follows from what, and what is refused."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from training.command_line import CommandLineError
from training.config import Config, load_config, write_config
from training.config_checks import check, check_timeout, with_length
from training.resume import ALLOWABLE

CONFIGS = Path(__file__).parents[2] / "configs"


def config_of(*argv: str) -> Config:
    return load_config("A test.", argv)


def problems_of(*argv: str, world_size: int = 1) -> str:
    with pytest.raises(CommandLineError) as caught:
        check(config_of(*argv), world_size)
    return str(caught.value)


def test_the_defaults_work_at_1_2_and_4_processes():
    for world_size in (1, 2, 4):
        check(config_of(), world_size)


def test_a_batch_that_does_not_divide_is_refused_with_the_sizes_that_would():
    message = problems_of("--batch_size", "30", "--gradient_accumulation_steps", "2", world_size=4)
    assert message == (
        "batch_size 30 does not divide by 4 processes x 2 accumulation steps: use 24 or 32"
    )


def test_a_batch_smaller_than_the_processes_is_told_the_smallest_that_works():
    assert problems_of("--batch_size", "3", world_size=4).endswith("use 4")


def test_float16_products_of_bfloat16_weights_are_refused():
    check(config_of("--dtype", "float16"), 1)
    message = problems_of("--dtype", "float16", "--param_dtype", "bfloat16")
    assert message == "param_dtype bfloat16 goes with dtype bfloat16 or float32, not float16"


def test_a_scaler_that_yaml_takes_for_a_boolean_is_told_how_to_write_it(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text('grad_scaler: "on"\n')
    assert config_of("--config", str(path)).device.grad_scaler == "on"
    path.write_text("grad_scaler: on\n")
    with pytest.raises(CommandLineError, match=r'grad_scaler: .* so write "on" and "off"$'):
        config_of("--config", str(path))


def test_all_problems_stand_in_one_message():
    message = problems_of(
        "--lr_min", "1", "--keep_checkpoints", "0", "--beta2", "1", "--max_norm", "0"
    )
    for part in ("lr_min 1.0 is above", "keep_checkpoints is 0", "beta2 is 1", "max_norm is 0"):
        assert part in message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("iterations", "-1"),
        ("epochs", "0"),
        ("log_interval", "0"),
        ("val_interval", "-1"),
        ("warmup_iters", "-1"),
        ("seed", "-1"),
        ("bucket_cap_mb", "0"),
        ("weight_decay", "nan"),
        ("max_minutes", "0"),
        ("max_minutes", "-1"),
        ("max_minutes", "nan"),
        ("spike_factor", "1"),
        ("spike_factor", "-2"),
        ("spike_factor", "nan"),
    ],
)
def test_a_value_without_meaning_is_named(name, value):
    assert name in problems_of(f"--{name}", value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("batch_size", "99999999999"),
        ("iterations", f"1{'0' * 400}"),
        ("decay_iters", "99999999999999"),
        ("gradient_accumulation_steps", "99999999999999"),
        ("timeout_seconds", "1e300"),
    ],
)
def test_a_number_beyond_all_use_is_refused_by_name(name, value):
    assert f"{name} " in problems_of(f"--{name}", value)


def test_a_batch_too_large_for_one_process_may_be_cut_in_parts():
    argv = ["--batch_size", str(2**20), "--max_seq_len", "1024"]
    assert "1073741824 tokens that a process computes at once" in problems_of(*argv)
    check(config_of(*argv, "--gradient_accumulation_steps", "64"), 1)
    check(config_of(*argv), 64)


@pytest.mark.parametrize("seconds", [1e300, math.inf, math.nan, 0.0])
def test_a_timeout_that_nobody_can_wait_for_is_refused_before_processes_meet(seconds):
    with pytest.raises(CommandLineError, match=r"timeout_seconds is .* a year at most"):
        check_timeout(seconds)
    check_timeout(24 * 3600.0)


@pytest.mark.parametrize("epochs", ["1e300", "1e308"])
def test_epochs_beyond_all_steps_are_refused(epochs):
    with pytest.raises(CommandLineError, match=r"epochs is 1e\+30.* steps: use fewer"):
        with_length(config_of("--epochs", epochs), 10**6)


@pytest.mark.parametrize(
    "argv",
    [
        ["--max_minutes", "0.5"],
        ["--spike_factor", "1.5"],
        ["--spike_factor", "0"],
        ["--init_from", "other.pt"],
        ["--init_from", "other.pt", "--overwrite"],
        ["--init_from", "other.pt", "--resume", "auto"],
        ["--allow_changed", *ALLOWABLE, "--resume", "auto"],
    ],
)
def test_how_a_run_may_be_started_and_watched(argv):
    check(config_of(*argv), 1)


def test_a_run_starts_from_one_thing_alone():
    both = ["--init_from", "other.pt", "--resume", "this.pt"]
    assert "init_from starts a new run and resume goes on with one" in problems_of(*both)
    assert "exclude each other" in problems_of("--resume", "auto", "--overwrite")


@pytest.mark.parametrize("name", ["resume", "init_from"])
def test_a_checkpoint_without_a_name_is_refused(name):
    assert problems_of(f"--{name}", "") == f"{name} is empty: name a checkpoint, or leave it out"


def test_a_misspelt_name_of_what_may_change_is_answered_with_the_nearest_one(tmp_path):
    flag = problems_of("--allow_changed", "seed", "batchsize", "lr_max", "--max_minutes", "0")
    assert "allow_changed does not know batchsize; did you mean batch_size? (it knows seed" in flag
    assert "does not know lr_max" in flag
    assert "does not know seed" not in flag
    assert "max_minutes is 0" in flag
    file = tmp_path / "options.yaml"
    file.write_text("allow_changed: [token]\n")
    assert "token; did you mean tokenizer?" in problems_of("--config", str(file))


def test_a_checkpoint_is_written_in_the_background_unless_it_is_switched_off(tmp_path):
    assert config_of().run.async_checkpoint
    assert not config_of("--async_checkpoint", "off").run.async_checkpoint
    file = tmp_path / "options.yaml"
    file.write_text("async_checkpoint: off\n")
    assert not config_of("--config", str(file)).run.async_checkpoint


def test_what_is_left_open_follows_from_the_length():
    schedule = with_length(config_of("--iterations", "200"), 1000).schedule
    assert (schedule.warmup_iters, schedule.cos_cycle_iters, schedule.decay_iters) == (20, 200, 80)


def test_epochs_set_the_iterations_so_that_no_window_is_missed():
    config = config_of("--epochs", "2", "--batch_size", "4")
    assert with_length(config, 5).schedule.iterations == 3


@pytest.mark.parametrize(("epochs", "windows", "steps"), [(1.1, 50, 55), (0.3, 7, 3)])
def test_rounding_of_epochs_makes_no_step_more_or_less(epochs, windows, steps):
    config = config_of("--epochs", str(epochs), "--batch_size", "1")
    assert with_length(config, windows).schedule.iterations == steps


def test_epochs_end_where_they_would_have_after_a_change_of_the_batch():
    straight = config_of("--epochs", "2", "--batch_size", "4")
    total = with_length(straight, 51).schedule.iterations
    assert total == 26  # 102 windows
    for done in range(total + 1):  # resumed unchanged: nothing changes
        assert with_length(straight, 51, done, 4 * done).schedule.iterations == total
    larger = config_of("--epochs", "2", "--batch_size", "10")
    assert with_length(larger, 51, 13, 52).schedule.iterations == 13 + 5
    assert with_length(larger, 51, 26, 104).schedule.iterations == 26


def test_iterations_are_counted_in_steps_whatever_is_done():
    assert with_length(config_of("--iterations", "9"), 51, 5, 80).schedule.iterations == 9


def test_a_warm_up_longer_than_the_run_is_a_run_within_the_warm_up():
    schedule = with_length(config_of("--iterations", "5", "--warmup_iters", "9"), 1000).schedule
    assert schedule.cos_cycle_iters == 9


@pytest.mark.parametrize(
    "argv",
    [
        ["--warmup_iters", "20", "--cos_cycle_iters", "10"],
        ["--schedule", "wsd", "--iterations", "10", "--warmup_iters", "6", "--decay_iters", "5"],
    ],
)
def test_a_schedule_whose_parts_do_not_fit_is_refused(argv):
    with pytest.raises(CommandLineError):
        with_length(config_of(*argv), 1000)


def test_the_saved_configuration_reads_back_as_itself(tmp_path):
    config = with_length(config_of("--d_model", "96", "--num_heads", "3", "--lr_max", "1e-3"), 9)
    path = tmp_path / "config.yaml"
    write_config(config, path)
    assert config_of("--config", str(path)) == config


def test_the_saved_configuration_does_not_say_how_its_run_was_started(tmp_path):
    started = ["--init_from", "a.pt", "--resume", "auto", "--allow_changed", "seed", "data"]
    path = tmp_path / "config.yaml"
    write_config(config_of(*started, "--max_minutes", "9", "--seed", "3"), path)
    assert config_of("--config", str(path)) == config_of("--seed", "3")
    write_config(config_of("--overwrite", "--profile", "--async_checkpoint", "off"), path)
    assert config_of("--config", str(path)) == config_of("--async_checkpoint", "off")


def test_the_flat_form_holds_every_option_once():
    config = config_of()
    flat = config.to_dict()
    sections = [config.model, config.data, config.schedule, config.optimizer, config.run]
    sections += [config.device, config.planned]
    assert len(flat) == sum(len(vars(section)) for section in sections)
    assert yaml.safe_load(yaml.safe_dump(flat)) == flat


def test_the_micro_batch_is_the_global_batch_cut_by_ranks_and_steps():
    config = config_of("--batch_size", "24", "--gradient_accumulation_steps", "3")
    assert config.micro_batch_size(4) == 2
    assert replace(config).micro_batch_size(1) == 8


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_ready_configuration_works_on_1_2_and_8_processes(path):
    config = config_of("--config", str(path))
    for world_size in (1, 2, 8):
        check(config, world_size)
    config.model.resolve(tokenizer_vocab_size=32768)
    with_length(config, num_windows=1_000_000)


def test_weights_that_overwrite_would_delete_are_refused_to_begin_with(tmp_path):
    out_dir = tmp_path / "run"
    argv = ["--out_dir", str(out_dir), "--overwrite", "--init_from"]
    inside = load_config("A test.", [*argv, str(out_dir / "checkpoints" / "best.pt")])
    with pytest.raises(CommandLineError, match="overwrite would delete init_from"):
        check(inside, 1)
    check(load_config("A test.", [*argv, str(tmp_path / "best.pt")]), 1)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--d_model=64"], 8e-3),
        (["--d_model=256"], 4e-3),
        (["--d_model=1024"], 1e-3),
        (["--preset=gpt2-124m"], 4e-3 / 3),
        (["--d_model=1024", "--lr_max=0.005"], 5e-3),
    ],
)
def test_the_learning_rate_goes_with_the_width_unless_it_is_given(argv, expected):
    config = with_length(load_config("", argv), num_windows=10)
    assert config.schedule.lr_max == pytest.approx(expected)
    assert config.schedule.lr_min == pytest.approx(expected / 10)
