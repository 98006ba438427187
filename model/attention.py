"""Causal self-attention with grouped key/value heads, and the cache that makes decoding cheap."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.config import ModelConfig
from model.layers import RMSNorm, rotate


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
        self.qkv = nn.Linear(config.d_model, rows, bias=False)
        self.output = nn.Linear(self.num_heads * self.head_dim, config.d_model, bias=False)
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
        # each (batch, heads, seq, head_dim)
        queries, keys, values = (
            part.view(batch, seq, count, self.head_dim).transpose(1, 2)
            for count, part in zip(
                heads,
                self.qkv(x).split([count * self.head_dim for count in heads], dim=-1),
                strict=True,
            )
        )
        if self.query_norm is not None and self.key_norm is not None:
            queries, keys = self.query_norm(queries), self.key_norm(keys)
        queries, keys = rotate(queries, *angles), rotate(keys, *angles)
        if cache is not None:
            assert positions is not None
            end = seq if mask is None else mask.shape[-1]
            keys, values = cache.update(self.layer, keys, values, positions, end)
        mixed = F.scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=self.num_kv_heads != self.num_heads,
        )
        return self.output(mixed.transpose(1, 2).reshape(batch, seq, -1))
