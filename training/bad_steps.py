"""Which steps to leave out: one whose loss or gradient is not finite, or a sudden spike.

A bad batch or a flipped bit can ruin in one update what took weeks. All that is looked at here was
reduced over the ranks, so every rank comes to the same answer.
"""

import math
import statistics
from collections.abc import Sequence

# A spike is measured against the median of so many norms before it, once there are a few.
NORMS_REMEMBERED = 100
NORMS_NEEDED = 10


class DivergedError(RuntimeError):
    """Too many steps in a row were left out, and there is nothing more to try."""


def complaint(
    loss: float, grad_norm: float, recent: Sequence[float], spike_factor: float
) -> str | None:
    """Why a step must not update the weights; None if it may.

    Args:
        loss: of the global batch.
        grad_norm: global, before clipping.
        recent: the norms before it.
        spike_factor: the largest ratio of the norm to the median of `recent`; 0: any.
    """
    if not math.isfinite(loss):
        return f"the loss is {loss}"
    if not math.isfinite(grad_norm):
        return "the gradient is not finite"
    if spike_factor > 0 and len(recent) >= NORMS_NEEDED:
        median = statistics.median(recent)
        if grad_norm > spike_factor * median:
            return f"the gradient norm {grad_norm:.3g} is a spike, their median is {median:.3g}"
    return None


def remembered(recent: Sequence[float], grad_norm: float) -> list[float]:
    """The norms to compare the next one with; a spike counts, so that a new level is learnt."""
    if not math.isfinite(grad_norm):
        return list(recent)
    return [*recent, grad_norm][-NORMS_REMEMBERED:]
