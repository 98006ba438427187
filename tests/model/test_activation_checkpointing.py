"""Activation checkpointing changes what is kept in memory, and no bit of what is computed."""

import contextlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from model.attention import KeyValueCache
from model.transformer import Transformer
from tests.model.small_models import lively_model, random_ids
from training.live_memory import LiveMemory


def loss_of(model: Transformer, tokens: Tensor) -> Tensor:
    logits = model(tokens[:, :-1]).float()
    return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def compile_blocks(model: Transformer, backend: Any) -> None:
    torch._dynamo.reset()
    for block in model.blocks:
        block.compile(backend=backend)


# The same bits.


def two_micro_batches(
    activation_checkpointing: bool, dtype: torch.dtype, backend: str | None, dropout: float
) -> list[Tensor]:
    """Their losses, the sum of their gradients, and where they leave the random generator."""
    model = lively_model(dropout=dropout, tie_weights=True).train()
    model.activation_checkpointing = activation_checkpointing
    if backend is not None:
        compile_blocks(model, backend)
    torch.manual_seed(0)
    losses = []
    for seed in range(2):
        narrow = dtype != torch.float32
        with torch.autocast("cpu", dtype) if narrow else contextlib.nullcontext():
            loss = loss_of(model, random_ids(3, 33, seed=seed))
        loss.backward()
        losses.append(loss.detach())
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert len(gradients) == len(list(model.parameters()))
    return [*losses, *gradients, torch.get_rng_state()]


@pytest.mark.parametrize(
    ("dropout", "dtype", "backend"),
    [
        (0.0, torch.float32, None),
        (0.3, torch.float32, None),
        (0.0, torch.bfloat16, None),
        (0.3, torch.bfloat16, None),
        (0.3, torch.bfloat16, "eager"),
        (0.0, torch.float32, "aot_eager"),
        (0.3, torch.bfloat16, "aot_eager"),
    ],
)
def test_losses_and_gradients_are_the_same_to_the_bit(dropout, dtype, backend):
    plain, saving = (two_micro_batches(on, dtype, backend, dropout) for on in (False, True))
    for one, other in zip(plain, saving, strict=True):
        assert torch.equal(one, other)


def test_gradients_are_the_same_where_positions_are_given():
    positions = torch.arange(5).flip(0).expand(2, 5)  # whose mask is not the causal one
    gradients = []
    for on in (False, True):
        model = lively_model()
        model.activation_checkpointing = on
        model.features(random_ids(2, 5), positions=positions).square().sum().backward()
        gradients.append([p.grad for p in model.blocks.parameters()])
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other)


# Less memory, for a second forward.


def memory(activation_checkpointing: bool, num_layers: int) -> tuple[int, int]:
    """Bytes that a step holds when its backward begins, and the most that it ever holds."""
    model = lively_model(num_layers=num_layers, dropout=0.1).train()
    model.activation_checkpointing = activation_checkpointing
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    with LiveMemory(not_counted=[*model.parameters(), *gradients]) as live:
        loss = loss_of(model, random_ids(8, 33))
        held = live.now
        loss.backward()
    return held, live.peak


def test_a_block_more_costs_the_memory_of_its_input_and_nothing_else():
    (held, peak), (held_with_more, peak_with_more) = memory(True, 4), memory(True, 8)
    block_input = 8 * 32 * 32 * 4  # (batch, seq, d_model) in float32
    assert held_with_more - held == 4 * block_input
    assert peak_with_more - peak == 4 * block_input
    assert memory(False, 8)[1] - memory(False, 4)[1] > 10 * 4 * block_input


def runs_of_blocks(model: Transformer) -> list[nn.Module]:
    """Grows by a block each time that it is run."""
    runs: list[nn.Module] = []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda block, _: runs.append(block))
    return runs


def test_blocks_are_run_again_in_backward_last_one_first():
    model = lively_model(num_layers=3)
    model.activation_checkpointing = True
    runs, blocks = runs_of_blocks(model), list(model.blocks)
    loss = loss_of(model, random_ids(2, 9))
    assert runs == blocks
    loss.backward()
    assert runs == [*blocks, *reversed(blocks)]


def test_a_compiled_block_is_run_again_as_compiled():
    runs = []

    def counting(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            runs.append(graph)
            return graph(*args)

        return run

    model = lively_model(num_layers=3)
    model.activation_checkpointing = True
    compile_blocks(model, counting)
    loss = loss_of(model, random_ids(2, 9))
    assert len(runs) == 3
    loss.backward()
    assert len(runs) == 6


# Where there is no backward.


def test_without_gradients_or_with_a_cache_it_does_nothing():
    model, token_ids = lively_model(), random_ids(2, 8)
    model.activation_checkpointing = True
    with mock.patch("model.transformer.checkpoint", side_effect=AssertionError):
        with torch.no_grad():
            plain = model.features(token_ids)
        cache = KeyValueCache(model.config, 2, torch.device("cpu"), torch.float32)
        assert torch.equal(model.features(token_ids, cache), plain)
        with pytest.raises(AssertionError):
            model.features(token_ids)
