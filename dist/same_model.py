"""Ranks that hold different models average gradients of different things: refuse that at once."""

import hashlib
from collections.abc import Sequence
from itertools import zip_longest

from torch import nn

from dist.collectives import all_gather_objects, broadcast_object, gather_objects


def check_same_model(module: nn.Module, options: str) -> None:
    """Compare what the ranks hold: a digest first, the rest only where that differs.

    Args:
        module: of this rank; its parameters' and buffers' names, shapes and types count, and
            whether parameters are trained, not their values.
        options: what else must be the same, in words.

    Raises:
        ValueError: on every rank, naming the first difference.
    """
    held = [options]
    held += [
        f"parameter {name} {tuple(p.shape)} {p.dtype} requires_grad={p.requires_grad}"
        for name, p in module.named_parameters()
    ]
    held += [f"buffer {name} {tuple(b.shape)} {b.dtype}" for name, b in module.named_buffers()]
    digest = hashlib.sha256("\n".join(held).encode()).hexdigest()
    if len(set(all_gather_objects(digest))) > 1:
        raise ValueError(broadcast_object(_first_difference(gather_objects(held) or [])))


def check_same_order(weights: Sequence[nn.Parameter], places: Sequence[int | None]) -> None:
    """Weights that ranks list in different orders would be exchanged for each other.

    Args:
        weights: as this rank lists them.
        places: of each in its module, where that is known.

    Raises:
        ValueError: on every rank, if the lists differ; equal shapes are told apart by places alone.
    """
    listed = [
        (tuple(weight.shape), str(weight.dtype), weight.requires_grad, place)
        for weight, place in zip(weights, places, strict=True)
    ]
    digest = hashlib.sha256(repr(listed).encode()).hexdigest()
    if len(set(all_gather_objects(digest))) > 1:
        raise ValueError(
            "ranks give ShardedOptimizer different parameters, or the same in another order: "
            "list them alike, as model.parameters() does (a set has no order)"
        )


def _first_difference(held_by_rank: list[list[str]]) -> str:
    for rank, held in enumerate(held_by_rank):
        for reference, other in zip_longest(held_by_rank[0], held, fillvalue="nothing more"):
            if reference != other:
                return (
                    f"ranks hold different models: where rank 0 has {reference}, "
                    f"rank {rank} has {other}"
                )
    return ""
