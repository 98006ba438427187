"""Which steps to leave out: one whose loss or gradient is not finite, or a sudden spike.

A bad batch or a flipped bit can ruin in one update what took weeks. All that is looked at here was
reduced over the ranks, so every rank comes to the same answer. It is the device that decides, by
arithmetic on tensors: a host that did would have to wait for a GPU in every step.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from training.step_reports import Report

# A spike is measured against the median of so many norms before it, once there are a few.
NORMS_REMEMBERED = 100
NORMS_NEEDED = 10
# With a loss scale above this an infinite gradient of float16 says that the scale is too large.
# Below, float16 loses small gradients as float32 never would: what is infinite still is so by
# itself.
SMALLEST_SCALE = 1.0


class DivergedError(RuntimeError):
    """Too many steps in a row were left out, and there is nothing more to try."""


class BadSteps:
    """Tells bad steps from good ones, on the device.

    Args:
        spike_factor: the largest ratio of a norm to the median of those before it; 0: any.
        device: of the norms.
    """

    def __init__(self, spike_factor: float, device: torch.device) -> None:
        self._spike_factor = spike_factor
        self._device = device
        self.recent = []

    @property
    def recent(self) -> list[float]:
        """The norms to compare the next one with, the newest last; a GPU is waited for."""
        return [norm for norm in self._norms.tolist() if not math.isnan(norm)]

    @recent.setter
    def recent(self, norms: Sequence[float]) -> None:
        norms = list(norms)[-NORMS_REMEMBERED:]
        missing = [math.nan] * (NORMS_REMEMBERED - len(norms))
        self._norms = torch.tensor([*missing, *norms], device=self._device)

    def judge(self, loss: Tensor, grad_norm: Tensor) -> tuple[Tensor, Tensor]:
        """Whether a step must not update the weights.

        Args:
            loss: of the global batch, 0-d.
            grad_norm: global, before clipping, 0-d.

        Returns:
            1.0 if it must not, else 0.0, and the median of the norms before it; NaN where norms are
            not compared, or are too few. Both 0-d, float32.
        """
        is_bad = ~(torch.isfinite(loss) & torch.isfinite(grad_norm))
        median = torch.full_like(grad_norm, math.nan)
        if self._spike_factor > 0:
            are_enough = (~self._norms.isnan()).sum() >= NORMS_NEEDED
            median = torch.where(are_enough, self._norms.nanquantile(0.5), median)
            is_bad |= grad_norm > self._spike_factor * median  # of NaN nothing is larger
        return is_bad.float(), median

    def remember(self, grad_norm: Tensor) -> None:
        """Compare later norms with this one, too; a spike counts, so that a new level is learnt."""
        added = torch.cat([self._norms[1:], grad_norm.view(1)])
        self._norms = torch.where(torch.isfinite(grad_norm), added, self._norms)


def complaint(report: Report) -> str | None:
    """Why a step did not update the weights; None if it did."""
    if not report.is_left_out:
        return None
    if not math.isfinite(report.loss):
        return f"the loss is {report.loss}"
    if not math.isfinite(report.grad_norm):
        scale = "" if report.grad_scale is None else f" at a loss scale of {report.grad_scale:g}"
        return f"the gradient is not finite{scale}"
    return (
        f"the gradient norm {report.grad_norm:.3g} is a spike, their median is {report.median:.3g}"
    )


def is_search_for_a_scale(report: Report) -> bool:
    """Whether the step was left out because the loss scale of float16 was too large, and falls."""
    return (
        report.grad_scale is not None
        and report.grad_scale > SMALLEST_SCALE
        and math.isfinite(report.loss)
        and not math.isfinite(report.grad_norm)
    )
