"""Causal self-attention with grouped key/value heads, and the cache that makes decoding cheap."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from model.config import ModelConfig
from model.layers import RMSNorm, rotate
from model.linear import Linear

# Longest sequence for `ShortAttention`. The work above the diagonal is thrown away, and weights
# take batch x heads x seq^2 x 2 bytes a layer: a training step is 10 % faster than with torch's
# kernel at 128 positions, 6 % at 512, and 17 % slower at 1024.
MAX_SHORT_SEQ = 512


class KeyValueCache:
    """Keys and values of all positions seen so far, for every layer.

    Rows of a batch need not be equally long: entry p of a row is the token at position p, and a
    query at position q reads the entries 0..q. Entries beyond a row's end may hold anything;
    they are overwritten before a query can reach them.
    """

    def __init__(
        self, config: ModelConfig, batch: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        shape = (batch, config.num_kv_heads or config.num_heads, config.max_seq_len)
        self.keys = [
            torch.zeros(*shape, config.head_dim, device=device, dtype=dtype)
            for _ in range(config.num_layers)
        ]
        self.values = [torch.zeros_like(keys) for keys in self.keys]

    def update(
        self, layer: int, keys: Tensor, values: Tensor, positions: Tensor, end: int
    ) -> tuple[Tensor, Tensor]:
        """Store new entries and return all that a query may read.

        Args:
            layer: index of the block.
            keys: (batch, kv_heads, seq, head_dim), with rotary positions applied.
            values: the same shape.
            positions: (batch, seq) int64, where each new entry belongs.
            end: one more than the largest position.

        Returns:
            Keys and values (batch, kv_heads, end, head_dim).
        """
        index = positions[:, None, :, None].expand_as(keys)
        self.keys[layer].scatter_(2, index, keys)
        self.values[layer].scatter_(2, index, values)
        return self.keys[layer][:, :, :end], self.values[layer][:, :, :end]


class ShortAttention(torch.autograd.Function):
    """Causal `F.scaled_dot_product_attention` in bf16 as plain products and a softmax.

    For (4, 8, 128, 64) on one thread torch's kernel takes 2.6 ms forward and 11.4 backward, this
    one 3.0 and 2.6: a tenth of a training step.

    Scores are fp32, as in torch's kernel: rounded to bf16 they would double or triple the error of
    a sharp softmax. The other products read bf16 and sum in fp32.
    """

    @staticmethod
    def forward(ctx: Any, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Mix values (batch, heads, seq, head_dim) bf16; queries and keys alike, fp32 or bf16."""
        batch, heads, seq, head_dim = queries.shape
        device, dtype = queries.device, values.dtype
        ctx.scale = head_dim**-0.5
        # (batch * heads, seq, head_dim)
        queries, keys, flat_values = (x.flatten(0, 1) for x in (queries, keys, values))
        causal = torch.zeros(seq, seq, device=device).masked_fill_(
            torch.ones(seq, seq, dtype=torch.bool, device=device).triu_(1), -torch.inf
        )
        with torch.autocast(device.type, enabled=False):  # it would narrow the scores
            scores = torch.baddbmm(
                causal, queries.float(), keys.float().transpose(-2, -1), alpha=ctx.scale
            )
        weights = scores.softmax(dim=-1).to(dtype)  # (batch * heads, seq, seq)
        ctx.save_for_backward(queries.to(dtype), keys.to(dtype), flat_values, weights)
        return (weights @ flat_values).view(batch, heads, seq, head_dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of queries, keys and values."""
        queries, keys, values, weights = ctx.saved_tensors
        shape, grad = grad.shape, grad.flatten(0, 1)
        grad_weights = grad @ values.transpose(-2, -1)
        grad_scores = torch._softmax_backward_data(grad_weights, weights, -1, weights.dtype)
        grad_scores *= ctx.scale
        grads = (
            grad_scores @ keys,
            grad_scores.transpose(-2, -1) @ queries,
            weights.transpose(-2, -1) @ grad,
        )
        return tuple(x.view(shape) for x in grads)


def is_short(values: Tensor) -> bool:
    """Whether `ShortAttention` is the faster way: training in bf16 on the CPU, short sequences.

    Without gradients and in fp32 torch's kernel is as fast or faster; GPUs were not measured.
    """
    return (
        values.requires_grad
        and values.dtype == torch.bfloat16
        and values.device.type == "cpu"
        and values.shape[-2] <= MAX_SHORT_SEQ
    )


class Attention(nn.Module):
    """Multi-head causal attention (Vaswani et al. 2017; grouped heads: Ainslie et al. 2023).

    Queries, keys and values come from one matrix whose rows are all query heads, then all key
    heads, then all value heads. With `qk_norm` each query and key is normalised before it is
    turned (Henry et al. 2020; the order is Qwen3's).
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.num_heads = config.num_heads
        self.num_kv_heads = config.num_kv_heads or config.num_heads
        self.head_dim = config.head_dim
        rows = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        self.qkv = Linear(config.d_model, rows, bias=False)
        self.output = Linear(self.num_heads * self.head_dim, config.d_model, bias=False)
        self.query_norm = RMSNorm(self.head_dim, config.norm_eps) if config.qk_norm else None
        self.key_norm = RMSNorm(self.head_dim, config.norm_eps) if config.qk_norm else None

    def forward(
        self,
        x: Tensor,
        angles: tuple[Tensor, Tensor],
        cache: KeyValueCache | None = None,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Mix (batch, seq, d_model) over the sequence.

        Args:
            x: input of the block's attention branch.
            angles: cosines and sines of the positions, from `RotaryEmbedding.at`.
            cache: reads earlier positions from here and stores the new ones.
            positions: (batch, seq), needed with a cache.
            mask: (batch, 1, seq, end) bool, True where a query may read; None: causal.
        """
        batch, seq, _ = x.shape
        heads = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        parts = self.qkv(x).view(batch, seq, sum(heads), self.head_dim).split(heads, dim=2)
        # each (batch, heads, seq, head_dim); queries and keys are fp32 from here on
        queries, keys, values = (part.transpose(1, 2) for part in parts)
        if self.query_norm is not None and self.key_norm is not None:
            queries, keys = (
                norm(part.to(torch.float32, memory_format=torch.contiguous_format))
                for norm, part in ((self.query_norm, queries), (self.key_norm, keys))
            )
        queries, keys = rotate(queries, *angles), rotate(keys, *angles)
        if cache is not None:
            assert positions is not None
            end = seq if mask is None else mask.shape[-1]
            keys, values = cache.update(self.layer, keys.to(values.dtype), values, positions, end)
        if mask is None and is_short(values):
            groups = self.num_heads // self.num_kv_heads
            if groups > 1:
                keys, values = (x.repeat_interleave(groups, dim=1) for x in (keys, values))
            mixed = ShortAttention.apply(queries, keys, values)
        else:
            mixed = F.scaled_dot_product_attention(
                queries.to(values.dtype),
                keys.to(values.dtype),
                values,
                attn_mask=mask,
                is_causal=mask is None,
                enable_gqa=self.num_kv_heads != self.num_heads,
            )
        return self.output(mixed.transpose(1, 2).reshape(batch, seq, -1))
