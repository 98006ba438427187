"""Clipping by the global norm where each rank has pieces of the gradients."""

import torch
from torch import Tensor

from dist.collectives import all_reduce_sum


def clip_shards(
    shards: list[Tensor],
    gradients: list[Tensor],
    device: torch.device,
    max_norm: float,
    grad_scale: float | Tensor = 1.0,
    summed: Tensor | None = None,
) -> Tensor:
    """Divide gradients by grad_scale, then scale them to a global norm of at most max_norm.

    One small reduction makes the norm the same on all ranks; every rank must call it. A norm that
    is not finite leaves the gradients as they are.

    Args:
        shards: this rank's; those of all ranks together are the gradients, each element once.
        gradients: what is changed in place: the shards, or what they are cut from.
        device: of them all; there may be none here.
        max_norm: above 0; infinity: divide and measure alone.
        grad_scale: what the loss was multiplied by; > 0, a number or a 0-d tensor.
        summed: (any,) float32 on the device: what the caller wants to be added over the ranks, in
            place and in the same reduction.

    Returns:
        The norm after the division and before clipping, 0-d float32 on the device.

    Raises:
        ValueError: max_norm is not above 0.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm {max_norm} must be above 0 (infinity: no clipping)")
    total = torch.zeros((), dtype=torch.float32, device=device)
    if shards:
        norms = [norm.float() for norm in torch._foreach_norm(shards, 2)]
        total = torch.stack(norms).square().sum()
    if summed is None:
        all_reduce_sum(total)
    else:
        together = all_reduce_sum(torch.cat([total.view(1), summed]))
        total = together[0]
        summed.copy_(together[1:])
    norm = total.sqrt() / grad_scale
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0) / grad_scale
    factor = torch.where(torch.isfinite(norm), factor, 1.0)
    if gradients and (device.type != "cpu" or factor != 1.0):  # to ask a GPU is to wait for it
        torch._foreach_mul_(gradients, factor)
    return norm
