"""The validation loss is the mean over tokens, however they are dealt into batches."""

import contextlib

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from dist.process_group import World, init_process_group
from model.config import ModelConfig
from model.transformer import Transformer
from tests.harness import run_distributed
from training.evaluate import evaluate

CONTEXT, VOCABULARY = 8, 17


class Windows:
    """Eleven windows: neither 2, 3 nor 8 divides their number."""

    num_windows = 11

    def rows(self, numbers: np.ndarray) -> np.ndarray:
        draw = np.random.default_rng(0)
        return draw.integers(VOCABULARY, size=(self.num_windows, CONTEXT + 1))[numbers]


def make_model() -> Transformer:
    torch.manual_seed(0)
    shape = ModelConfig(d_model=16, num_layers=1, num_heads=2, max_seq_len=CONTEXT, dropout=0.5)
    return Transformer(shape.resolve(VOCABULARY))


def measured(batch_size: int, world: World | None = None) -> float:
    world = world or init_process_group()
    windows: object = Windows()
    return evaluate(make_model(), windows, batch_size, world, contextlib.nullcontext)  # type: ignore[arg-type]


def exact() -> float:
    """Of all tokens at once, with logits in float64."""
    rows = torch.from_numpy(Windows().rows(np.arange(Windows.num_windows)))
    logits = make_model().eval()(rows[:, :-1]).double()
    return cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()).item()


@pytest.mark.parametrize("batch_size", [1, 3, 8, 11])
def test_the_size_of_its_batches_does_not_change_the_loss(batch_size):
    assert measured(batch_size) == pytest.approx(exact(), rel=1e-6)


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_with_unequal_shares_weigh_what_they_should(world_size):
    for loss in run_distributed(measured_on_a_rank, world_size, 2):
        assert loss == pytest.approx(exact(), rel=1e-6)


def measured_on_a_rank(batch_size: int) -> float:
    import torch.distributed as torch_dist

    rank, size = torch_dist.get_rank(), torch_dist.get_world_size()
    world = World(rank=rank, world_size=size, local_rank=rank, device=torch.device("cpu"))
    return measured(batch_size, world)
