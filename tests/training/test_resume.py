"""What may go on from what, what is said of it, and where in the data it goes on."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from training import resume
from training.checkpoint_file import CheckpointError
from training.config import load_config
from training.config_checks import with_length
from training.resume import ALLOWABLE, changes, check, check_init, samples_done, schedule_changes

TOKENIZER, OTHER_TOKENIZER = '{"a": 1, "b": 2}', '{"a": 2, "b": 1}'
DATA, OTHER_DATA = "0123456789abcdef" * 4, "fedcba9876543210" * 4

# Another value of each name that is refused on resume.
OTHERS: dict[str, Any] = {
    "seed": 2,
    "batch_size": 32,
    "max_seq_len": 64,
    "epochs": 1.0,
    "num_heads": 8,
    "num_kv_heads": 2,
    "qk_norm": False,
    "tie_weights": True,
    "rope_theta": 500.0,
    "norm_eps": 1e-5,
}


@cache
def _options(argv: tuple[str, ...]) -> dict[str, Any]:
    config = load_config("A test.", argv)
    config = replace(config, model=config.model.resolve(300))
    return with_length(config, num_windows=1000).to_dict()


def options(*argv: str) -> dict[str, Any]:
    """The flat configuration of a run, filled in as the training job does."""
    return dict(_options(argv))


def checkpoint(config: dict[str, Any], iteration: int = 20, **entries: Any) -> dict[str, Any]:
    """What matters here of a checkpoint; an entry that is None is left out."""
    saved = {
        "config": config,
        "iteration": iteration,
        "samples": iteration * config["batch_size"],
        "tokenizer": TOKENIZER,
        "data_fingerprint": DATA,
        **entries,
    }
    return {name: value for name, value in saved.items() if value is not None}


def go_on(
    saved: dict[str, Any],
    config: dict[str, Any],
    *allowed: str,
    tokenizer: str = TOKENIZER,
    data: str = DATA,
) -> None:
    check(saved, config, tokenizer_json=tokenizer, data_fingerprint=data, allowed=allowed)


def refusal(*args: Any, **kwargs: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        go_on(*args, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Refused or not.


def test_the_same_run_goes_on_and_so_does_one_that_changed_what_may_change():
    before = options()
    go_on(checkpoint(before), before)
    harmless = ["--lr_max", "1e-3", "--iterations", "900", "--out_dir", "x", "--dropout", "0.1"]
    more = ["--shard_optimizer", "off", "--gradient_accumulation_steps", "2", "--keep_checkpoints"]
    go_on(checkpoint(before), options(*harmless, *more, "9"))


def test_every_name_that_can_be_allowed_is_tried_here():
    assert {*OTHERS, "tokenizer", "data"} == set(ALLOWABLE)


@pytest.mark.parametrize("name", OTHERS)
def test_a_change_of_the_model_or_of_the_datas_order_is_refused_unless_it_is_allowed(name):
    before = options()
    now = before | {name: OTHERS[name]}
    message = refusal(checkpoint(before), now)
    assert f"{name} {before[name]} -> {now[name]}: " in message
    assert message.endswith(f"permit the change with --allow_changed {name}")
    go_on(checkpoint(before), now, name)
    refusal(checkpoint(before), now, *(other for other in ALLOWABLE if other != name))


def test_another_tokenizer_is_refused_unless_it_is_allowed_however_it_is_spaced():
    config = options()
    go_on(checkpoint(config), config, tokenizer='{"b":2,"a":1}')
    message = refusal(checkpoint(config), config, tokenizer=OTHER_TOKENIZER)
    assert "prepared with another tokenizer" in message
    assert message.endswith("--allow_changed tokenizer")
    go_on(checkpoint(config), config, "tokenizer", tokenizer=OTHER_TOKENIZER)


def test_other_token_files_are_refused_unless_they_are_allowed():
    config = options()
    message = refusal(checkpoint(config), config, data=OTHER_DATA)
    assert "data 0123456789ab -> fedcba987654: these are not the token files" in message
    assert message.endswith("--allow_changed data")
    go_on(checkpoint(config), config, "data", data=OTHER_DATA)


def test_one_line_names_every_difference_with_its_reason_and_what_permits_it():
    before = options()
    now = options("--seed", "7", "--num_heads", "8", "--batch_size", "32", "--lr_max", "1e-3")
    message = refusal(checkpoint(before), now, "batch_size", tokenizer=OTHER_TOKENIZER)
    for part in (
        "seed 1337 -> 7: this would change which text",
        "num_heads 4 -> 8, num_kv_heads 4 -> 8: these weights are another model's",
        "tokenizer ",
    ):
        assert part in message
    assert message.endswith("--allow_changed seed num_heads num_kv_heads tokenizer")
    assert "lr_max" not in message
    assert "batch_size" not in message


def test_more_epochs_are_the_same_order_for_longer():
    before = options("--epochs", "1")
    go_on(checkpoint(before), options("--epochs", "2"))
    message = refusal(checkpoint(before), options())
    assert "epochs 1.0 -> None: this would change which text" in message


def test_a_checkpoint_of_before_there_were_fingerprints_is_believed():
    before = options()
    old = checkpoint(before, data_fingerprint=None, samples=None)
    go_on(old, before, data=OTHER_DATA)
    assert changes(old, before, tokenizer_json=TOKENIZER, data_fingerprint=DATA) == []
    del before["norm_eps"], before["num_kv_heads"]  # as if it had known no such options
    go_on(old, options(), data=OTHER_DATA)


# Weights for a new run.


def test_weights_start_a_run_of_another_seed_batch_context_and_data():
    saved = checkpoint(options())
    argv = ["--seed", "7", "--batch_size", "32", "--max_seq_len", "64", "--epochs", "1"]
    check_init(saved, options(*argv), tokenizer_json=TOKENIZER)


@pytest.mark.parametrize("name", sorted(resume.READING))
def test_weights_that_a_run_would_read_otherwise_do_not_start_it_unless_allowed(name):
    before = options()
    now = before | {name: OTHERS[name]}
    with pytest.raises(CheckpointError, match=rf"init_from .*{name} .* --allow_changed {name}$"):
        check_init(checkpoint(before), now, tokenizer_json=TOKENIZER, allowed=["tokenizer"])
    check_init(checkpoint(before), now, tokenizer_json=TOKENIZER, allowed=[name])


def test_weights_of_another_tokenizer_do_not_start_a_run_unless_allowed():
    saved = checkpoint(options())
    with pytest.raises(CheckpointError, match=r"init_from .* --allow_changed tokenizer$"):
        check_init(saved, options(), tokenizer_json=OTHER_TOKENIZER)
    check_init(saved, options(), tokenizer_json=OTHER_TOKENIZER, allowed=["tokenizer"])


# What is said.


def test_changed_options_are_listed_with_both_values_the_allowed_ones_too():
    before = options("--out_dir", "a")
    now = options("--out_dir", "b", "--seed", "7", "--lr_max", "1e-3", "--lr_min", "4e-4")
    listed = changes(
        checkpoint(before), now, tokenizer_json=OTHER_TOKENIZER, data_fingerprint=OTHER_DATA
    )
    assert listed[:3] == ["lr_max: 0.004 -> 0.001", "out_dir: a -> b", "seed: 1337 -> 7"]
    assert [line.split(":")[0] for line in listed[3:]] == ["tokenizer", "data"]
    assert listed[4] == "data: 0123456789ab -> fedcba987654"
    assert changes(checkpoint(before), now) == listed[:3]


def test_how_a_run_is_started_and_when_it_writes_is_no_change():
    started = ["--resume", "auto", "--init_from", "x.pt", "--allow_changed", "seed"]
    now = options(*started, "--max_minutes", "5", "--async_checkpoint", "off")
    assert changes(checkpoint(options("--overwrite")), now) == []


def test_an_option_that_the_checkpoint_does_not_know_had_its_default():
    before = options()
    del before["spike_factor"], before["on_divergence"]
    listed = changes(checkpoint(before), options("--spike_factor", "5"))
    assert listed == ["spike_factor: 0.0 -> 5.0"]


# Where in the data.


def test_the_position_is_the_checkpoints_count_of_samples():
    config = options("--batch_size", "32")
    assert samples_done(checkpoint(config, samples=777), config["max_seq_len"]) == 777
    assert samples_done(checkpoint(config, samples=0), config["max_seq_len"]) == 0


def test_a_checkpoint_that_counts_no_samples_has_done_its_steps_times_its_batch():
    saved = checkpoint(options("--batch_size", "8"), iteration=20, samples=None)
    assert samples_done(saved, 128) == 160


def test_windows_of_another_length_are_counted_by_their_tokens():
    saved = checkpoint(options("--max_seq_len", "128"), samples=101)
    assert samples_done(saved, 256) == 51
    assert samples_done(saved, 64) == 202


# What a change does to the learning rate.


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["--seed", "3", "--weight_decay", "0"],
        ["--iterations", "20", "--cos_cycle_iters", "40", "--warmup_iters", "4"],
        ["--decay_iters", "3"],  # of wsd, not of cosine
    ],
)
def test_nothing_is_said_where_every_remaining_step_has_the_rate_that_it_would_have_had(argv):
    assert schedule_changes(options("--iterations", "40"), options("--iterations", "40"), 10) == []
    assert (
        schedule_changes(options("--iterations", "40"), options("--iterations", "40", *argv), 10)
        == []
    )


def test_a_constant_rate_does_not_change_with_the_length_nor_wsd_before_its_decay():
    constant = ["--schedule", "constant", "--warmup_iters", "5", "--iterations"]
    assert schedule_changes(options(*constant, "20"), options(*constant, "40"), 20) == []
    wsd = ["--schedule", "wsd", "--warmup_iters", "5", "--decay_iters", "10", "--iterations"]
    (line,) = schedule_changes(options(*wsd, "50"), options(*wsd, "100"), 20)
    assert "the learning rate of step 41 would have been 3.64e-03 and is 4.00e-03" in line
    assert "keeps" not in line


def test_a_longer_cosine_is_said_with_the_figures_and_the_option_that_keeps_the_old_one():
    warmup = ["--warmup_iters", "2"]
    before, now = options("--iterations", "20", *warmup), options("--iterations", "40", *warmup)
    assert schedule_changes(before, now, 20) == [
        "the schedule has changed: the learning rate of step 21 would have been 4.00e-04 and is "
        "2.20e-03; it follows from the present options alone, and ends at 4.00e-04 in step 40 "
        "(--cos_cycle_iters 20 keeps the old curve)",
        "the learning rate rises, from 4.00e-04 in step 20 to 2.20e-03 in step 21",
    ]


def test_a_shorter_cosine_is_said_and_does_not_rise():
    (line,) = schedule_changes(options("--iterations", "40"), options("--iterations", "25"), 20)
    assert "of step 21 would have been" in line
    assert "ends at 4.00e-04 in step 25" in line


def test_a_rate_that_rises_within_its_warm_up_does_not_rise_again():
    before = options("--iterations", "40", "--warmup_iters", "10")
    lines = schedule_changes(before, options("--iterations", "40", "--warmup_iters", "8"), 5)
    assert len(lines) == 1
    assert "of step 6 would have been 2.40e-03 and is 3.00e-03" in lines[0]
    assert "(--warmup_iters 10 keeps the old curve)" in lines[0]


def test_nothing_is_said_of_the_steps_of_a_run_that_is_over():
    assert schedule_changes(options("--iterations", "40"), options("--iterations", "25"), 25) == []
    assert schedule_changes(options("--iterations", "40"), options("--iterations", "25"), 30) == []


def test_a_difference_too_small_for_the_usual_digits_is_shown_with_more():
    long = ["--iterations", "1000000", "--warmup_iters", "10", "--cos_cycle_iters"]
    (line,) = schedule_changes(options(*long, "1000000"), options(*long, "1000001"), 500_000)
    words = line.split()
    assert words[words.index("been") + 1] != words[words.index("is") + 1].rstrip(";")


def test_a_checkpoint_without_a_schedule_filled_in_is_not_judged():
    before = options()
    del before["decay_iters"]
    assert schedule_changes(before, options("--iterations", "40"), 10) == []


SCHEDULES = [
    ["--iterations", "20"],
    ["--iterations", "47", "--warmup_iters", "0"],
    ["--iterations", "30", "--lr_max", "1e-3"],
    ["--iterations", "60", "--cos_cycle_iters", "30", "--lr_min", "0"],
    ["--iterations", "40", "--schedule", "wsd"],
    ["--iterations", "40", "--schedule", "wsd", "--decay_iters", "1", "--warmup_iters", "9"],
    ["--iterations", "33", "--schedule", "wsd", "--decay_iters", "0"],
    ["--iterations", "40", "--schedule", "constant", "--warmup_iters", "30"],
    # A line and a cosine between the same ends: only the two steps between them differ.
    ["--iterations", "13", "--schedule", "cosine", "--warmup_iters", "10"],
    ["--iterations", "13", "--schedule", "wsd", "--warmup_iters", "10", "--decay_iters", "3"],
]


@pytest.mark.parametrize("after", SCHEDULES)
@pytest.mark.parametrize("before", SCHEDULES)
def test_what_is_said_of_two_schedules_is_what_looking_at_every_step_shows(
    monkeypatch, before, after
):
    """With few steps compared, so that a difference must be found between them."""
    monkeypatch.setattr(resume, "STEPS_COMPARED", 3)
    old, new = options(*before), options(*after)
    for iteration in (0, 3, 11, 19, 29):
        rates = {
            step: (resume._rate(old, step), resume._rate(new, step))
            for step in range(iteration + 1, new["iterations"] + 1)
        }
        different = [step for step, (then, here) in rates.items() if then != here]
        lines = schedule_changes(old, new, iteration)
        assert bool(lines) == bool(different)
        assert all(0 <= here <= new["lr_max"] for _, here in rates.values())
        if lines:
            assert f"of step {different[0]} would" in lines[0]
        if lines and "keeps" in lines[0]:
            kept = lines[0].split("(")[1].split(" keeps")[0].split()
            assert schedule_changes(old, options(*after, *kept), iteration) == []


def test_a_run_of_millions_of_steps_is_compared_at_few_of_them(monkeypatch):
    calls = 0
    rate = resume._rate

    def counted(config, step):
        nonlocal calls
        calls += 1
        return rate(config, step)

    monkeypatch.setattr(resume, "_rate", counted)
    wsd = ["--schedule", "wsd", "--iterations", "5000000", "--warmup_iters", "9", "--decay_iters"]
    (line,) = schedule_changes(options(*wsd, "10"), options(*wsd, "11"), 1000)
    assert "of step 4999990 would" in line
    assert calls < 20_000


def test_a_checkpoints_own_values_survive_the_file(tmp_path):
    """No option turns into something that is not equal to itself by being saved."""
    config = options()
    torch.save(checkpoint(config), tmp_path / "x.pt")
    saved = torch.load(tmp_path / "x.pt", weights_only=True)
    go_on(saved, config)
    assert changes(saved, config, tokenizer_json=TOKENIZER, data_fingerprint=DATA) == []


def test_another_optimizer_is_refused_and_new_runs_may_have_it():
    saved = checkpoint(options())
    said = refusal(saved, options("--optimizer", "muon"), *ALLOWABLE)
    assert "optimizer adamw -> muon" in said
    assert "--init_from" in said
    old = {name: value for name, value in saved["config"].items() if name != "optimizer"}
    go_on(checkpoint(old), options())  # of before there was a choice
    check_init(saved, options("--optimizer", "muon"), tokenizer_json=TOKENIZER)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ((), False),
        (("--lr_max", "0.1"), False),
        (("--val_windows", "7"), True),
        (("--seed", "5"), True),
        (("--max_seq_len", "64"), True),
    ],
)
def test_a_loss_of_other_validation_windows_is_no_yardstick(argv, expected):
    saved = checkpoint(options())
    assert resume.is_measured_anew(saved, options(*argv), DATA) is expected
    assert resume.is_measured_anew(saved, options(*argv), OTHER_DATA)
