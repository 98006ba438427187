"""What came out of each step, told by the device and read by the host when it need not wait.

To read a number from a GPU is to wait until it has done all that it was given, and to let it idle
afterwards until it is given more. So what a step has to tell is copied to the host's memory beside
the work, and read one step later: then it has long been there. Where something depends on it, a
line of progress, a save, the end, all is read that was told. A CPU's memory is the host's, and
nothing is ever late there.
"""

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

# By type of device, how many steps may be done before what one has told is read; others: 1.
LAG = {"cpu": 0}


@dataclass(frozen=True)
class Report:
    """What came out of one step, the same on all ranks.

    Attributes:
        iteration: which step it was, counted from 1.
        samples: position in the data after it.
        loss: mean over the global batch, in nats.
        votes: for each reason to leave how many ranks have it.
        grad_norm: global, before clipping.
        is_left_out: whether it has changed no weight.
        median: of the norms before it, if it was compared with them.
        grad_scale: what the loss was multiplied by, if there is a scaler.
    """

    iteration: int
    samples: int
    loss: float
    votes: tuple[float, ...]
    grad_norm: float
    is_left_out: bool
    median: float
    grad_scale: float | None


@dataclass
class _Told:
    """A report on its way."""

    iteration: int
    samples: int
    values: Tensor
    copied: torch.cuda.Event | None

    def read(self) -> Report:
        """The report; waits until it is there."""
        if self.copied is not None:
            self.copied.synchronize()
        loss, *votes, norm, is_left_out, median, scale = self.values.tolist()
        return Report(
            iteration=self.iteration,
            samples=self.samples,
            loss=loss,
            votes=tuple(votes),
            grad_norm=norm,
            is_left_out=bool(is_left_out),
            median=median,
            grad_scale=scale or None,
        )


class Reports:
    """The reports that the host has not read yet.

    Args:
        device: what tells them.
    """

    def __init__(self, device: torch.device) -> None:
        self._lag = LAG.get(device.type, 1)
        self._told: deque[_Told] = deque()

    def tell(
        self,
        iteration: int,
        samples: int,
        ballot: Tensor,
        grad_norm: Tensor,
        is_left_out: Tensor,
        median: Tensor,
        grad_scale: float | Tensor,
    ) -> None:
        """Add the report of a step; the numbers are copied, and nobody waits.

        Args:
            iteration: which step it is.
            samples: position in the data after it.
            ballot: loss and votes, 1-D.
            grad_norm: 0-d, as all that follow; float32 on one device.
            is_left_out: 0 or 1.
            median: see Report.
            grad_scale: above 0; a plain number if there is no scaler.
        """
        scale = grad_scale if isinstance(grad_scale, Tensor) else torch.zeros_like(grad_norm)
        values = torch.cat([ballot, torch.stack([grad_norm, is_left_out, median, scale])])
        copied = None
        if values.is_cuda:
            # Pinned memory: into other memory the host itself would have to copy, and wait.
            on_host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            values = on_host.copy_(values, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
        self._told.append(_Told(iteration, samples, values, copied))

    def next(self, is_awaited: bool) -> Report | None:
        """The oldest report that is not read yet; None if there is none, or it may be late.

        Args:
            is_awaited: wait for it, however new it is.
        """
        if len(self._told) <= (0 if is_awaited else self._lag):
            return None
        return self._told.popleft().read()

    def forget(self) -> None:
        """Leave unread what is left."""
        self._told.clear()
