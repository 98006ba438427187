"""What our training step is measured against: the same model and loop of torch's own parts alone.

The names of the weights are ours, so that a state dict moves over.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.config import ModelConfig


class PlainTransformer(nn.Module):
    """`model.transformer.Transformer` of F.rms_norm, F.scaled_dot_product_attention, nn.Linear."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.vocab_size is not None
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.blocks = nn.ModuleList(PlainBlock(config) for _ in range(config.num_layers))
        self.final_norm = nn.RMSNorm(config.d_model, config.norm_eps)
        self.output_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        half = torch.arange(0, config.head_dim, 2) / config.head_dim
        angles = torch.outer(torch.arange(config.max_seq_len), config.rope_theta**-half)
        angles = torch.cat((angles, angles), dim=-1)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, token_ids: Tensor) -> Tensor:
        """Logits (batch, seq, vocab_size) of (batch, seq) int64 ids."""
        seq = token_ids.shape[1]
        x = self.embedding(token_ids)
        for block in self.blocks:
            x = block(x, self.cos[:seq], self.sin[:seq])
        return self.output_head(self.final_norm(x))


class PlainBlock(nn.Module):
    """Attention, then the feed-forward network."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.d_model, config.norm_eps)
        self.attention = PlainAttention(config)
        self.feed_forward_norm = nn.RMSNorm(config.d_model, config.norm_eps)
        self.feed_forward = PlainFeedForward(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """(batch, seq, d_model) -> (batch, seq, d_model)."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.feed_forward_norm(x))


class PlainAttention(nn.Module):
    """Causal, with rotary positions and, with `qk_norm`, normalised queries and keys."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        kv_heads = config.num_kv_heads or config.num_heads
        self.heads = (config.num_heads, kv_heads, kv_heads)
        self.head_dim = config.head_dim
        self.qkv = nn.Linear(config.d_model, sum(self.heads) * self.head_dim, bias=False)
        self.output = nn.Linear(config.num_heads * self.head_dim, config.d_model, bias=False)
        norms = [
            nn.RMSNorm(self.head_dim, config.norm_eps) if config.qk_norm else nn.Identity()
            for _ in range(2)
        ]
        self.query_norm, self.key_norm = norms

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """(batch, seq, d_model) -> (batch, seq, d_model)."""
        batch, seq, _ = x.shape
        parts = self.qkv(x).split([count * self.head_dim for count in self.heads], dim=-1)
        queries, keys, values = (
            part.view(batch, seq, count, self.head_dim).transpose(1, 2)
            for part, count in zip(parts, self.heads, strict=True)
        )
        queries = turned(self.query_norm(queries), cos, sin).to(values.dtype)
        keys = turned(self.key_norm(keys), cos, sin).to(values.dtype)
        mixed = F.scaled_dot_product_attention(
            queries, keys, values, is_causal=True, enable_gqa=self.heads[0] != self.heads[1]
        )
        return self.output(mixed.transpose(1, 2).reshape(batch, seq, -1))


class PlainFeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.d_ff is not None
        self.gate_up = nn.Linear(config.d_model, 2 * config.d_ff, bias=False)
        self.down = nn.Linear(config.d_ff, config.d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(..., d_model) -> (..., d_model)."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """(batch, heads, seq, head_dim), turned by the angles of its positions."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def plain_step(
    model: PlainTransformer,
    optimizer: torch.optim.Optimizer,
    batch_at: Callable[[int], Tensor],
    learning_rate_at: Callable[[int], float],
    dtype: torch.dtype,
    max_norm: float,
) -> Callable[[], float]:
    """One training step, which returns the loss.

    Args:
        model: on its device.
        optimizer: over its parameters.
        batch_at: (batch, seq + 1) int64 tokens of step 0, 1, 2, ...
        learning_rate_at: of step 0, 1, 2, ...
        dtype: of matrix products, by autocast.
        max_norm: to which gradients are clipped.
    """
    device = next(model.parameters()).device
    done = 0

    def step() -> float:
        nonlocal done
        tokens = batch_at(done).to(device)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate_at(done)
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        done += 1
        return loss.item()

    return step
