"""Weights laid into flat buckets, of which each rank keeps its shard."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from dist.bucket import make_buckets
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

    def add(self, weights: Sequence[nn.Parameter], whole_matrices: bool) -> list[Shard]:
        """Lay weights into flat buckets and take this rank's share of each.

        Frozen weights lie apart: they have no state, and would leave some rank less than its share.

        Args:
            weights: the same on every rank; their memory moves.
            whole_matrices: cut between matrices alone, every rank as many of them.

        Returns:
            The shards that are new, one for each bucket.

        Raises:
            ValueError: whole matrices are wanted of something else, ranks list weights in different
                orders, or a weight is none of the DDP's module, or is sharded already.
            RuntimeError: in the middle of a sync.
        """
        if whole_matrices and any(weight.dim() != 2 for weight in weights):
            raise ValueError("whole matrices are shared out here, and a parameter is none")
        places = [self._ddp.place_of(w) if self._ddp is not None else None for w in weights]
        check_same_order(weights, places)
        buckets = []
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
        reducers: list[Any] = [None] * len(buckets)
        if self._ddp is not None:
            reducers = list(self._ddp.scatter_gradients(buckets))
        added = []
        for bucket, reducer in zip(buckets, reducers, strict=True):
            if world_size() > 1 and self.gather is None:
                self.gather = self._new_gather(bucket.device)
            if self.gather is None:
                buffer = torch.empty(bucket.padded_numel, dtype=bucket.dtype, device=bucket.device)
            else:
                buffer = self.gather.add(bucket)
            added.append(Shard(bucket, buffer, whole_matrices, reducer))
        self.shards += added
        self.in_reading_order = sorted(self.shards, key=self._place)
        return added

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
