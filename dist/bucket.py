"""A bucket: parameters of one dtype and device laid end to end in flat buffers.

Both halves of dist/ stand on this layout. DDP moves each gradient into a flat buffer as it arrives
and leaves `grad` as a view of it: later micro-batches are added where the network sends from. The
sharded optimizer cuts the same kind of buffer into equal shards, one a rank.

    elements   | p0 ........ | p1 .... | p2 ............... | padding |
    shards     | rank 0          | rank 1          | rank 2           |

Parameters stand in reverse order of registration, which is about the order in which backward
finishes them, so the first bucket is full first.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn


class Bucket:
    """The flat layout of some parameters.

    Args:
        parameters: of one dtype and one device, in the order in which they are laid down.
        world_size: the padded length is a multiple of it.
        extra: elements kept free behind the parameters, for the owner's use.

    Attributes:
        parameters: as given.
        offsets: first element of each.
        numel: elements of the parameters together.
        padded_numel: with `extra` and padding; what `new_buffer` allocates.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], world_size: int = 1, extra: int = 0
    ) -> None:
        kinds = {(parameter.dtype, parameter.device) for parameter in parameters}
        if len(kinds) != 1:
            raise ValueError(f"a bucket holds one dtype on one device, not {kinds}")
        ((self.dtype, self.device),) = kinds
        self.parameters = list(parameters)
        self.offsets = []
        self.numel = 0
        for parameter in parameters:
            self.offsets.append(self.numel)
            self.numel += parameter.numel()
        self.padded_numel = -(-(self.numel + extra) // world_size) * world_size

    def new_buffer(self) -> Tensor:
        """A flat buffer of zeros, (padded_numel,)."""
        return torch.zeros(self.padded_numel, dtype=self.dtype, device=self.device)

    def views(self, buffer: Tensor) -> list[Tensor]:
        """Each parameter's part of a flat buffer, in the parameter's shape."""
        return [
            buffer[offset : offset + parameter.numel()].view(parameter.shape)
            for offset, parameter in zip(self.offsets, self.parameters, strict=True)
        ]

    def shard(self, rank: int, world_size: int) -> tuple[int, int]:
        """First and one-past-last element of a rank's shard."""
        length = self.padded_numel // world_size
        return rank * length, (rank + 1) * length

    def pieces(self, rank: int, world_size: int) -> list[tuple[int, int, int]]:
        """What a rank's shard holds: (parameter's index, from, to) in that parameter's elements.

        A parameter that lies in several shards has a piece in each; one that lies in other
        shards alone is left out.
        """
        start, end = self.shard(rank, world_size)
        found = []
        for index, (offset, parameter) in enumerate(
            zip(self.offsets, self.parameters, strict=True)
        ):
            first = max(start - offset, 0)
            last = min(end - offset, parameter.numel())
            if first < last:
                found.append((index, first, last))
        return found


def unique(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Each physical parameter once, in order of first appearance: tied weights count once."""
    return list({id(parameter): parameter for parameter in parameters}.values())


def make_buckets(
    parameters: Iterable[nn.Parameter],
    capacity_bytes: float,
    world_size: int = 1,
    extra_per_parameter: int = 0,
) -> list[Bucket]:
    """Deal parameters, last registered first, into buckets of about `capacity_bytes`.

    Args:
        parameters: in order of registration.
        capacity_bytes: a bucket is closed before it would exceed this; a larger parameter fills
            one alone.
        world_size: see `Bucket`.
        extra_per_parameter: see `extra` of `Bucket`, for each parameter.
    """
    open_buckets: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    closed: list[list[nn.Parameter]] = []
    for parameter in reversed(unique(parameters)):
        kind = (parameter.dtype, parameter.device)
        members = open_buckets.setdefault(kind, [])
        if members and sum(p.nbytes for p in members) + parameter.nbytes > capacity_bytes:
            closed.append(members)
            open_buckets[kind] = members = []
        members.append(parameter)
    closed.extend(members for members in open_buckets.values() if members)
    return [Bucket(members, world_size, extra_per_parameter * len(members)) for members in closed]
