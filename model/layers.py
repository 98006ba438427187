"""The parts of a block that are not attention: RMSNorm, rotary positions, SwiGLU."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


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
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self.eps)
        return (wide * scale * self.weight).to(x.dtype)


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
    """Turn (batch, heads, seq, head_dim) by the angles of `RotaryEmbedding.at`."""
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (x * cos + turned * sin).to(x.dtype)


class SwiGLU(nn.Module):
    """Feed-forward network with a SiLU gate (Shazeer 2020): down(silu(gate(x)) * up(x)).

    Gate and up are one matrix, so that x is read once.
    """

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(d_model, 2 * d_ff, bias=False)
        self.down = nn.Linear(d_ff, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(..., d_model) -> (..., d_model)."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)
