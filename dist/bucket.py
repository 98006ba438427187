"""A bucket: parameters of one dtype and device laid end to end in a flat buffer.

Both halves of dist/ stand on this layout. DDP lets the gradients be views of such a buffer, so that
what backward writes is what the network sends. The sharded optimizer lays the weights out in the
same way and cuts gradients and weights alike into equal shards, one a rank.

    elements   | p0 ........ | p1 .... | p2 ............... | padding |
    shards     | rank 0          | rank 1          | rank 2           |

Parameters stand in reverse order of registration, which is about the order in which backward
finishes them, so the first bucket is full first.
"""

from collections.abc import Hashable, Iterable, Sequence

from torch import Tensor, nn


class Bucket:
    """The flat layout of some parameters.

    Args:
        parameters: of one dtype and one device, in the order in which they are laid down.
        world_size: the padded length is a multiple of it.
        unit: elements that a cut between shards must not part: 1, or those of a whole matrix.

    Attributes:
        parameters: as given.
        offsets: first element of each.
        numel: elements of the parameters together.
        padded_numel: with padding; the length of a buffer.
        nbytes: of a buffer.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], world_size: int = 1, unit: int = 1
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
        multiple = world_size * max(unit, 1)
        # Never empty: buffers are told apart by their address, and an empty one has none.
        self.padded_numel = -(-max(self.numel, 1) // multiple) * multiple
        self.nbytes = self.padded_numel * self.dtype.itemsize

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

        In the order in which they lie there, without gaps. A parameter that lies in several shards
        has a piece in each; one that lies in other shards alone is left out.
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
    first_capacity_bytes: float | None = None,
    whole_matrices: bool = False,
) -> list[Bucket]:
    """Deal parameters, last registered first, into buckets of about `capacity_bytes`.

    Args:
        parameters: in order of registration.
        capacity_bytes: a bucket is closed before it would exceed this; a larger parameter fills
            one alone.
        world_size: see `Bucket`.
        first_capacity_bytes: of the first bucket; None: like the others. A small one is full, and
            on its way, soon after backward has begun.
        whole_matrices: no parameter may be cut. A bucket then holds parameters of one shape, and
            an equal number for each rank before it is closed; so each rank gets as many, stacked.

    Returns:
        In the order in which they are closed.
    """
    open_buckets: dict[Hashable, list[nn.Parameter]] = {}
    closed: list[list[nn.Parameter]] = []
    for parameter in reversed(unique(parameters)):
        kind = (parameter.dtype, parameter.device, parameter.shape if whole_matrices else None)
        members = open_buckets.setdefault(kind, [])
        capacity = capacity_bytes
        if not closed and first_capacity_bytes is not None:
            capacity = first_capacity_bytes
        is_full = sum(p.nbytes for p in members) + parameter.nbytes > capacity
        if members and is_full and not (whole_matrices and len(members) % world_size):
            closed.append(members)
            open_buckets[kind] = members = []
        members.append(parameter)
    closed.extend(members for members in open_buckets.values() if members)
    return [
        Bucket(members, world_size, members[0].numel() if whole_matrices else 1)
        for members in closed
    ]
