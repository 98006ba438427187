"""Linear maps whose weights' gradients are written where they are wanted.

Autograd makes a gradient wherever memory is free. Data parallel training wants it in the memory
that is sent, and would have to copy it there: on a CPU 4 % of a training step. So whoever wants a
gradient in a place of its own says so on the parameter:

    weight.grad_memory = function   # of the weight; returns a tensor like it, or None: not now

What it returns must be filled and handed to autograd as the gradient. (Megatron-LM's `main_grad`
is such a place.) Without a `grad_memory` these are torch's own layers.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def grad_memory(weight: Tensor, accumulation: Any) -> Tensor | None:
    """Where this gradient of `weight` is to be written; None: anywhere.

    Only a gradient that nobody sees but `grad` may lie there, for what becomes of the place after
    the backward is not known here: none that a hook is shown or `torch.autograd.grad` returns.

    Args:
        weight: whose gradient is made, in a backward.
        accumulation: the node of the graph that the gradient goes to, of a leaf's accumulation.
    """
    function = getattr(weight, "grad_memory", None)
    if not function or torch.is_grad_enabled() or weight._backward_hooks:
        return None
    try:
        is_accumulated = torch._C._will_engine_execute_node(accumulation)
    except RuntimeError:  # torch.autograd.grad: the node is where it takes the gradient out
        return None
    return function(weight) if is_accumulated else None


def _may_be_placed(weight: Tensor) -> bool:
    """Whether somebody may want the gradient in a place of its own; a compiler chooses its own."""
    if not getattr(weight, "grad_memory", None) or torch.compiler.is_compiling():
        return False
    return weight.requires_grad and weight.dtype == torch.float32 and torch.is_grad_enabled()


class Linear(nn.Linear):
    """`nn.Linear`; what autocast widens of its weight's gradient goes straight to its place.

    A weight that is used twice in one autocast region then gets the sum of both gradients in fp32,
    where torch's has 16 bits.
    """

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features)."""
        if not (_may_be_placed(self.weight) and torch.is_autocast_enabled(x.device.type)):
            return super().forward(x)
        narrow = _Narrow.apply(self.weight, torch.get_autocast_dtype(x.device.type))
        return F.linear(x, narrow, self.bias)


class _Narrow(torch.autograd.Function):
    """An fp32 weight in 16 bits, as autocast would make it."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.weight = weight
        return weight.to(dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        memory = grad_memory(ctx.weight, ctx.next_functions[0][0])
        if memory is None:
            return grad.to(ctx.weight.dtype), None
        return memory.copy_(grad), None


class Embedding(nn.Embedding):
    """`nn.Embedding`; on a CPU its weight's gradient is added up in its place.

    Not one whose padding, norm or frequencies are to be looked after: that is left to torch.
    """

    def forward(self, ids: Tensor) -> Tensor:
        """(...) int64 -> (..., embedding_dim)."""
        is_plain = self.padding_idx is None and self.max_norm is None
        is_plain = is_plain and not (self.scale_grad_by_freq or self.sparse)
        # A GPU adds up in no fixed order, where torch's own way sorts first.
        if not (is_plain and ids.device.type == "cpu" and _may_be_placed(self.weight)):
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
        memory = grad_memory(ctx.weight, ctx.next_functions[1][0])
        if memory is None:
            rows = len(ctx.weight)
            return None, torch.ops.aten.embedding_dense_backward(grad, ids, rows, -1, False)
        return None, memory.zero_().index_add_(0, ids.flatten(), grad.reshape(-1, grad.shape[-1]))
