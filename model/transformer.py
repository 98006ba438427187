"""The decoder-only Transformer: embedding, pre-norm residual blocks, final norm, output head.

With `qk_norm` this is Qwen3's architecture, without it Llama's; weights move to and from either.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from model.attention import Attention, KeyValueCache
from model.config import ModelConfig
from model.layers import RMSNorm, RotaryEmbedding, SwiGLU
from model.linear import Embedding, Linear
from model.loss import head_loss

INITIAL_HEAD_STD = 0.02


class Block(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x))."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        assert config.d_ff is not None
        self.attention_norm = RMSNorm(config.d_model, config.norm_eps)
        self.attention = Attention(config, layer)
        self.feed_forward_norm = RMSNorm(config.d_model, config.norm_eps)
        self.feed_forward = SwiGLU(config.d_model, config.d_ff)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        x: Tensor,
        angles: tuple[Tensor, Tensor],
        cache: KeyValueCache | None = None,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """(batch, seq, d_model) -> (batch, seq, d_model); arguments as in `Attention.forward`."""
        mixed = self.attention(self.attention_norm(x), angles, cache, positions, mask)
        x = x + self.dropout(mixed)
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))


class OutputHead(Linear):
    """What gives every entry of the vocabulary a logit, or every target its loss."""

    def __init__(self, d_model: int, vocab_size: int) -> None:
        super().__init__(d_model, vocab_size, bias=False)

    def forward(self, features: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits (..., vocab_size) of features (..., d_model); given targets, see `head_loss`."""
        if targets is None:
            return super().forward(features)
        return head_loss(features, self.weight, targets)


class Transformer(nn.Module):
    """A causal language model over token ids.

    Args:
        config: a resolved config (`ModelConfig.resolve`).

    Attributes:
        activation_checkpointing: whether training keeps only the input of each block and runs the
            block again in backward (Chen et al. 2016): memory for one block instead of all, for a
            second forward. It changes no number and no weight, so it is not in the config.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.vocab_size is not None, "resolve the config first"
        self.config = config
        self.activation_checkpointing = False
        self.embedding = Embedding(config.vocab_size, config.d_model)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.num_layers))
        self.final_norm = RMSNorm(config.d_model, config.norm_eps)
        self.output_head = OutputHead(config.d_model, config.vocab_size)
        self.rotary = RotaryEmbedding(config.head_dim, config.max_seq_len, config.rope_theta)
        self._initialise()
        if config.tie_weights:
            self.output_head.weight = self.embedding.weight

    def _initialise(self) -> None:
        """Normal weights that keep every sum and product of the first steps at unit size.

        A matrix has std 1 / sqrt(fan_in), so that it hands on the scale of what it reads. The
        residual stream starts with the embedding's std and is a sum of 2 * num_layers branches:
        what writes into it is scaled to that std, and by 1 / sqrt(2 num_layers), so that depth does
        not change the sum (GPT-2, section 2.3). A head of its own starts small, and the loss near
        log(vocab_size); an embedding that is also the head has std 1 / sqrt(d_model), for logits
        of unit size.
        """
        config = self.config
        stream_std = 1 / math.sqrt(config.d_model) if config.tie_weights else 1.0
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue
            std = 1 / math.sqrt(parameter.shape[1])
            if name == "embedding.weight":
                std = stream_std
            elif name == "output_head.weight":
                std = INITIAL_HEAD_STD
            elif name.endswith(("attention.output.weight", "feed_forward.down.weight")):
                std *= stream_std / math.sqrt(2 * config.num_layers)
            nn.init.normal_(parameter, mean=0.0, std=std)

    def forward(self, token_ids: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits (batch, seq, vocab_size) of the token after each of (batch, seq) int64 ids.

        Given targets (batch, seq) int64, their mean cross-entropy instead, 0-d fp32: then the
        logits are never in memory all at once.

        Raises:
            ValueError: the sequence is longer than max_seq_len.
        """
        return self.output_head(self.features(token_ids), targets)

    def features(
        self,
        token_ids: Tensor,
        cache: KeyValueCache | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """What the output head reads: (batch, seq, d_model), after the final norm.

        Args:
            token_ids: (batch, seq) int64.
            cache: keys and values of earlier positions; the new ones are added.
            positions: (batch, seq) int64 of each id in its own sequence; None: 0, 1, 2, ...

        Raises:
            ValueError: the sequence is longer than max_seq_len.
        """
        batch, seq = token_ids.shape
        if seq > self.config.max_seq_len:
            raise ValueError(f"{seq} tokens, but max_seq_len is {self.config.max_seq_len}")
        mask = None
        if positions is None:
            row = torch.arange(seq, device=token_ids.device)
            angles = self.rotary.at(row)
            positions = row.expand(batch, seq)
        else:
            angles = self.rotary.at(positions)
            entries = torch.arange(int(positions.max()) + 1, device=token_ids.device)
            mask = entries <= positions[:, None, :, None]  # (batch, 1, seq, end)
        x = self.dropout(self.embedding(token_ids))
        # Run again, a block would store its keys and values again: not with a cache.
        recompute = self.activation_checkpointing and torch.is_grad_enabled() and cache is None
        for block in self.blocks:
            if recompute:
                x = checkpoint(block, x, angles, None, positions, mask, use_reentrant=False)
            else:
                x = block(x, angles, cache, positions, mask)
        return self.final_norm(x)

    def row_blocks(self) -> dict[str, tuple[int, ...]]:
        """The matrices inside the blocks, by name, with the rows of each map that they hold.

        Queries, keys and values are one matrix here, as are gate and up; an optimizer that looks at
        matrices as maps must take them for several.
        """
        blocks: dict[str, tuple[int, ...]] = {}
        for number, block in enumerate(self.blocks):
            for name, parameter in block.named_parameters():
                if parameter.dim() != 2:
                    continue
                rows: tuple[int, ...] = (parameter.shape[0],)
                if name == "attention.qkv.weight":
                    config = self.config
                    kv_heads = config.num_kv_heads or config.num_heads
                    heads = (config.num_heads, kv_heads, kv_heads)
                    rows = tuple(count * config.head_dim for count in heads)
                elif name == "feed_forward.gate_up.weight":
                    rows = (parameter.shape[0] // 2,) * 2
                blocks[f"blocks.{number}.{name}"] = rows
        return blocks

    def num_parameters(self) -> int:
        """Parameters, each physical one counted once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def num_flops_per_token(self, seq_len: int | None = None) -> int:
        """Floating-point operations of forward and backward for one token.

        A matrix product costs 2 operations for each weight and token, and its backward twice
        that. The embedding look-up multiplies nothing and is left out; the output head is in,
        tied or not. Attention multiplies each query with the keys before it and mixes as many
        values: (seq_len + 1) / 2 on average, because causal attention needs no more. What
        activation checkpointing computes a second time is left out: it brings nothing new.

        Args:
            seq_len: tokens in a sequence; None: max_seq_len.
        """
        config = self.config
        seq_len = config.max_seq_len if seq_len is None else seq_len
        weights = sum(p.numel() for p in self._multiplied_matrices())
        attention = 2 * config.num_layers * config.num_heads * config.head_dim * (seq_len + 1) // 2
        return 3 * 2 * (weights + attention)

    def _multiplied_matrices(self) -> Iterator[Tensor]:
        yield self.output_head.weight
        for block in self.blocks:
            yield from (parameter for parameter in block.parameters() if parameter.dim() == 2)
