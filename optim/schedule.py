"""Learning rates as pure functions of the number of the update.

Nothing is stored, so nothing can go stale: a resumed run asks for the rate of its next update and
gets what the run that was never stopped would have got. Changing the length of a schedule on resume
changes the answer from that update on, within [0, lr_max] whatever the new length is.

`it` is the number of the update: the training loop counts 1, 2, ... N. The warm-up is linear from
0 at `it` 0, so the first update has lr_max / warmup_iters, and none is made with a rate of 0 that
the user did not ask for by lr_min.
"""

import math
from typing import Any, Protocol


class HasParamGroups(Protocol):
    """An optimizer, or what wraps one."""

    param_groups: list[dict[str, Any]]


def cos_lr_scheduler(
    it: int, warmup_iters: int, cos_cycle_iters: int, lr_min: float, lr_max: float
) -> float:
    """Linear warm-up, half a cosine down to lr_min, then lr_min for ever (arXiv:1608.03983).

        it < warmup_iters      it / warmup_iters * lr_max
        it <= cos_cycle_iters  lr_min + 0.5 (1 + cos(pi progress)) (lr_max - lr_min)
        it > cos_cycle_iters   lr_min

    where progress runs from 0 at warmup_iters to 1 at cos_cycle_iters. If these are equal, the
    cosine is the single update `it` = warmup_iters, made with lr_max.

    Args:
        it: number of the update, at least 0.
        warmup_iters: first `it` with lr_max; 0: no warm-up.
        cos_cycle_iters: first `it` with lr_min.
        lr_min: rate after the cycle.
        lr_max: rate at the end of the warm-up.

    Raises:
        ValueError: a negative number, lr_min above lr_max, or a cycle shorter than its warm-up.
    """
    _check(it, warmup_iters, lr_min, lr_max)
    if cos_cycle_iters < warmup_iters:
        raise ValueError(
            f"cos_cycle_iters {cos_cycle_iters} counts from the first update and includes the "
            f"warm-up: it cannot be less than warmup_iters {warmup_iters}"
        )
    if it < warmup_iters:
        return it / warmup_iters * lr_max
    if it > cos_cycle_iters:
        return lr_min
    progress = (it - warmup_iters) / max(1, cos_cycle_iters - warmup_iters)
    return _between(lr_min, lr_max, 0.5 * (1 + math.cos(math.pi * progress)))


def constant_lr_scheduler(it: int, warmup_iters: int, lr_max: float) -> float:
    """Linear warm-up, then lr_max for ever.

    Args:
        it: number of the update, at least 0.
        warmup_iters: first `it` with lr_max; 0: no warm-up.
        lr_max: rate after the warm-up.

    Raises:
        ValueError: a negative number.
    """
    _check(it, warmup_iters, 0.0, lr_max)
    return it / warmup_iters * lr_max if it < warmup_iters else lr_max


def wsd_lr_scheduler(
    it: int, warmup_iters: int, decay_iters: int, iterations: int, lr_min: float, lr_max: float
) -> float:
    """Warm-up, stable, decay: the three stages of MiniCPM (arXiv:2404.06395), all linear.

        it < warmup_iters              it / warmup_iters * lr_max
        it <= iterations - decay_iters lr_max
        it <= iterations               linear, to reach lr_min at `iterations`
        it > iterations                lr_min

    Until the decay begins the rate does not depend on `iterations`: a run stopped before can be
    resumed with more of them, and is then the same run as if it had been planned so.

    Args:
        it: number of the update, at least 0.
        warmup_iters: first `it` with lr_max; 0: no warm-up.
        decay_iters: updates of the last stage; 0: the rate drops to lr_min after `iterations`.
        iterations: updates of all three stages together.
        lr_min: rate at the end.
        lr_max: rate of the stable stage.

    Raises:
        ValueError: a negative number, lr_min above lr_max, or no room for warm-up and decay.
    """
    _check(it, warmup_iters, lr_min, lr_max)
    if decay_iters < 0:
        raise ValueError(f"decay_iters {decay_iters} must be at least 0")
    if warmup_iters + decay_iters > iterations:
        raise ValueError(
            f"warmup_iters {warmup_iters} and decay_iters {decay_iters} together exceed the "
            f"{iterations} iterations of the whole schedule"
        )
    if it < warmup_iters:
        return it / warmup_iters * lr_max
    if it <= iterations - decay_iters:
        return lr_max
    if it > iterations:
        return lr_min
    return _between(lr_min, lr_max, (iterations - it) / decay_iters)


def learning_rate(
    it: int,
    *,
    schedule: str,
    warmup_iters: int,
    cos_cycle_iters: int,
    decay_iters: int,
    iterations: int,
    lr_min: float,
    lr_max: float,
) -> float:
    """Learning rate of update `it` by the name of the schedule; each takes what it needs.

    Args:
        it: number of the update, from 1.
        schedule: `cosine`, `constant` or `wsd`.
        warmup_iters: of every schedule.
        cos_cycle_iters: of `cosine`.
        decay_iters: of `wsd`.
        iterations: of `wsd`.
        lr_min: of `cosine` and `wsd`.
        lr_max: of every schedule.

    Raises:
        ValueError: an unknown schedule, or numbers that the schedule cannot take.
    """
    if schedule == "cosine":
        return cos_lr_scheduler(it, warmup_iters, cos_cycle_iters, lr_min, lr_max)
    if schedule == "constant":
        return constant_lr_scheduler(it, warmup_iters, lr_max)
    if schedule == "wsd":
        return wsd_lr_scheduler(it, warmup_iters, decay_iters, iterations, lr_min, lr_max)
    raise ValueError(f"unknown schedule {schedule}: use cosine, constant or wsd")


def set_learning_rate(optimizer: HasParamGroups, lr: float) -> None:
    """Write `lr` into every parameter group, times the group's `lr_scale` where it has one.

    The factor is a key of its own, as in `{"params": ..., "lr_scale": 0.1}`, so that a group keeps
    its proportion to the others however often the rate is written.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)


def _between(lr_min: float, lr_max: float, share: float) -> float:
    # lr_min + (lr_max - lr_min) can round to just above lr_max.
    return min(lr_max, lr_min + share * (lr_max - lr_min))


def _check(it: int, warmup_iters: int, lr_min: float, lr_max: float) -> None:
    if it < 0:
        raise ValueError(f"update number {it} must be at least 0")
    if warmup_iters < 0:
        raise ValueError(f"warmup_iters {warmup_iters} must be at least 0")
    if not 0 <= lr_min <= lr_max < math.inf:
        raise ValueError(f"lr_min {lr_min} and lr_max {lr_max} must be 0 <= lr_min <= lr_max")
