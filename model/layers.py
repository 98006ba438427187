"""The parts of a block that are not attention: RMSNorm, rotary positions, SwiGLU."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from model.linear import Linear


class _Normalise(torch.autograd.Function):
    """RMSNorm's formula, with the gradient written out.

    With scale = 1 / sqrt(mean(x^2) + eps) and g = grad * weight, the gradient of x is
    scale * g - x * scale^3 * mean(g * x). For 512 x 512 on one thread of a CPU that takes 0.6 ms
    where autograd through the operations takes 1.1: 2 % of a training step.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = torch.rsqrt(norm.square_().div_(x.shape[-1]).add_(eps))
        ctx.save_for_backward(x, scale, weight)
        return (wide * scale).mul_(weight).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, scale, weight = ctx.saved_tensors
        width = x.shape[-1]
        wide, grad, weight = x.float(), grad.float(), weight.float()
        along = (grad * wide).reshape(-1, width)
        grad_weight = torch.mv(along.T, scale.flatten())
        shared = torch.mv(along, weight).view(scale.shape).mul_(scale.pow(3)).div_(-width)
        grad_x = (grad * weight).mul_(scale).addcmul_(wide, shared)
        return grad_x.to(x.dtype), grad_weight, None


class RMSNorm(nn.Module):
    """Root mean square normalisation (Zhang & Sennrich 2019), computed in fp32.

    x / sqrt(mean(x^2) + eps) * weight over the last dimension. In bf16 the sum of squares would
    keep 8 bits, so the input is widened first and the result narrowed last.
    """

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise (..., width); the dtype stays."""
        return _Normalise.apply(x, self.weight, self.eps)


class RotaryEmbedding(nn.Module):
    """Rotary position embedding (Su et al. 2021) in the half-split layout of Llama and Qwen.

    Element i of a head's first half and element i of its second are one pair, turned by
    position / theta^(2 i / head_dim). The dot product of a turned query and a turned key then
    depends on the distance of their positions alone.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, head_dim: int, max_seq_len: int, theta: float = 10000.0) -> None:
        super().__init__()
        frequencies = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
        angles = torch.outer(torch.arange(max_seq_len, dtype=torch.float64), frequencies)
        angles = torch.cat((angles, angles), dim=-1)  # (max_seq_len, head_dim)
        # Derived from the config, so not part of the state dict.
        self.register_buffer("cos", angles.cos().float(), persistent=False)
        self.register_buffer("sin", angles.sin().float(), persistent=False)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines for positions (..., seq), each (..., 1, seq, head_dim) fp32.

        The extra dimension stands for the heads.
        """
        return self.cos[positions].unsqueeze(-3), self.sin[positions].unsqueeze(-3)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn (batch, heads, seq, head_dim) by the angles of `RotaryEmbedding.at`.

    The result is contiguous, and fp32 for 16-bit `x`: who wants it narrower narrows it once.
    """
    return _Rotate.apply(x, cos, sin)


class _Rotate(torch.autograd.Function):
    """A rotation, whose gradient is the rotation back: none of its steps need be kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.dtype = x.dtype
        return _turned(x, cos, sin, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turned(grad, cos, sin, -1).to(ctx.dtype), None, None


def _turned(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    half = x.shape[-1] // 2
    dtype = torch.promote_types(x.dtype, cos.dtype)
    if x.dtype == dtype and x.is_contiguous():
        wide = x
    else:  # both in one pass
        wide = torch.empty(x.shape, dtype=dtype, device=x.device).copy_(x)
    turned = wide * cos
    turned[..., :half].addcmul_(wide[..., half:], sin[..., :half], value=-sign)
    turned[..., half:].addcmul_(wide[..., :half], sin[..., half:], value=sign)
    return turned


class SwiGLU(nn.Module):
    """Feed-forward network with a SiLU gate (Shazeer 2020): down(silu(gate(x)) * up(x)).

    Gate and up are one matrix, so that x is read once.
    """

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.gate_up = Linear(d_model, 2 * d_ff, bias=False)
        self.down = Linear(d_ff, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(..., d_model) -> (..., d_model)."""
        return self.down(_Gate.apply(self.gate_up(x)))


class _Gate(torch.autograd.Function):
    """silu(gate) * up of (..., gate and up), with the gradient written out: no zeros to fill."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        activated = F.silu(gate)
        ctx.save_for_backward(gate_up, activated)
        return activated * up

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        gate_up, activated = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        grad_gate = torch.ops.aten.silu_backward(grad * up, gate)
        return torch.cat((grad_gate, grad * activated), dim=-1)
