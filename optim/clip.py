"""Clipping by the global norm of all gradients (Pascanu et al. 2013, arXiv:1211.5063).

One bad batch can produce gradients a hundred times the usual; scaled down together to a bounded
norm they keep their direction and do no harm. Gradients must be whole here: a norm of one's own
piece would clip each rank differently (a sharded optimizer has a `clip_grad_norm` of its own).

Nothing here waits for a GPU: the norm is a tensor, and "is it too large" is arithmetic on it.
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

HALF_PRECISION = (torch.bfloat16, torch.float16)


def clip_grad_norm(
    parameters: Tensor | Iterable[Tensor], max_norm: float, grad_scale: float | Tensor = 1.0
) -> Tensor:
    """Divide all gradients by grad_scale, then scale them to a global L2 norm of at most max_norm.

    In float32 this is torch.nn.utils.clip_grad_norm_, to the last bit. A norm that is not finite
    leaves the gradients as they are, where torch would overwrite them all with NaN or 0: the
    caller looks at the norm, and skips the step.

    Args:
        parameters: those without a gradient are passed over, repeated ones count once. Gradients
            must be complete: in data parallel training the all-reduce comes first.
        max_norm: above 0; infinity: divide and measure alone.
        grad_scale: what the loss was multiplied by; > 0, a number or a 0-d tensor.

    Returns:
        The norm after the division and before clipping, a 0-d tensor on the gradients' device.

    Raises:
        ValueError: max_norm is not above 0.
    """
    parameters = _unique(parameters)
    total_norm = total_grad_norm(parameters) / grad_scale
    clip_grads_with_norm(parameters, max_norm, total_norm, grad_scale)
    return total_norm


@torch.no_grad()
def total_grad_norm(parameters: Tensor | Iterable[Tensor]) -> Tensor:
    """L2 norm over all gradients as if they were one vector.

    Args:
        parameters: those without a gradient are passed over, repeated ones count once.

    Returns:
        0-d tensor on the first gradient's device; float32, also for 16-bit gradients, whose
        squares would overflow or round away; float64 where gradients are. 0 without gradients.
    """
    norms: list[Tensor] = []
    for grads in _gradients_by_kind(parameters):
        dtype = torch.float32 if grads[0].dtype in HALF_PRECISION else None
        norms.extend(torch._foreach_norm(grads, 2, dtype=dtype))
    if not norms:
        return torch.tensor(0.0)
    return torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))


@torch.no_grad()
def clip_grads_with_norm(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    total_norm: Tensor,
    grad_scale: float | Tensor = 1.0,
) -> None:
    """Multiply all gradients in place by min(1, max_norm / total_norm) / grad_scale.

    Args:
        parameters: those without a gradient are passed over, repeated ones are scaled once.
        max_norm: above 0; infinity: divide alone.
        total_norm: 0-d tensor, after the division; of all ranks' pieces together, where gradients
            are sharded. Not finite: change nothing.
        grad_scale: > 0, a number or a 0-d tensor.

    Raises:
        ValueError: max_norm is not above 0.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm {max_norm} must be above 0 (infinity: no clipping)")
    if math.isinf(max_norm) and not isinstance(grad_scale, Tensor) and grad_scale == 1.0:
        return
    # torch's 1e-6 against a norm of 0. Small gradients are multiplied by 1 rather than left alone:
    # asking whether to would make the host wait for the device.
    factor = torch.clamp(max_norm / (total_norm + 1e-6), max=1.0) / grad_scale
    factor = torch.where(torch.isfinite(total_norm), factor, 1.0)
    for grads in _gradients_by_kind(parameters):
        local_factor = factor.to(grads[0].device)
        if grads[0].dtype in HALF_PRECISION:
            # Whether an operation on 16 bits first rounds the factor to 16 depends on the device.
            scaled = torch._foreach_mul([grad.float() for grad in grads], local_factor)
            torch._foreach_copy_(grads, scaled)
        else:
            torch._foreach_mul_(grads, local_factor)


def _gradients_by_kind(parameters: Tensor | Iterable[Tensor]) -> list[list[Tensor]]:
    """Gradients in lists of one device and type each, as the list operations want them."""
    lists: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for parameter in _unique(parameters):
        if parameter.grad is not None:
            kind = (parameter.grad.device, parameter.grad.dtype)
            lists.setdefault(kind, []).append(parameter.grad)
    return list(lists.values())


def _unique(parameters: Tensor | Iterable[Tensor]) -> list[Tensor]:
    if isinstance(parameters, Tensor):
        return [parameters]
    return list({id(parameter): parameter for parameter in parameters}.values())
