"""Models, data and comparisons that several tests of dist/ share."""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as torch_dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

WORLD_SIZES = [1, 2, 3, 4]
VOCAB_SIZE = 37  # divides by no number of ranks


class TinyLanguageModel(nn.Module):
    """A tied embedding, a bias, a norm and a parameter without dimensions."""

    def __init__(self, seed: int = 0, vocab_size: int = VOCAB_SIZE, width: int = 12) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.embedding = nn.Embedding(vocab_size, width)
        self.hidden = nn.Linear(width, 3 * width)
        self.norm = nn.LayerNorm(3 * width)
        self.down = nn.Linear(3 * width, width)
        self.head = nn.Linear(width, vocab_size, bias=False)
        self.scale = nn.Parameter(torch.tensor(0.0))
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)  # (batch, seq, width)
        x = x + self.down(torch.tanh(self.norm(self.hidden(x))))
        return self.head(x) * torch.exp(self.scale)


class Branches(nn.Module):
    """Linear layers of which a forward uses the named ones, in the named order."""

    def __init__(self, count: int = 6, width: int = 5, seed: int = 0) -> None:
        super().__init__()
        self.layers: Any = nn.ModuleList(nn.Linear(width, width) for _ in range(count))
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.5

    def forward(self, x: Tensor, order: Sequence[int]) -> Tensor:
        for index in order:
            x = torch.tanh(self.layers[index](x))
        return x


def tokens(step: int, rows: int, vocab_size: int = VOCAB_SIZE, seq_len: int = 7) -> Tensor:
    """The global batch of a step, the same on every rank, (rows, seq_len + 1)."""
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randint(vocab_size, (rows, seq_len + 1), generator=generator)


def language_model_loss(model: nn.Module, batch: Tensor) -> Tensor:
    """Mean over all predictions of next tokens."""
    logits = model(batch[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def ensure_group() -> None:
    """Give a world of one the group that torch's own DDP insists on."""
    if not torch_dist.is_initialized():
        torch_dist.init_process_group("gloo", store=torch_dist.HashStore(), rank=0, world_size=1)


def gradients(module: nn.Module) -> list[Tensor | None]:
    """Copies of all gradients."""
    return [None if p.grad is None else p.grad.clone() for p in module.parameters()]


def assert_close(
    ours: Iterable[Tensor | None], theirs: Iterable[Tensor | None], tolerance: float
) -> None:
    """Compare lists of tensors; tolerance 0 is bit for bit."""
    for position, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert (a is None) == (b is None), f"tensor {position}: one is None"
        if a is not None and b is not None:
            where = f"tensor {position} of shape {tuple(a.shape)}"
            if tolerance == 0:
                assert torch.equal(a, b), f"{where} differs by {(a - b).abs().max()}"
            else:
                furthest = ((a - b).abs() / (1 + b.abs())).max() if a.numel() else 0
                assert furthest <= tolerance, f"{where} differs by {furthest}"


def fingerprint(tensors: Iterable[Tensor | None]) -> str:
    """A digest that is equal only for bit-equal tensors."""
    digest = hashlib.sha256()
    for tensor in tensors:
        if tensor is None:
            digest.update(b"None")
        else:
            flat = tensor.detach().clone().contiguous().reshape(-1)
            digest.update(flat.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def draw(strategy: st.SearchStrategy[Any], count: int) -> list[Any]:
    """Draw examples here, to run them all in one start of processes.

    Ranks that drew for themselves would shrink a failure each in its own way, and hang.
    """
    drawn: list[Any] = []

    @settings(
        max_examples=count,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def collect(example: Any) -> None:
        drawn.append(example)

    collect()
    return drawn
