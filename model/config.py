"""The shape of the model, its presets, and every reason for which a shape can be wrong."""

import math
from dataclasses import dataclass, replace
from typing import Any

# Matrix products run at full speed when their sides are multiples of this on every device that we
# know of, so the sides that nobody chooses for their exact value are rounded up to it.
EFFICIENT_MULTIPLE = 64
# Far above any model that was trained so far: what is larger is a slip, better told at once than
# by an allocator, or by nothing for as long as it takes to reckon with.
LARGEST = {
    "d_model": 2**18,
    "num_layers": 2**12,
    "num_heads": 2**17,
    "num_kv_heads": 2**17,
    "d_ff": 2**20,
    "max_seq_len": 2**24,
    "vocab_size": 2**24,
}


class ModelConfigError(ValueError):
    """A model that cannot be built; the message names every problem with its values."""


@dataclass(frozen=True)
class ModelConfig:
    """Model"""

    d_model: int = 256
    """Width of the residual stream."""
    num_layers: int = 4
    """Transformer blocks."""
    num_heads: int = 4
    """Query heads; d_model must divide by it."""
    num_kv_heads: int | None = None
    """Key/value heads, fewer for grouped-query attention; none: num_heads."""
    d_ff: int | None = None
    """Inner width of the feed-forward network; none: 8/3 of d_model, rounded up to 64."""
    max_seq_len: int = 128
    """Context: tokens in a training window, and positions that the model knows."""
    vocab_size: int | None = None
    """Rows of the embedding; none: the tokenizer's vocabulary, rounded up to 64."""
    rope_theta: float = 10000.0
    """Base of the rotary wavelengths."""
    norm_eps: float = 1e-6
    """Added to the mean square in RMSNorm."""
    qk_norm: bool = True
    """RMSNorm on queries and keys: Qwen3's architecture with it, Llama's without."""
    tie_weights: bool = False
    """Output head and embedding are one matrix."""
    dropout: float = 0.0
    """Probability of dropping an element of the embedding and of each residual branch."""

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.d_model // self.num_heads

    def resolve(self, tokenizer_vocab_size: int) -> "ModelConfig":
        """Fill in what was left open and refuse what cannot work.

        Args:
            tokenizer_vocab_size: ids that the tokenizer can produce.

        Returns:
            A config without None in num_kv_heads, d_ff and vocab_size.

        Raises:
            ModelConfigError: one message with all problems.
        """
        resolved = replace(
            self,
            num_kv_heads=self.num_heads if self.num_kv_heads is None else self.num_kv_heads,
            d_ff=_round_up(8 * self.d_model // 3) if self.d_ff is None else self.d_ff,
            vocab_size=(
                _round_up(tokenizer_vocab_size) if self.vocab_size is None else self.vocab_size
            ),
        )
        if problems := resolved._problems(tokenizer_vocab_size):
            raise ModelConfigError("; ".join(problems))
        return resolved

    def _problems(self, tokenizer_vocab_size: int) -> list[str]:
        counts = ("d_model", "num_layers", "num_heads", "num_kv_heads", "d_ff", "max_seq_len")
        problems = [
            f"{name} is {getattr(self, name)}, it must be at least 1"
            for name in counts
            if getattr(self, name) < 1
        ]
        problems += [
            f"{name} is {getattr(self, name)}, it must be at most {most:,}"
            for name, most in LARGEST.items()
            if getattr(self, name) > most
        ]
        # What divides what can be asked of positive numbers only.
        problems += [] if problems else self._misfits()
        assert self.vocab_size is not None
        if self.vocab_size < tokenizer_vocab_size:
            problems.append(
                f"vocab_size {self.vocab_size} is smaller than the tokenizer's "
                f"{tokenizer_vocab_size}: leave vocab_size out, or prepare the text with "
                f"--vocab_size {self.vocab_size}"
            )
        if not 0.0 <= self.dropout < 1.0:
            problems.append(f"dropout is {self.dropout}, it must be in [0, 1)")
        for name in ("rope_theta", "norm_eps"):
            if not 0.0 < getattr(self, name) < math.inf:
                problems.append(f"{name} is {getattr(self, name)}, it must be positive")
        return problems

    def _misfits(self) -> list[str]:
        """Numbers of heads that do not share out what they are given."""
        assert self.num_kv_heads is not None
        problems = []
        if self.d_model % self.num_heads:
            problems.append(
                f"d_model {self.d_model} does not divide by num_heads {self.num_heads}: "
                f"use {self._even_heads()}"
            )
        elif self.head_dim % 2:
            problems.append(
                f"d_model {self.d_model} / num_heads {self.num_heads} = {self.head_dim} is odd, "
                f"and rotary positions turn pairs: use {self._even_heads()}"
            )
        if self.num_heads % self.num_kv_heads:
            problems.append(
                f"num_heads {self.num_heads} does not divide by num_kv_heads "
                f"{self.num_kv_heads}: use num_kv_heads "
                f"{_nearest_divisors(self.num_heads, self.num_kv_heads)}"
            )
        return problems

    def _even_heads(self) -> str:
        """Say which values near the given ones make heads of equal, even width."""
        pair = 2 * self.num_heads
        width = f"d_model {pair * max(1, round(self.d_model / pair))}"
        if self.d_model % 2:
            return width
        return f"num_heads {_nearest_divisors(self.d_model // 2, self.num_heads)}, or {width}"


def _gpt2_size(num_layers: int, d_model: int, num_heads: int) -> dict[str, Any]:
    shape = {"num_layers": num_layers, "d_model": d_model, "num_heads": num_heads}
    return {**shape, "max_seq_len": 1024, "tie_weights": True}


# Shapes that people ask for by name. "gpt2-124m" and the larger ones have the layers, width and
# heads of the models of that name in our architecture (SwiGLU of equal parameter count).
PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {"num_layers": 2, "d_model": 64, "num_heads": 2, "max_seq_len": 64},
    "shakespeare-char": {"num_layers": 4, "d_model": 128, "num_heads": 4, "max_seq_len": 64},
    "gpt2-124m": _gpt2_size(num_layers=12, d_model=768, num_heads=12),
    "gpt2-350m": _gpt2_size(num_layers=24, d_model=1024, num_heads=16),
    "gpt2-774m": _gpt2_size(num_layers=36, d_model=1280, num_heads=20),
    "gpt2-1.5b": _gpt2_size(num_layers=48, d_model=1600, num_heads=25),
}


def _nearest_divisors(number: int, wanted: int) -> str:
    """The one or two divisors of number that are nearest to wanted, as `4 or 6`."""
    divisors = [n for n in range(1, number + 1) if number % n == 0]
    nearest = sorted(divisors, key=lambda n: abs(n - wanted))[:2]
    return " or ".join(map(str, sorted(nearest)))


def _round_up(size: int) -> int:
    return max(1, -(-size // EFFICIENT_MULTIPLE)) * EFFICIENT_MULTIPLE
