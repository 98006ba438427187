"""Learning rates: exact values, and what no choice of numbers may break."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from optim.adamw import AdamW
from optim.schedule import (
    constant_lr_scheduler,
    cos_lr_scheduler,
    learning_rate,
    set_learning_rate,
    wsd_lr_scheduler,
)

ITERATIONS = st.integers(0, 3000)

# A busy machine is not a failure.
without_deadline = settings(deadline=None)


@st.composite
def rates(draw):
    """Draw 0 <= lr_min <= lr_max."""
    lr_max = draw(st.floats(0, 10, allow_subnormal=False))
    return draw(st.floats(0, 1)) * lr_max, lr_max


@st.composite
def schedules(draw):
    """Draw a schedule as a function of `it`, with its warm-up, lr_min and lr_max."""
    warmup_iters = draw(st.integers(0, 100))
    decay_iters = draw(st.integers(0, 1000))
    stable_iters = draw(st.integers(0, 1000))
    lr_min, lr_max = draw(rates())
    options = {
        "schedule": draw(st.sampled_from(["cosine", "constant", "wsd"])),
        "warmup_iters": warmup_iters,
        "cos_cycle_iters": warmup_iters + decay_iters,
        "decay_iters": decay_iters,
        "iterations": warmup_iters + stable_iters + decay_iters,
        "lr_min": lr_min,
        "lr_max": lr_max,
    }
    return (lambda it: learning_rate(it, **options)), warmup_iters, lr_min, lr_max


@pytest.mark.parametrize(
    ("it", "wanted"),
    [
        (0, 0.0),
        (1, 1 / 7),
        (2, 2 / 7),
        (6, 6 / 7),
        (7, 1.0),
        (8, 0.98871756048182062),
        (14, 0.55),
        (20, 0.11128243951817938),
        (21, 0.1),
        (22, 0.1),
        (10**9, 0.1),
    ],
)
def test_cosine_has_these_values(it, wanted):
    assert cos_lr_scheduler(it, 7, 21, lr_min=0.1, lr_max=1.0) == pytest.approx(wanted, abs=1e-15)


def test_cosine_without_warm_up_starts_at_its_maximum():
    values = [cos_lr_scheduler(it, 0, 4, lr_min=0.0, lr_max=1.0) for it in range(6)]
    wanted = [1.0, 0.5 + 0.5 * math.sqrt(0.5), 0.5, 0.5 - 0.5 * math.sqrt(0.5), 0.0, 0.0]
    assert values == pytest.approx(wanted, abs=1e-15)


def test_cosine_as_short_as_its_warm_up_is_one_update_at_the_maximum():
    values = [cos_lr_scheduler(it, 3, 3, lr_min=0.1, lr_max=0.9) for it in range(6)]
    assert values == pytest.approx([0.0, 0.3, 0.6, 0.9, 0.1, 0.1])
    assert cos_lr_scheduler(0, 0, 0, lr_min=0.1, lr_max=0.9) == 0.9
    assert cos_lr_scheduler(1, 0, 0, lr_min=0.1, lr_max=0.9) == 0.1


def test_constant_has_these_values():
    values = [constant_lr_scheduler(it, 4, lr_max=2.0) for it in range(7)]
    assert values == [0.0, 0.5, 1.0, 1.5, 2.0, 2.0, 2.0]
    assert constant_lr_scheduler(0, 0, lr_max=2.0) == 2.0


def test_warmup_stable_decay_has_these_values():
    values = [wsd_lr_scheduler(it, 2, 4, 9, lr_min=0.2, lr_max=1.0) for it in range(12)]
    wanted = [0.0, 0.5, 1.0, 1.0, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2]
    assert values == pytest.approx(wanted)


def test_warmup_stable_decay_without_decay_drops_only_after_the_last_iteration():
    values = [wsd_lr_scheduler(it, 0, 0, 2, lr_min=0.2, lr_max=1.0) for it in range(4)]
    assert values == [1.0, 1.0, 1.0, 0.2]


@without_deadline
@given(schedules(), ITERATIONS)
def test_rate_is_never_negative_and_never_above_the_maximum(drawn, it):
    schedule, _, _, lr_max = drawn
    assert 0.0 <= schedule(it) <= lr_max


def test_rounding_does_not_lift_the_peak_above_the_maximum():
    lr_min, lr_max = 0.008, 0.11
    assert lr_min + (lr_max - lr_min) > lr_max
    assert cos_lr_scheduler(5, 5, 10, lr_min, lr_max) == lr_max


@without_deadline
@given(schedules(), ITERATIONS)
def test_rate_never_falls_in_the_warm_up_and_never_rises_after_it(drawn, it):
    schedule, warmup_iters, lr_min, _ = drawn
    if it < warmup_iters:
        # The last step of the warm-up ends on the maximum, up to its rounding.
        assert schedule(it) <= schedule(it + 1) * (1 + 1e-15)
    else:
        assert lr_min <= schedule(it + 1) <= schedule(it)


@without_deadline
@given(schedules())
def test_warm_up_ends_at_the_maximum(drawn):
    schedule, warmup_iters, _, lr_max = drawn
    assert schedule(warmup_iters) == pytest.approx(lr_max, rel=1e-15)


@without_deadline
@given(rates(), st.integers(1, 100), ITERATIONS)
def test_decaying_schedules_end_exactly_at_the_minimum_and_stay(drawn, decay_iters, later):
    lr_min, lr_max = drawn
    it = 5 + decay_iters + later
    assert cos_lr_scheduler(it, 5, 5 + decay_iters, lr_min, lr_max) == lr_min
    assert wsd_lr_scheduler(it, 5, decay_iters, 5 + decay_iters, lr_min, lr_max) == lr_min


@without_deadline
@given(st.integers(100, 2000), st.integers(0, 2000), ITERATIONS)
def test_longer_warmup_stable_decay_run_begins_like_the_shorter(iterations, more, it):
    if it <= iterations - 60:
        short = wsd_lr_scheduler(it, 20, 60, iterations, 0.0, 1.0)
        assert short == wsd_lr_scheduler(it, 20, 60, iterations + more, 0.0, 1.0)


@pytest.mark.parametrize("schedule", ["cosine", "constant", "wsd"])
def test_first_update_moves_the_weights(schedule):
    rate = learning_rate(
        1,
        schedule=schedule,
        warmup_iters=1000,
        cos_cycle_iters=2000,
        decay_iters=100,
        iterations=2000,
        lr_min=0.0,
        lr_max=1e-3,
    )
    assert rate == 1e-3 / 1000


def test_unknown_schedule_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="cosin: use cosine, constant or wsd"):
        learning_rate(
            1,
            schedule="cosin",
            warmup_iters=0,
            cos_cycle_iters=1,
            decay_iters=0,
            iterations=1,
            lr_min=0.0,
            lr_max=1.0,
        )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: cos_lr_scheduler(-1, 0, 1, 0.0, 1.0), "update number -1"),
        (lambda: cos_lr_scheduler(1, -3, 1, 0.0, 1.0), "warmup_iters -3"),
        (lambda: cos_lr_scheduler(1, 0, 1, 2.0, 1.0), "lr_min 2.0 and lr_max 1.0"),
        (lambda: cos_lr_scheduler(1, 0, 1, -1.0, 1.0), "lr_min -1.0"),
        (lambda: cos_lr_scheduler(1, 0, 1, 0.0, math.inf), "lr_max inf"),
        (lambda: cos_lr_scheduler(1, 50, 20, 0.0, 1.0), "cos_cycle_iters 20 .* warmup_iters 50"),
        (lambda: constant_lr_scheduler(1, 0, math.nan), "lr_max nan"),
        (lambda: wsd_lr_scheduler(1, 0, -2, 9, 0.0, 1.0), "decay_iters -2"),
        (lambda: wsd_lr_scheduler(1, 5, 5, 9, 0.0, 1.0), "exceed the 9 iterations"),
    ],
)
def test_impossible_numbers_are_refused_with_their_values(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_rate_is_written_into_every_group_times_its_scale():
    params = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    groups: list[dict[str, Any]] = [
        {"params": params[:1]},
        {"params": params[1:2], "lr_scale": 0.1},
        {"params": params[2:], "lr": 5.0},
    ]
    optimizer = AdamW(groups)
    for lr in (0.5, 0.25):  # written twice: the scale must not compound
        set_learning_rate(optimizer, lr)
        assert [group["lr"] for group in optimizer.param_groups] == [lr, lr * 0.1, lr]
