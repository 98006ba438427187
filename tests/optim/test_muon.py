"""Muon against a float64 reference, against torch's own, and shared out over ranks."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dist.collectives import broadcast_object
from dist.ddp import DDP
from dist.sharded_optimizer import ShardedOptimizer
from optim import muon as muon_module
from optim.adamw import AdamW
from optim.muon import BEST_POLYNOMIALS, COEFFICIENTS, Muon, matrix_groups, orthogonal
from optim.schedule import set_learning_rate
from tests.harness import run_distributed

SHAPES = [(8, 8), (24, 8), (8, 24), (1, 5), (5, 1)]


def reference_orthogonal(matrix: Tensor) -> Tensor:
    """The iteration by singular values, in float64: the polynomials act on each alone."""
    u, singular, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    x = singular / singular.square().sum().sqrt()
    for a, b, c in COEFFICIENTS:
        x = a * x + b * x**3 + c * x**5
    return u @ torch.diag(x) @ v


@pytest.mark.parametrize("shape", SHAPES)
def test_newton_schulz_is_the_polynomial_of_the_singular_values(shape):
    torch.manual_seed(0)
    stack = torch.randn(3, *shape, dtype=torch.float64)
    for result, matrix in zip(orthogonal(stack, torch.float64), stack, strict=True):
        torch.testing.assert_close(result, reference_orthogonal(matrix))
    in_float32 = orthogonal(stack.float(), torch.float32)
    torch.testing.assert_close(
        in_float32.double(), orthogonal(stack, torch.float64), atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize(("ns_steps", "error"), [(1, 0.9917), (3, 0.866), (4, 0.561), (5, 0.124)])
def test_each_polynomial_is_the_best_after_those_before_it(ns_steps, error):
    """The best one's error is as large below 1 as above it, at the ends and in between."""
    x = torch.logspace(-3, 0, 20_000, dtype=torch.float64)
    for a, b, c in BEST_POLYNOMIALS[:ns_steps]:
        x = a * x + b * x**3 + c * x**5
    assert (1 - x).max().item() == pytest.approx(error, abs=1e-3)
    assert (x - 1).max().item() == pytest.approx(error, abs=1e-3)


def test_fewer_iterations_come_less_near():
    torch.manual_seed(0)
    stack = torch.randn(4, 64, 64, dtype=torch.float64)
    distances = [
        (torch.linalg.svdvals(orthogonal(stack, torch.float64, steps)) - 1).abs().max()
        for steps in (3, 4, 5)
    ]
    assert distances == sorted(distances, reverse=True)


def test_in_bfloat16_all_singular_values_come_near_one():
    torch.manual_seed(0)
    singular = torch.linalg.svdvals(orthogonal(torch.randn(4, 64, 200)).float())
    assert 0.8 < singular.min() < singular.max() < 1.2
    square = torch.linalg.svdvals(orthogonal(torch.randn(4, 128, 128)).float())
    assert square.max() < 1.2  # its smallest values are too small to come up to 1


def test_a_gradient_of_nothing_moves_nothing():
    assert torch.equal(orthogonal(torch.zeros(2, 4, 4)), torch.zeros(2, 4, 4, dtype=torch.bfloat16))


def reference_step(weight, gradient, buffer, lr, momentum=0.95, weight_decay=0.1):
    """One step in float64, from the definition."""
    buffer = momentum * buffer + (1 - momentum) * gradient
    direction = momentum * buffer + (1 - momentum) * gradient
    rows, columns = weight.shape
    step = lr * math.sqrt(max(1, rows / columns)) * reference_orthogonal(direction)
    return weight * (1 - lr * weight_decay) - step, buffer


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_several_steps_are_those_of_the_definition(shape, dtype):
    torch.manual_seed(0)
    expected = torch.randn(shape, dtype=torch.float64)
    weight = nn.Parameter(expected.to(dtype))
    buffer = torch.zeros_like(expected)
    group = {"params": [weight], "whole_matrices": True, "weight_decay": 0.1}
    optimizer = Muon([group], lr=0.02, dtype=dtype)
    for lr in (0.02, 0.03, 0.01):
        gradient = torch.randn(shape, dtype=torch.float64)
        expected, buffer = reference_step(expected, gradient, buffer, lr)
        weight.grad = gradient.to(dtype)
        set_learning_rate(optimizer, lr)
        optimizer.step()
        tolerance = 1e-9 if dtype == torch.float64 else 1e-4
        torch.testing.assert_close(weight.double(), expected, rtol=tolerance, atol=tolerance)


def test_with_jordans_polynomial_it_goes_where_torchs_own_goes(monkeypatch):
    """torch's always multiplies in bfloat16: equal but for that."""
    monkeypatch.setattr(muon_module, "COEFFICIENTS", ((3.4445, -4.7750, 2.0315),) * 5)
    torch.manual_seed(0)
    ours, theirs = (nn.Parameter(torch.ones(48, 16)) for _ in range(2))
    group = {"params": [ours], "whole_matrices": True, "weight_decay": 0.1}
    optimizer = Muon([group], lr=0.02, dtype=torch.float32)
    reference = torch.optim.Muon([theirs], lr=0.02, weight_decay=0.1)
    for _ in range(10):
        ours.grad = torch.randn(48, 16)
        theirs.grad = ours.grad.clone()
        optimizer.step()
        reference.step()
    assert (ours - theirs).norm() < 0.02 * (theirs - 1).norm()


def test_matrices_of_one_shape_go_together_and_are_not_mixed():
    torch.manual_seed(0)
    together = [nn.Parameter(torch.randn(s)) for s in ((6, 4), (4, 6), (6, 4), (6, 4))]
    alone = [nn.Parameter(p.detach().clone()) for p in together]
    gradients = [torch.randn_like(p) for p in together]
    gradients[2] = None  # type: ignore[call-overload]
    optimizers = [Muon([{"params": together, "whole_matrices": True}], dtype=torch.float64)]
    optimizers += [
        Muon([{"params": [p], "whole_matrices": True}], dtype=torch.float64) for p in alone
    ]
    for parameters in (together, alone):
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = None if gradient is None else gradient.clone()
    for optimizer in optimizers:
        optimizer.step()
    for one, other in zip(together, alone, strict=True):
        torch.testing.assert_close(one, other)
    assert together[2] not in optimizers[0].state


def test_a_step_that_a_tensor_says_to_leave_out_changes_no_bit():
    """Against the same steps without those left out; of which one is the first."""
    torch.manual_seed(0)
    start = torch.randn(6, 4)
    start[0] = -0.0
    ours, theirs = (nn.Parameter(start.clone()) for _ in range(2))
    optimizer, reference = (
        Muon([{"params": [p], "whole_matrices": True, "weight_decay": 0.1}], dtype=torch.float32)
        for p in (ours, theirs)
    )
    for step in range(5):
        ours.grad = torch.randn(6, 4)
        theirs.grad = ours.grad.clone()
        optimizer.found_inf = torch.tensor(float(step in (0, 3)))
        if step in (0, 3):
            ours.grad[1, 1] = math.inf
        else:
            reference.step()
        optimizer.step()
        assert torch.equal(ours.view(torch.int32), theirs.view(torch.int32))
    buffers = (o.state[p]["momentum_buffer"] for o, p in ((optimizer, ours), (reference, theirs)))
    assert torch.equal(*(buffer.view(torch.int32) for buffer in buffers))


def test_16_bit_matrices_have_a_float32_momentum():
    weight = nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
    optimizer = Muon([{"params": [weight], "whole_matrices": True}])
    weight.grad = torch.ones(4, 4, dtype=torch.bfloat16)
    optimizer.step()
    assert optimizer.state[weight]["momentum_buffer"].dtype == torch.float32
    assert weight.dtype == torch.bfloat16


def test_the_other_groups_are_adamws_to_the_bit():
    torch.manual_seed(0)
    ours, theirs = (nn.Parameter(torch.ones(5, 3)) for _ in range(2))
    options: dict[str, Any] = {"betas": (0.9, 0.95), "eps": 1e-9, "weight_decay": 0.2}
    optimizer = Muon([{"params": [ours]}], lr=0.1, **options)
    reference = AdamW([theirs], lr=0.1, **options)
    for _ in range(3):
        ours.grad = torch.randn(5, 3)
        theirs.grad = ours.grad.clone()
        optimizer.step()
        reference.step()
    assert torch.equal(ours, theirs)


def test_what_cannot_be_is_refused():
    vector = nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match=r"not for shape \(3,\)"):
        Muon([{"params": [vector], "whole_matrices": True}])
    matrix = nn.Parameter(torch.ones(3, 3))
    with pytest.raises(ValueError, match=r"momentum 1.0 must be in \[0, 1\)"):
        Muon([{"params": [matrix], "whole_matrices": True}], momentum=1.0)


class Network(nn.Module):
    """Embedding, four matrices of two shapes with gains, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 8)
        self.inside = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)), nn.Linear(8, 6))
        self.head = nn.Linear(6, 13, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.inside(self.embedding(ids)).tanh())


def groups_of(model: Network) -> list[dict]:
    names = [name for name, p in model.inside.named_parameters(prefix="inside") if p.ndim == 2]
    blocks = dict.fromkeys(names[:2], (8,)) | {names[2]: (5, 3), names[3]: (6,)}
    return matrix_groups(model.named_parameters(), 0.1, blocks)


def test_each_parameter_is_in_the_group_that_it_belongs_to():
    *inside, outside, vectors = groups_of(Network())
    assert [len(group["params"]) for group in inside] == [2, 1, 1]
    assert [group["row_blocks"] for group in inside] == [(8,), (5, 3), (6,)]
    assert all(group["whole_matrices"] for group in inside)
    assert [tuple(p.shape) for p in outside["params"]] == [(13, 8), (13, 6)]
    assert [p.ndim for p in vectors["params"]] == [1] * 4
    decays = [group["weight_decay"] for group in (*inside, outside, vectors)]
    assert decays == [0.1, 0.1, 0.1, 0.1, 0.0]


def test_maps_that_lie_one_below_the_other_are_made_orthogonal_each_by_itself():
    torch.manual_seed(0)
    weight = nn.Parameter(torch.zeros(10, 4))
    group = {"params": [weight], "whole_matrices": True, "row_blocks": (7, 2, 1)}
    optimizer = Muon([group], lr=1.0, momentum=0.0, dtype=torch.float32)
    weight.grad = torch.randn(10, 4)
    optimizer.step()
    for part, gradient in zip(weight.split([7, 2, 1]), weight.grad.split([7, 2, 1]), strict=True):
        expected = -reference_orthogonal(gradient) * math.sqrt(max(1, len(part) / 4))
        torch.testing.assert_close(part.double(), expected, rtol=1e-4, atol=1e-4)


def trained(sharded: bool, saved: tuple | None, steps: range) -> tuple:
    """Weights, and the state by name, after some steps on a batch that all ranks share."""
    torch.manual_seed(0)
    model = Network()
    ddp = DDP(model, 0.001)
    options: dict[str, Any] = {"lr": 0.05, "dtype": torch.float32}
    optimizer: torch.optim.Optimizer
    if sharded:
        optimizer = ShardedOptimizer(groups_of(model), Muon, ddp=ddp, **options)
    else:
        optimizer = Muon(groups_of(model), **options)
    named = dict(model.named_parameters())
    if saved is not None:
        model.load_state_dict(saved[0])
        if isinstance(optimizer, ShardedOptimizer):
            optimizer.load_state(named.items(), saved[1])
        else:
            for name, entries in saved[1].items():
                optimizer.state[named[name]] = {
                    k: v.clone() if isinstance(v, Tensor) else v for k, v in entries.items()
                }
    for step in steps:
        ids = torch.arange(13).roll(step)
        ddp(ids).square().mean().backward()
        ddp.finish_gradient_sync()
        optimizer.step()
        ddp.zero_grad()
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if isinstance(optimizer, ShardedOptimizer):
        return weights, broadcast_object(optimizer.gather_state(named.items()))
    return weights, {name: dict(optimizer.state[p]) for name, p in named.items()}


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_shared_out_over_ranks_it_does_the_same(size):
    expected = run_distributed(trained, 1, False, None, range(6))[0]
    half = run_distributed(trained, size, True, None, range(3))[0]
    for world_size, sharded in ((size, True), (1, False), (2, True)):
        for weights, state in run_distributed(trained, world_size, sharded, half, range(3, 6)):
            for name, tensor in expected[0].items():
                torch.testing.assert_close(weights[name], tensor, rtol=1e-4, atol=1e-5, msg=name)
            assert state.keys() == expected[1].keys()
            for name, entries in expected[1].items():
                assert state[name].keys() == entries.keys()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_dict_takes_another_one_on_with_it(dtype):
    torch.manual_seed(0)
    first = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in ((6, 4), (5,))]
    second = [nn.Parameter(p.detach().clone()) for p in first]
    one, other = (
        Muon([{"params": [matrix], "whole_matrices": True}, {"params": [gain]}])
        for matrix, gain in (first, second)
    )
    for step in range(4):
        if step == 2:
            for mine, theirs in zip(second, first, strict=True):
                mine.data.copy_(theirs)
            other.load_state_dict(copy.deepcopy(one.state_dict()))
            assert other.state[second[0]]["momentum_buffer"].dtype == torch.float32
        for parameters, optimizer in ((first, one), (second, other)):
            generator = torch.Generator().manual_seed(step)
            for parameter in parameters:
                gradient = torch.randn(parameter.shape, generator=generator)
                parameter.grad = gradient.to(dtype)
            if optimizer is one or step >= 2:
                optimizer.step()
    for mine, theirs in zip(second, first, strict=True):
        assert torch.equal(mine, theirs)
