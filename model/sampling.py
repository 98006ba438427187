"""From logits to text, token by token: choosing a token, and the loop with the cache.

One promise is kept here: with the cache or without, alone or in a batch, a prompt is continued by
the same tokens, whatever its length. Two rules make that so. A row's positions count its own
tokens, so what stands beside it in the batch cannot move them. And which tokens the model sees
is a function of the row's length alone (`window_start`), never of how the loop got there.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from model.attention import KeyValueCache
from model.config import ModelConfigError
from model.transformer import Transformer


@dataclass(frozen=True)
class SamplingOptions:
    """Sampling"""

    temperature: float = 0.8
    """Divides the logits: below 1 is safer, above 1 wilder, 0 is greedy."""
    top_k: int | None = None
    """Choose among this many most probable tokens only; none: among all."""
    top_p: float = 1.0
    """Choose among the most probable tokens that together reach this probability."""

    def __post_init__(self) -> None:
        """Refuse values without a meaning.

        Raises:
            ModelConfigError: one message with all problems.
        """
        problems = []
        if not self.temperature >= 0.0:
            problems.append(f"temperature is {self.temperature}, it must be 0 (greedy) or more")
        if self.top_k is not None and self.top_k < 1:
            problems.append(f"top_k is {self.top_k}, it must be at least 1")
        if not 0.0 < self.top_p <= 1.0:
            problems.append(f"top_p is {self.top_p}, it must be above 0 and at most 1")
        if problems:
            raise ModelConfigError("; ".join(problems))


def choose(
    logits: Tensor, options: SamplingOptions, generator: torch.Generator | None = None
) -> int:
    """Draw one token id from logits (vocab,).

    Temperature 0 takes the largest logit and draws nothing. Otherwise the candidates are cut to
    the top_k largest, then to the smallest set whose probability reaches top_p (Holtzman et al.
    2020; the token that crosses top_p belongs to the set), and one is drawn.
    """
    if options.temperature == 0.0:
        return int(logits.argmax())
    # float64 on the CPU: the cumulative sum is exact enough to compare with top_p, and the same
    # seed draws the same text on every device. The largest logit becomes 0 before the division,
    # which no temperature, however small, can then take out of range.
    logits = logits.double().cpu()
    logits = (logits - logits.max()) / options.temperature
    count = logits.numel() if options.top_k is None else min(options.top_k, logits.numel())
    values, ids = logits.topk(count)
    probabilities = values.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    # The first candidate always stays: nothing comes before it.
    probabilities = probabilities.where(before < options.top_p, 0.0)
    return int(ids[torch.multinomial(probabilities, 1, generator=generator)])


def window_start(length: int, max_seq_len: int) -> int:
    """First token that the model sees when a row holds `length` tokens.

    A row that outgrows the context loses its oldest tokens an eighth of the context at a time.
    One at a time would shift every position, and so empty the cache, at every token.
    """
    step = max(1, max_seq_len // 8)
    return max(0, -(-(length - max_seq_len) // step) * step)


@dataclass
class _Row:
    """One sequence of the batch."""

    tokens: list[int]
    # What the next token is chosen among; None: all.
    allowed: Tensor | None = None
    generator: torch.Generator = field(default_factory=torch.Generator)
    finished: bool = False

    def choose(self, logits: Tensor, options: SamplingOptions) -> int:
        if self.allowed is None:
            return choose(logits, options, self.generator)
        allowed, self.allowed = self.allowed, None
        return int(allowed[choose(logits[allowed], options, self.generator)])

    def window(self, max_seq_len: int) -> list[int]:
        return self.tokens[window_start(len(self.tokens), max_seq_len) :]


def generate(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    options: SamplingOptions,
    vocab_size: int | None = None,
    stop_id: int | None = None,
    first_ids: Sequence[Sequence[int] | None] | None = None,
    seed: int = 0,
    use_cache: bool = True,
) -> Iterator[list[int | None]]:
    """Continue every prompt, yielding one new token a row at a time.

    Args:
        model: in evaluation mode.
        prompts: token ids, at least one each, of any lengths.
        max_new_tokens: tokens to add to each row at most.
        options: how a token is chosen.
        vocab_size: ids from here on are never chosen (a padded vocabulary); None: all are.
        stop_id: a row ends before this token; None: no row ends early.
        first_ids: for each row the ids that its first new token is chosen among, None for all.
        seed: every row draws from a generator of its own, seeded with this, the row's prompt and
            how many equal prompts stand before it. So its text is what it would be alone, and
            no two rows draw alike.
        use_cache: False computes every position anew for every token; the reference.

    Yields:
        For each row the id of its next token, None once the row has finished.

    Raises:
        ModelConfigError: at the call, for no prompt, a prompt without tokens, or max_new_tokens
            below 0.
    """
    if max_new_tokens < 0:
        raise ModelConfigError(f"max_new_tokens is {max_new_tokens}, it must be 0 or more")
    if not prompts or any(len(prompt) == 0 for prompt in prompts):
        raise ModelConfigError(
            "a prompt is empty: the model needs at least one token to go on from"
        )
    rows = [_Row(list(prompt)) for prompt in prompts]
    for row, allowed in zip(rows, first_ids or [None] * len(rows), strict=True):
        row.allowed = None if allowed is None else torch.tensor(allowed)
    for index, row in enumerate(rows):
        identity = f"{seed} {prompts[:index].count(prompts[index])} {row.tokens}"
        digest = hashlib.blake2b(identity.encode("ascii"), digest_size=4).digest()
        row.generator.manual_seed(int.from_bytes(digest, "big"))
    next_logits = _CachedLogits(model) if use_cache else _FreshLogits(model)
    return _grow(rows, next_logits, max_new_tokens, options, vocab_size, stop_id)


@torch.inference_mode()
def _grow(
    rows: list["_Row"],
    next_logits: "_FreshLogits",
    max_new_tokens: int,
    options: SamplingOptions,
    vocab_size: int | None,
    stop_id: int | None,
) -> Iterator[list[int | None]]:
    for _ in range(max_new_tokens):
        logits = next_logits(rows)[:, :vocab_size]
        chosen: list[int | None] = []
        for row, row_logits in zip(rows, logits, strict=True):
            if not row.finished:
                token = row.choose(row_logits, options)
                row.finished = token == stop_id
                row.tokens += [] if row.finished else [token]
            chosen.append(None if row.finished else row.tokens[-1])
        if all(row.finished for row in rows):
            return
        yield chosen


class _FreshLogits:
    """Logits after each row's last token from one forward pass over its whole window."""

    def __init__(self, model: Transformer) -> None:
        self.model = model
        self.device = model.embedding.weight.device
        self.max_seq_len = model.config.max_seq_len

    def __call__(self, rows: list[_Row]) -> Tensor:
        return self._forward([row.window(self.max_seq_len) for row in rows], None)

    def _forward(self, windows: list[list[int]], cache: KeyValueCache | None) -> Tensor:
        # Shorter rows are filled up on the right. Causal attention hides what follows a token,
        # so the filling changes nothing before it.
        longest = max(map(len, windows))
        padded = torch.tensor([w + [0] * (longest - len(w)) for w in windows], device=self.device)
        features = self.model.features(padded, cache)
        last = torch.tensor([len(window) - 1 for window in windows], device=self.device)
        return self.model.output_head(features[torch.arange(len(windows)), last])


class _CachedLogits(_FreshLogits):
    """The same logits, computing only the newest token while the windows' starts stay."""

    def __init__(self, model: Transformer) -> None:
        super().__init__(model)
        self.cache: KeyValueCache | None = None
        self.starts: list[int] = []

    def __call__(self, rows: list[_Row]) -> Tensor:
        starts = [window_start(len(row.tokens), self.max_seq_len) for row in rows]
        if self.cache is None or starts != self.starts:
            self.cache = KeyValueCache(
                self.model.config, len(rows), self.device, self.model.embedding.weight.dtype
            )
            self.starts = starts
            return self._forward([row.window(self.max_seq_len) for row in rows], self.cache)
        newest = torch.tensor([[row.tokens[-1]] for row in rows], device=self.device)
        positions = torch.tensor(
            [[len(row.tokens) - 1 - start] for row, start in zip(rows, starts, strict=True)],
            device=self.device,
        )
        features = self.model.features(newest, self.cache, positions)
        return self.model.output_head(features[:, -1])
