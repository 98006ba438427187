"""Ranks that hold different models average gradients of different things: refuse that at once."""

import hashlib
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


def _first_difference(held_by_rank: list[list[str]]) -> str:
    for rank, held in enumerate(held_by_rank):
        for reference, other in zip_longest(held_by_rank[0], held, fillvalue="nothing more"):
            if reference != other:
                return (
                    f"ranks hold different models: where rank 0 has {reference}, "
                    f"rank {rank} has {other}"
                )
    return ""
