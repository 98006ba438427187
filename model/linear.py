"""Linear maps whose weights' gradients are written where they are wanted.

Autograd makes a gradient wherever memory is free. Data parallel training wants it in the memory
that is sent, and would have to copy it there: on a CPU 4 % of a training step. So whoever wants a
gradient in a place of its own says so on the parameter:

    weight.grad_memory = function   # returns a tensor like the weight, or None: not now

What it returns must be filled and handed to autograd as the gradient. (Megatron-LM's `main_grad`
is such a place.) Without a `grad_memory` these are torch's own layers.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def grad_memory(weight: Tensor) -> Tensor | None:
    """Where this gradient of `weight` is to be written; None: anywhere."""
    function = getattr(weight, "grad_memory", None)
    # In a backward that is itself differentiated a gradient is more than values in memory.
    return None if function is None or torch.is_grad_enabled() else function()


def _may_be_placed(weight: Tensor) -> bool:
    """Whether somebody may want the gradient in a place of its own; a compiler chooses its own."""
    if getattr(weight, "grad_memory", None) is None or torch.compiler.is_compiling():
        return False
    return torch.is_grad_enabled() and weight.requires_grad


class Linear(nn.Linear):
    """`nn.Linear`; what autocast widens of its weight's gradient goes straight to its place."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features)."""
        device = x.device.type
        if not (torch.is_autocast_enabled(device) and _may_be_placed(self.weight)):
            return super().forward(x)
        narrow = _Narrow.apply(self.weight, torch.get_autocast_dtype(device))
        return F.linear(x, narrow, self.bias)


class _Narrow(torch.autograd.Function):
    """A weight in 16 bits, as autocast would make it."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.weight = weight
        return weight.to(dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        memory = grad_memory(ctx.weight)
        if memory is None:
            return grad.to(ctx.weight.dtype), None
        return memory.copy_(grad), None


class Embedding(nn.Embedding):
    """`nn.Embedding`; on a CPU its weight's gradient is added up in its place."""

    def forward(self, ids: Tensor) -> Tensor:
        """(...) int64 -> (..., embedding_dim)."""
        # A GPU adds up in no fixed order, where torch's own way sorts first.
        if ids.device.type != "cpu" or not _may_be_placed(self.weight):
            return super().forward(ids)
        return _LookUp.apply(ids, self.weight)


class _LookUp(torch.autograd.Function):
    """Rows of a table."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor) -> Tensor:
        ctx.weight = weight
        ctx.save_for_backward(ids)
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        (ids,) = ctx.saved_tensors
        memory = grad_memory(ctx.weight)
        if memory is None:
            rows = len(ctx.weight)
            return None, torch.ops.aten.embedding_dense_backward(grad, ids, rows, -1, False)
        return None, memory.zero_().index_add_(0, ids.flatten(), grad.flatten(0, -2))
