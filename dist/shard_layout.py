"""Weights laid into flat buckets, of which each rank keeps its shard."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dist.bucket import Bucket, make_buckets
from dist.collectives import open_collectives, world_size
from dist.ddp import DDP
from dist.parameter_gather import ParameterGather
from dist.same_model import check_same_order
from dist.shard import Shard

BUCKET_BYTES = 25 * 2**20


class ShardLayout:
    """This rank's shards, and the exchange that makes whole weights of all ranks' shards.

    Args:
        ddp: from now on hands over the gradients in shards; None: each weight has its own.

    Attributes:
        shards: one for each bucket, in the order they were added.
        in_reading_order: the same, those first whose weights a forward reads first.
        gather: the exchange; None in a world of one, or while there is nothing to exchange.
    """

    def __init__(self, ddp: DDP | None) -> None:
        self._ddp = ddp
        self.shards: list[Shard] = []
        self.in_reading_order: list[Shard] = []
        self.gather: ParameterGather | None = None

    @property
    def device(self) -> torch.device:
        """Where the weights are; the CPU while there are none."""
        return self.shards[0].buffer.device if self.shards else torch.device("cpu")

    def add(self, groups: Sequence[tuple[Sequence[nn.Parameter], bool]]) -> list[list[Shard]]:
        """Lay weights into flat buckets and take this rank's share of each.

        Args:
            groups: each of weights, the same on every rank, whose memory moves, and whether they
                are cut between matrices alone, every rank as many of them.

        Returns:
            The shards that are new, of each group, one for each bucket.

        Raises:
            ValueError: whole matrices are wanted of something else, ranks list weights in different
                orders, or a weight is none of the DDP's module, or is sharded already; all groups
                are as they were.
            RuntimeError: in the middle of a sync; likewise.
        """
        wanted = [
            (bucket, whole_matrices, number)
            for number, (weights, whole_matrices) in enumerate(groups)
            for bucket in self._buckets(weights, whole_matrices)
        ]
        buckets = [bucket for bucket, _, _ in wanted]
        reducers: list[Any] = [None] * len(buckets)
        if self._ddp is not None:
            reducers = list(self._ddp.scatter_gradients(buckets))
        added: list[list[Shard]] = [[] for _ in groups]
        for (bucket, whole_matrices, number), reducer in zip(wanted, reducers, strict=True):
            shard = Shard(bucket, self._new_buffer(bucket), whole_matrices, reducer)
            added[number].append(shard)
            self.shards.append(shard)
        self.in_reading_order = sorted(self.shards, key=self._place)
        return added

    def _buckets(self, weights: Sequence[nn.Parameter], whole_matrices: bool) -> list[Bucket]:
        """Deal weights into buckets; frozen ones, which have no state, lie apart.

        Among the others they would leave some rank less than its share.
        """
        if whole_matrices and any(weight.dim() != 2 for weight in weights):
            raise ValueError("whole matrices are shared out here, and a parameter is none")
        places = [self._ddp.place_of(w) if self._ddp is not None else None for w in weights]
        check_same_order(weights, places)
        buckets: list[Bucket] = []
        for frozen in (False, True):
            some = [
                weight
                for weight in weights
                # A table of integers never has a gradient, nor a state.
                if weight.requires_grad != frozen
                and (weight.is_floating_point() or weight.is_complex())
            ]
            if self._ddp is not None:
                buckets += self._ddp.make_buckets(some, whole_matrices)
            else:
                buckets += make_buckets(some, BUCKET_BYTES, world_size(), None, whole_matrices)
        return buckets

    def _new_buffer(self, bucket: Bucket) -> Tensor:
        if world_size() > 1 and self.gather is None:
            self.gather = self._new_gather(bucket.device)
        if self.gather is not None:
            return self.gather.add(bucket)
        return torch.empty(bucket.padded_numel, dtype=bucket.dtype, device=bucket.device)

    def _place(self, shard: Shard) -> int:
        """Of its first weight in the module, which reads them about as it registers them."""
        if self._ddp is None:
            return 0
        return min(self._ddp.place_of(weight) or 0 for weight in shard.bucket.parameters)

    def _new_gather(self, device: torch.device) -> ParameterGather:
        if self._ddp is None:
            return ParameterGather(None, open_collectives(device))
        assert self._ddp.collectives is not None
        return ParameterGather(self._ddp.module, self._ddp.collectives)
