"""An optimizer that needs whole matrices gets stacks of them, and every rank as many.

The example makes the momentum of a matrix nearly orthogonal by a few Newton-Schulz iterations
(Jordan et al. 2024, https://kellerjordan.github.io/posts/muon), which no part of a matrix allows.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dist.collectives import broadcast_object, rank, world_size
from dist.ddp import DDP
from dist.sharded_optimizer import ShardedOptimizer
from tests.dist.helpers import WORLD_SIZES, assert_close, fingerprint
from tests.harness import run_distributed

STEPS = 6
SAVED_AFTER = 3


class Orthogonal(torch.optim.Optimizer):
    """Momentum, made orthogonal; each matrix's step is scaled by a mean that is the matrix's own.

    Takes stacks (count, rows, columns).
    """

    whole_matrices = True

    def __init__(self, params: Any, lr: float = 0.05, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for stack in group["params"]:
                if stack.grad is None:
                    continue
                assert stack.dim() == 3
                state = self.state[stack]
                if not state:
                    state["step"] = torch.tensor(0.0)
                    state["momentum"] = torch.zeros_like(stack)
                    state["rows"] = stack.new_zeros(stack.shape[:2])
                    state["mean_norm"] = stack.new_zeros(len(stack))
                state["step"] += 1
                momentum = state["momentum"]
                momentum.mul_(group["momentum"]).add_(stack.grad)
                state["rows"].lerp_(momentum.square().mean(2), 0.1)
                state["mean_norm"].lerp_(momentum.square().sum((1, 2)).sqrt(), 0.5)
                update = orthogonalize(momentum) / (1 + state["mean_norm"])[:, None, None]
                update /= (1 + state["rows"].sqrt())[:, :, None]
                stack.add_(update, alpha=-group["lr"] * float(1 + 1 / state["step"]))


def orthogonalize(stack: Tensor) -> Tensor:
    """Newton-Schulz iterations over a stack of matrices."""
    x = stack / (stack.square().sum((1, 2), keepdim=True).sqrt() + 1e-7)
    for _ in range(4):
        gram = torch.matmul(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, alpha=0.5, beta=-1.2), x, beta=1.7)
    return x


SHAPES = [(4, 6), (6, 4), (4, 6), (4, 6), (1, 3), (4, 6), (6, 4), (4, 6), (2, 2), (4, 6)]
FROZEN, THAWED_BEFORE = 3, 4
UNUSED = {0: {0}, 1: {5, 6}, 4: {0}}  # by step


class Matrices(nn.Module):
    """Each matrix has a loss of its own, so that any may be left out."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weights = nn.ParameterList(
            torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES
        )

    def forward(self, step: int, of_rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * step + of_rank)
        loss = torch.zeros(())
        for index, weight in enumerate(self.weights):
            x = torch.randn(5, weight.shape[1], generator=generator)
            if index not in UNUSED.get(step, ()):
                loss = loss + torch.tanh(x.to(weight.dtype) @ weight.mT).float().square().mean()
        return loss


def set_frozen(module: Any, step: int) -> None:
    module.weights[FROZEN].requires_grad_(step >= THAWED_BEFORE)


def reference_of(steps, num_batches, dtype):
    """The class without ranks: each matrix is a stack of one, the gradient that of all batches."""
    module = Matrices(dtype)
    stacks = [nn.Parameter(weight.detach().float()[None]) for weight in module.weights]
    optimizer = Orthogonal(stacks)
    for step in range(steps):
        set_frozen(module, step)
        total: list[Any] = [None] * len(stacks)
        for of_rank in range(num_batches):
            module.zero_grad()
            module(step, of_rank).backward()
            for index, weight in enumerate(module.weights):
                if weight.grad is not None:
                    gradient = weight.grad.float()
                    total[index] = gradient + (0 if total[index] is None else total[index])
        for stack, gradient in zip(stacks, total, strict=True):
            stack.grad = None if gradient is None else (gradient * (1 / num_batches))[None]
        optimizer.step()
        with torch.no_grad():
            for weight, stack in zip(module.weights, stacks, strict=True):
                weight.copy_(stack[0])
    states = [
        {key: value if key == "step" else value[0] for key, value in optimizer.state[stack].items()}
        for stack in stacks
    ]
    return [weight.detach() for weight in module.weights], states


def train(steps, saved, bucket_cap_mb, paired, dtype=torch.float32):
    """Weights and state by name after these steps, and how many matrices this rank has."""
    module = Matrices(dtype)
    named = list(module.named_parameters())
    set_frozen(module, steps[0])
    if saved is not None:
        module.load_state_dict(saved[0])
    ddp = DDP(module, bucket_cap_mb)
    optimizer = ShardedOptimizer(
        module.parameters(), Orthogonal, ddp=ddp if paired else None, lr=0.05
    )
    if saved is not None:
        optimizer.load_state(named, saved[1])
    for step in steps:
        set_frozen(module, step)
        # The batches of three ranks, whatever number there is.
        numbers = range(rank(), 3, world_size()) if world_size() != 3 else [rank()]
        for number in numbers:
            with ddp.no_sync():
                (ddp(step, number) * world_size() / 3).backward()
        ddp.finish_gradient_sync()
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: value.clone() for name, value in ddp.state_dict().items()}
    state = broadcast_object(optimizer.gather_state(named))
    counts = [sum(len(segment.pieces) for segment in s.segments) for s in optimizer._layout.shards]
    kinds = [kind_of(shard.bucket.parameters[0], module) for shard in optimizer._layout.shards]
    return weights, state, list(zip(kinds, counts, strict=True))


def kind_of(weight, module):
    """Matrices of one shape are shared out together; those that were frozen at first, apart."""
    return tuple(weight.shape), weight is module.weights[FROZEN]


def assert_is_reference(result, reference, tolerance):
    weights, state, _ = result
    expected_weights, expected_states = reference
    assert_close(weights.values(), expected_weights, tolerance)
    for index, expected in enumerate(expected_states):
        entries = state.get(f"weights.{index}", {})
        assert entries.keys() - {"master"} == expected.keys()
        for key, value in expected.items():
            assert entries[key].shape == value.shape, (index, key)
            assert_close([entries[key]], [value], tolerance)


def train_in_several_ways():
    results = []
    for bucket_cap_mb, paired in [(25.0, True), (1e-5, True), (25.0, False)]:
        result = train(range(STEPS), None, bucket_cap_mb, paired)
        assert_is_reference(result, reference_of(STEPS, 3, torch.float32), 2e-6)
        results.append((fingerprint(result[0].values()), result[2]))
    return results


@pytest.mark.parametrize("size", WORLD_SIZES)
def test_stacks_on_all_ranks_train_as_each_matrix_would_alone(size):
    results = run_distributed(train_in_several_ways, size)
    frozen = {(SHAPES[FROZEN], True): 1}
    trained = {(shape, False): SHAPES.count(shape) - (shape == SHAPES[FROZEN]) for shape in SHAPES}
    for way in range(3):
        assert len({of_rank[way][0] for of_rank in results}) == 1
        held = [dict.fromkeys(frozen | trained, 0) for _ in results]
        for of_rank, total in zip(results, held, strict=True):
            for kind, count in of_rank[way][1]:
                total[kind] += count
        for kind, number in (frozen | trained).items():
            counts = [total[kind] for total in held]
            assert sum(counts) == number
            assert max(counts) == -(-number // size)  # however many buckets there are


def save_at_three():
    straight = train(range(STEPS), None, 25.0, True)
    saved = train(range(SAVED_AFTER), None, 25.0, True)
    assert saved[1]["weights.0"]["mean_norm"].shape == ()
    return straight[:2], saved[:2]


def load_and_go_on(saved):
    """The state comes back as it was, and the steps after it are the same in all of these."""
    results = []
    for bucket_cap_mb, paired in [(25.0, True), (1e-5, True), (25.0, False)]:
        module = Matrices()
        module.load_state_dict(saved[0])
        set_frozen(module, SAVED_AFTER)
        named = list(module.named_parameters())
        ddp = DDP(module, bucket_cap_mb)
        optimizer = ShardedOptimizer(
            module.parameters(), Orthogonal, ddp=ddp if paired else None, lr=0.05
        )
        optimizer.load_state(named, saved[1])
        state = broadcast_object(optimizer.gather_state(named))
        assert state.keys() == saved[1].keys()
        for name, entries in saved[1].items():
            assert state[name].keys() == entries.keys()
            assert_close(state[name].values(), entries.values(), 0)
        results.append(train(range(SAVED_AFTER, STEPS), saved, bucket_cap_mb, paired)[:2])
    return results


def test_state_saved_at_three_ranks_goes_on_at_any_number():
    (straight, saved), *_ = run_distributed(save_at_three, 3)
    for size in WORLD_SIZES:
        for results in run_distributed(load_and_go_on, size, saved):
            for weights, state in results:
                # The gradients of three batches are added in another order.
                tolerance = 0 if size == 3 else 2e-6
                assert_close(weights.values(), straight[0].values(), tolerance)
                for name, entries in straight[1].items():
                    assert_close(state[name].values(), entries.values(), tolerance)


def train_half_precision():
    weights, state, _ = train(range(4), None, 25.0, True, torch.bfloat16)
    reference = reference_of(4, 3, torch.bfloat16)
    assert {value.dtype for value in weights.values()} == {torch.bfloat16}
    masters = [state[name]["master"].bfloat16() for name in weights]
    assert_close(weights.values(), masters, 0)
    assert_is_reference((weights, state, None), reference, 0.01)
    assert state["weights.0"]["momentum"].dtype == torch.float32


def test_matrices_of_16_bits_are_updated_in_float32():
    run_distributed(train_half_precision, 3)


def refused():
    module = nn.Linear(3, 3)
    ddp = DDP(module)
    both: list[dict[str, Any]] = [{"ddp": ddp}, {}]
    for options in both:
        with pytest.raises(ValueError, match="a parameter is none"):
            ShardedOptimizer(module.parameters(), Orthogonal, **options)
        optimizer = ShardedOptimizer([module.weight], Orthogonal, **options)
        with pytest.raises(ValueError, match="a parameter is none"):
            optimizer.add_param_group({"params": [module.bias]})
        ddp(torch.ones(2, 3)).sum().backward()
        ddp.finish_gradient_sync()
        optimizer.step()
        assert len(optimizer.param_groups) == 1


def test_a_vector_is_refused_and_the_optimizer_stays_as_it_was():
    run_distributed(refused, 2)
