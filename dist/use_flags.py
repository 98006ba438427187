"""Which parameters any rank used: one byte each, exchanged after the last bucket of a sync."""

import torch
from torch import Tensor

from dist.collectives import BucketCollectives, Work


class UseFlags:
    """The flags of some parameters.

    Args:
        count: parameters.
        collectives: that exchange the flags.
        device: of the gradients.
    """

    def __init__(self, count: int, collectives: BucketCollectives, device: torch.device) -> None:
        self._collectives = collectives
        self._flags: Tensor = collectives.new_buffer(max(count, 1), torch.uint8, device)
        self._largest = torch.zeros(max(count, 1), dtype=torch.uint8, device=device)
        self._has_gradient = [False] * count
        self._work: Work | None = None

    def note(self, first: int, has_gradient: list[bool]) -> None:
        """Set flags from the one of number `first` on: whether this rank has gradients."""
        self._has_gradient[first : first + len(has_gradient)] = has_gradient

    def send(self) -> None:
        """Start to exchange them."""
        self._collectives.wait_until_writable(self._flags)
        if all(self._has_gradient):
            self._flags.fill_(1)
        else:
            self._flags[: len(self._has_gradient)] = torch.tensor(
                self._has_gradient, dtype=torch.uint8
            )
        self._work = self._collectives.all_reduce_max(self._flags, self._largest)

    def used_by_any(self) -> list[bool]:
        """Wait; then for each parameter whether some rank has a gradient. All flags are unset."""
        assert self._work is not None
        self._work.wait()
        self._work = None
        # What this rank has, no rank needs to tell it; to ask would make the CPU wait for a GPU.
        is_used = self._has_gradient
        used = is_used if all(is_used) else [bool(flag) for flag in self._largest.tolist()]
        self._has_gradient = [False] * len(used)
        return used

    def recycle(self) -> None:
        """Give the memory back."""
        self._collectives.recycle(self._flags)
