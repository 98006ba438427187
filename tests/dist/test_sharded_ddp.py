"""DDP that gives each rank only its shard of the gradients, and the optimizer that takes them.

There are three references. Our DDP with the unsharded optimizer adds the same numbers in the same
order: equal to the bit at any number of ranks. So does torch's at two. One process over the whole
batch is equal up to rounding.
"""

import contextlib
import gc
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import dist.ddp
from dist.collectives import all_reduce_sum, broadcast_object, rank, world_size
from dist.ddp import DDP
from dist.gloo_collectives import GlooCollectives
from dist.reducer import Reducer
from dist.sharded_optimizer import ShardedOptimizer
from tests.dist import test_ddp_recovery as recovery
from tests.dist.helpers import (
    WORLD_SIZES,
    Branches,
    TinyLanguageModel,
    assert_close,
    draw,
    ensure_group,
    fingerprint,
    gradients,
    language_model_loss,
    tokens,
)
from tests.dist.test_ddp import MixedDtypes, accumulate, widen
from tests.dist.test_ddp_unused import batch_of, orders_of_step, step_of_one_process
from tests.dist.test_sharded_optimizer import OPTIMIZERS, same_on_all_ranks
from tests.harness import run_distributed

ONE_LAYER_MB = 30 * 4 / 2**20  # a bucket holds one layer of Branches
EVERYTHING_MB = 25.0
ADAMW = torch.optim.AdamW
SGD = torch.optim.SGD
ALL = range(6)


class Keep(torch.optim.Optimizer):
    """Steps nowhere, and keeps the gradients as its state: gather_state shows what it was given."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].clear()
                if parameter.grad is not None:
                    self.state[parameter]["grad"] = parameter.grad.clone()


def pair(module, bucket_cap_mb=ONE_LAYER_MB, optimizer_cls: Any = ADAMW, **settings):
    ddp = DDP(module, bucket_cap_mb)
    return ddp, ShardedOptimizer(module.parameters(), optimizer_cls, ddp=ddp, **settings)


def step_and_clear(*optimizers):
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
        if isinstance(optimizer, ShardedOptimizer):
            optimizer.finish_gather()


def shown_gradients(optimizer, module):
    """The gradients of all parameters, on every rank; of an optimizer of class Keep."""
    optimizer.step()
    state = broadcast_object(optimizer.gather_state(module.named_parameters()))
    return [state.get(name, {}).get("grad") for name, _ in module.named_parameters()]


def train_four_ways(name, bucket_cap_mb):
    ensure_group()
    optimizer_cls, settings = OPTIMIZERS[name]
    ours, optimizer = pair(TinyLanguageModel(seed=rank()), bucket_cap_mb, optimizer_cls, **settings)
    unsharded = DDP(TinyLanguageModel(seed=rank()), bucket_cap_mb)
    theirs = TorchDDP(TinyLanguageModel(seed=rank()), bucket_cap_mb=bucket_cap_mb)
    alone = TinyLanguageModel(seed=0)
    plain = [optimizer_cls(m.parameters(), **settings) for m in (unsharded, theirs, alone)]
    for step, accumulation_steps in enumerate([1, 1, 2, 3, 4, 1]):
        batch = tokens(step, rows=2 * world_size() * accumulation_steps)
        micro_batches = batch.chunk(world_size())[rank()].chunk(accumulation_steps)
        for model in (ours, unsharded, theirs):
            accumulate(model, micro_batches)
        loss = language_model_loss(alone, batch)
        loss.backward()
        with torch.no_grad():
            total = torch.stack([language_model_loss(ours, part) for part in micro_batches]).sum()
        mean = all_reduce_sum(total) / accumulation_steps / world_size()
        torch.testing.assert_close(mean, loss.detach(), rtol=1e-5, atol=0)
        ours.finish_gradient_sync()
        unsharded.finish_gradient_sync()
        step_and_clear(optimizer, *plain)
        assert_close(ours.parameters(), unsharded.parameters(), 0)
        assert_close(ours.parameters(), theirs.parameters(), 0 if world_size() <= 2 else 1e-5)
        assert_close(ours.parameters(), alone.parameters(), 1e-5)
    module: Any = ours.module
    assert module.head.weight is module.embedding.weight
    return fingerprint(ours.parameters())


def train_with_every_optimizer():
    return tuple(
        train_four_ways(name, EVERYTHING_MB if name == "adam" else 0.001) for name in OPTIMIZERS
    )


@pytest.mark.parametrize("size", WORLD_SIZES)
def test_training_is_that_of_torch_ddp_and_of_one_process(size):
    assert same_on_all_ranks(run_distributed(train_with_every_optimizer, size))


def clipped_training(max_norm):
    ours, optimizer = pair(TinyLanguageModel(), 0.001, SGD, lr=0.3)
    alone = TinyLanguageModel()
    plain = SGD(alone.parameters(), lr=0.3)
    norms = []
    grad_scales: list[Any] = [1.0, 1024.0, torch.tensor(0.125)]
    for step, grad_scale in enumerate(grad_scales):
        batch = tokens(step, rows=2 * world_size())
        part = batch.chunk(world_size())[rank()]
        (language_model_loss(ours, part) * grad_scale).backward()
        ours.finish_gradient_sync()
        language_model_loss(alone, batch).backward()
        norm = optimizer.clip_grad_norm(max_norm, grad_scale)
        reference = nn.utils.clip_grad_norm_(alone.parameters(), max_norm)
        torch.testing.assert_close(norm, reference, rtol=2e-6, atol=0)
        step_and_clear(optimizer, plain)
        assert_close(ours.parameters(), alone.parameters(), 2e-6)
        norms.append(norm.item())
    with pytest.raises(ValueError, match="max_norm 0 must be above 0"):
        optimizer.clip_grad_norm(0)
    return tuple(norms)


def clip_to_several_norms():
    return tuple(clipped_training(max_norm) for max_norm in (0.1, 1e3, float("inf")))


@pytest.mark.parametrize("size", WORLD_SIZES)
def test_clipping_is_that_of_torch_over_the_whole_gradient(size):
    results = run_distributed(clip_to_several_norms, size)
    assert same_on_all_ranks(results)
    for norms in results[0]:
        assert 0.1 < min(norms) <= max(norms) < 1e3


def clip_what_is_not_finite(value):
    module, expected = Branches(), Branches()
    ddp, optimizer = pair(module, optimizer_cls=Keep)
    first: Any = module.layers[0].weight

    def spoil(gradient):
        return torch.where(torch.arange(25).view(5, 5) == 0, value, gradient)

    norms = []
    for spoiled in (True, False):
        # Its place is in rank 0's shard.
        hook = first.register_hook(spoil) if spoiled and rank() == world_size() - 1 else None
        ddp(batch_of(0, rank()), ALL).square().mean().backward()
        if hook is not None:
            hook.remove()
        ddp.finish_gradient_sync()
        norm = optimizer.clip_grad_norm(0.01, grad_scale=4.0)
        found = shown_gradients(optimizer, module)
        step_of_one_process(expected, 0, [ALL] * world_size())
        wanted: Any = gradients(expected)
        if spoiled:
            assert not torch.isfinite(norm)
            assert not torch.isfinite(found[0][0, 0])
            found[0][0, 0] = wanted[0][0, 0]
            assert_close(found, wanted, 1e-6)  # neither divided nor clipped
        else:
            whole = torch.linalg.vector_norm(torch.cat([w.flatten() for w in wanted])).item()
            assert norm.item() == pytest.approx(whole / 4, rel=1e-5)
            # Below the limit after the division: divided, not clipped.
            assert_close(found, [w / 4 * min(1, 0.01 / (whole / 4)) for w in wanted], 1e-6)
        optimizer.zero_grad()
        expected.zero_grad()
        norms.append(norm)
    return fingerprint(norms[1:])


def clip_infinity_and_nan():
    return clip_what_is_not_finite(float("inf")), clip_what_is_not_finite(float("nan"))


@pytest.mark.parametrize("size", [1, 3])
def test_one_ranks_infinity_is_known_to_all_and_leaves_the_gradients_alone(size):
    assert same_on_all_ranks(run_distributed(clip_infinity_and_nan, size))


def set_frozen(module, step):
    """Layer 1 is frozen from the start and thawed, layer 3 is frozen later, and thawed again."""
    module.layers[1].requires_grad_(step >= 4)
    module.layers[3].requires_grad_(not 2 <= step < 5)


def train_with_unequal_use(bucket_cap_mb, optimizer_cls, steps):
    """Every rank uses layers of its own; in the middle all is saved, and goes on in new objects."""
    settings: dict[str, Any] = {"lr": 0.05}
    modules = [Branches(seed=1) for _ in range(3)]
    for module in modules:
        set_frozen(module, 0)
    ours, optimizer = pair(modules[0], bucket_cap_mb, optimizer_cls, **settings)
    unsharded, alone = DDP(modules[1], bucket_cap_mb), modules[2]
    plain = [optimizer_cls(model.parameters(), **settings) for model in (unsharded, alone)]
    for step in range(steps):
        for module in modules:
            set_frozen(module, step)
        orders = orders_of_step(step, world_size())
        for model in (ours, unsharded):
            loss = model(batch_of(step, rank()), orders[rank()]).square().mean()
            if loss.requires_grad:
                loss.backward()
            model.finish_gradient_sync()
        for of_rank, order in enumerate(orders):
            loss = alone(batch_of(step, of_rank), order).square().mean()
            if loss.requires_grad:
                (loss / world_size()).backward()
        step_and_clear(optimizer, *plain)
        if step == steps // 2:
            named = list(modules[0].named_parameters())
            state = broadcast_object(optimizer.gather_state(named))
            for (name, _), parameter in zip(named, unsharded.parameters(), strict=True):
                theirs = plain[0].state.get(parameter, {})
                assert state.get(name, {}).keys() == theirs.keys()
                assert_close(state.get(name, {}).values(), theirs.values(), 0)
            weights = modules[0].state_dict()
            modules[0] = Branches()
            set_frozen(modules[0], step)
            modules[0].load_state_dict(weights)
            ours, optimizer = pair(modules[0], bucket_cap_mb, optimizer_cls, **settings)
            optimizer.load_state(modules[0].named_parameters(), state)
        assert_close(ours.parameters(), unsharded.parameters(), 0)
        assert_close(ours.parameters(), alone.parameters(), 2e-5)
    return fingerprint(ours.parameters())


@pytest.mark.parametrize(
    ("size", "bucket_cap_mb", "optimizer_cls"),
    [
        (1, EVERYTHING_MB, ADAMW),
        (2, ONE_LAYER_MB, torch.optim.NAdam),
        (3, EVERYTHING_MB, ADAMW),
        (4, 50 * 4 / 2**20, ADAMW),
    ],
)
def test_weights_that_some_or_no_ranks_use_fare_as_with_the_unsharded_optimizer(
    size, bucket_cap_mb, optimizer_cls
):
    results = run_distributed(train_with_unequal_use, size, bucket_cap_mb, optimizer_cls, 16)
    assert same_on_all_ranks(results)


plans = st.fixed_dictionaries(
    {
        "widths": st.lists(st.integers(1, 6), min_size=2, max_size=6),
        "biases": st.lists(st.booleans(), min_size=6, max_size=6),
        "tied": st.booleans(),
        "frozen": st.sets(st.integers(0, 4), max_size=2),
        "wide": st.sets(st.integers(0, 4), max_size=2),
        "thawed_before": st.integers(1, 5),
        "bucket_cap_mb": st.sampled_from([1e-6, 60 / 2**20, EVERYTHING_MB]),
        "optimizer": st.sampled_from([*OPTIMIZERS]),
        # Of each step: micro-batches, layers that are passed by, whether it is skipped.
        "steps": st.lists(
            st.tuples(
                st.integers(1, 4),
                st.sets(st.integers(0, 4), max_size=2),
                st.sampled_from([False, False, False, True]),
            ),
            min_size=3,
            max_size=5,
        ),
    }
)


class Chain(nn.Module):
    """Layers of any widths; one that is passed by gives the sum of its inputs."""

    def __init__(self, plan) -> None:
        super().__init__()
        torch.manual_seed(3)
        widths = plan["widths"]
        self.layers: Any = nn.ModuleList(
            nn.Linear(inputs, outputs, bias)
            for inputs, outputs, bias in zip(widths, widths[1:], plan["biases"], strict=False)
        )
        shapes = [layer.weight.shape for layer in self.layers]
        if plan["tied"] and shapes[0] in shapes[1:]:
            self.layers[0].weight = self.layers[shapes.index(shapes[0], 1)].weight
        widen(self.layers, plan["wide"])
        self.set_frozen(plan["frozen"])

    def set_frozen(self, frozen) -> None:
        for index, layer in enumerate(self.layers):
            layer.requires_grad_(index not in frozen)
        self.layers[0].requires_grad_(True)

    def forward(self, x, passed_by):
        for index, layer in enumerate(self.layers):
            if index in passed_by and index > 0:
                x = x.sum(1, keepdim=True).expand(-1, layer.out_features)
            else:
                x = torch.tanh(layer(x))
        return x


def compare_drawn_plans(drawn):
    digests = []
    for plan in drawn:
        cap, size = plan["bucket_cap_mb"], world_size()
        optimizer_cls, settings = OPTIMIZERS[plan["optimizer"]]
        ours, optimizer = pair(Chain(plan), cap, optimizer_cls, **settings)
        unsharded, alone = DDP(Chain(plan), cap), Chain(plan)
        plain = [optimizer_cls(model.parameters(), **settings) for model in (unsharded, alone)]
        for step, (micro_steps, passed_by, is_skipped) in enumerate(plan["steps"]):
            if step == plan["thawed_before"]:
                for module in (ours.module, unsharded.module, alone):
                    module.set_frozen([])  # type: ignore[operator]
            generator = torch.Generator().manual_seed(step)
            batch = torch.randn(2 * size * micro_steps, plan["widths"][0], generator=generator)
            micro_batches = batch.chunk(size)[rank()].chunk(micro_steps)
            for model in (ours, unsharded):
                for number, part in enumerate(micro_batches):
                    is_last = number == micro_steps - 1
                    with contextlib.nullcontext() if is_last else model.no_sync():
                        (model(part, passed_by).square().mean() / micro_steps).backward()
                model.finish_gradient_sync()
            alone(batch, passed_by).square().mean().backward()
            if is_skipped:
                for each in (optimizer, *plain):
                    each.zero_grad()
            else:
                step_and_clear(optimizer, *plain)
            assert_close(ours.parameters(), unsharded.parameters(), 0)
            assert_close(ours.parameters(), alone.parameters(), 5e-5)
        digests.append(fingerprint(ours.parameters()))
    return tuple(digests)


@pytest.mark.parametrize("size", WORLD_SIZES)
def test_models_and_schedules_of_any_kind_train_as_unsharded_ones(size):
    assert same_on_all_ranks(run_distributed(compare_drawn_plans, size, draw(plans, 20)))


def rounded_mean(module, backward, dtype):
    """The mean in float64 of every rank's own gradients as they are after rounding."""
    module.zero_grad()
    backward(module)
    own = [p.grad.to(dtype).double() for p in module.parameters()]
    return [(all_reduce_sum(gradient) / world_size()).float() for gradient in own]


def gradients_on_a_narrow_wire(bucket_cap_mb):
    module, copy = Branches(), Branches()
    ddp = DDP(module, bucket_cap_mb, wire_dtype=torch.bfloat16)
    optimizer = ShardedOptimizer(module.parameters(), Keep, ddp=ddp)
    for step in range(2):

        def backward(model, step=step):
            model(batch_of(step, rank()), ALL).square().mean().backward()

        backward(ddp)
        ddp.finish_gradient_sync()
        expected = rounded_mean(copy, backward, torch.bfloat16)
        exact = rounded_mean(copy, backward, torch.float32)
        found = shown_gradients(optimizer, module)
        assert_close(found, expected, 1e-7)
        assert any(not torch.equal(a, b) for a, b in zip(expected, exact, strict=True))
        optimizer.zero_grad()


@pytest.mark.parametrize(("size", "bucket_cap_mb"), [(2, EVERYTHING_MB), (3, ONE_LAYER_MB)])
def test_on_a_narrow_wire_only_what_is_sent_is_rounded(size, bucket_cap_mb):
    run_distributed(gradients_on_a_narrow_wire, size, bucket_cap_mb)


def train_half_precision():
    """Against a float32 model of which each step sees a rounded copy, over all ranks' batches."""
    module = Branches().bfloat16()
    ddp, optimizer = pair(module, optimizer_cls=ADAMW, lr=1e-4)
    reference, rounded = Branches().bfloat16().float(), Branches().bfloat16()
    plain = ADAMW(reference.parameters(), lr=1e-4)
    for step in range(8):
        ddp(batch_of(step, rank()).bfloat16(), ALL).float().square().mean().backward()
        ddp.finish_gradient_sync()
        rounded.load_state_dict(reference.state_dict())
        sums = [torch.zeros_like(p) for p in reference.parameters()]
        for of_rank in range(world_size()):
            rounded.zero_grad()
            rounded(batch_of(step, of_rank).bfloat16(), ALL).float().square().mean().backward()
            for total, parameter in zip(sums, rounded.parameters(), strict=True):
                assert parameter.grad is not None
                total += parameter.grad
        for parameter, total in zip(reference.parameters(), sums, strict=True):
            parameter.grad = total * (1 / world_size())
        step_and_clear(optimizer, plain)
        assert_close(ddp.parameters(), [p.bfloat16() for p in reference.parameters()], 0)
    state = optimizer.gather_state(module.named_parameters())
    if rank() == 0:
        masters = [state[name]["master"] for name, _ in reference.named_parameters()]
        assert_close(masters, reference.parameters(), 0)
    # One step is too small to show in 16 bits of most weights.
    largest: Any = max(module.parameters(), key=lambda p: p.abs().max().item())
    assert largest.abs().max() * 2**-9 > 1e-4


@pytest.mark.parametrize("size", WORLD_SIZES)
def test_weights_of_16_bits_follow_float32_masters(size):
    run_distributed(train_half_precision, size)


def train_mixed_dtypes():
    ours, optimizer = pair(MixedDtypes(), optimizer_cls=SGD, lr=0.5)
    theirs = TorchDDP(MixedDtypes())
    plain = SGD(theirs.parameters(), lr=0.5)
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(rank()))
    for model in (ours, theirs):
        model(x).square().mean().backward()
    ours.finish_gradient_sync()
    step_and_clear(optimizer, plain)
    for part, tolerance in (("high", 0), ("middle", 0), ("low", 1e-2)):  # torch averages in bf16
        mine, other = (getattr(model.module, part).parameters() for model in (ours, theirs))
        assert_close(mine, other, tolerance)
    assert ours.module.table.tolist() == [0, 1, 2, 3]
    return fingerprint(ours.parameters())


def test_a_module_may_hold_several_dtypes_integers_among_them():
    assert same_on_all_ranks(run_distributed(train_mixed_dtypes, 2))


def unsharded_pair(cls: Any = SGD, **settings):
    ddp = DDP(Branches(), ONE_LAYER_MB)
    return ddp, cls(ddp.parameters(), **settings)


def one_group(ddp):
    return [ShardedOptimizer(ddp.parameters(), SGD, ddp=ddp, lr=0.1, momentum=0.9)]


def the_rest_unsharded(ddp):
    layers = ddp.module.layers
    return [
        ShardedOptimizer(layers[1:4].parameters(), SGD, ddp=ddp, lr=0.1, momentum=0.9),
        SGD([*layers[0].parameters(), *layers[4:].parameters()], lr=0.1, momentum=0.9),
    ]


def two_sharded(ddp):
    parameters = list(ddp.parameters())
    return [
        ShardedOptimizer(parameters[::2], SGD, ddp=ddp, lr=0.1, momentum=0.9),
        ShardedOptimizer(parameters[1::2], SGD, ddp=ddp, lr=0.1, momentum=0.9),
    ]


def a_group_added(ddp):
    parameters = list(ddp.parameters())
    settings: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}
    optimizer = ShardedOptimizer(parameters[3:7], SGD, ddp=ddp, **settings)
    stranger, scattered = nn.Linear(2, 2).weight, DDP(Branches())
    with pytest.raises(ValueError, match=r"shape \(2, 2\) is none of the wrapped module's"):
        optimizer.add_param_group({"params": [stranger]})
    with pytest.raises(ValueError, match=r"none of the wrapped module's"):
        ShardedOptimizer(scattered.parameters(), SGD, ddp=ddp, lr=0.1)
    optimizer.add_param_group({"params": parameters[:3] + parameters[7:]})
    with pytest.raises(ValueError, match="scattered to another optimizer already"):
        ShardedOptimizer(parameters[3:5], SGD, ddp=ddp, lr=0.1)
    return [optimizer]


def train_arranged(arrange, built_after, cleared):
    """The optimizers are built after some backwards of the plain DDP, whose gradients may stay."""
    ours, _ = unsharded_pair(lr=0.1)
    unsharded, plain = unsharded_pair(lr=0.1, momentum=0.9)
    optimizers: list[Any] = []
    for step in range(built_after + 3):
        if step == built_after:
            optimizers = arrange(ours)
        for model in (ours, unsharded):
            model(batch_of(step, rank()), ALL).square().mean().backward()
            model.finish_gradient_sync()
        if step < built_after:
            assert_close(gradients(ours), gradients(unsharded), 0)
            if cleared:
                for model in (ours, unsharded):
                    model.zero_grad()
            continue
        step_and_clear(*optimizers, plain)
        assert_close(ours.parameters(), unsharded.parameters(), 0 if cleared else 1e-6)
    return fingerprint(ours.parameters())


def train_in_every_arrangement(built_after, cleared):
    arrangements = (one_group, the_rest_unsharded, two_sharded, a_group_added)
    return tuple(train_arranged(arrange, built_after, cleared) for arrange in arrangements)


@pytest.mark.parametrize(("built_after", "cleared"), [(0, True), (1, True), (1, False)])
def test_parameters_may_be_shared_out_to_optimizers_in_any_way(built_after, cleared):
    results = run_distributed(train_in_every_arrangement, 3, built_after, cleared)
    assert same_on_all_ranks(results)
    if cleared:
        assert len(set(results[0])) == 1


def by_the_optimizer(ddp, optimizer):
    optimizer.zero_grad()


def to_zero(ddp, optimizer):
    optimizer.zero_grad(set_to_none=False)


def by_ddp(ddp, optimizer):
    ddp.zero_grad()


def not_at_all(ddp, optimizer):
    pass


def train_cleared(clear):
    """Every third step is not taken; without clearing its gradients count in the next one."""
    ours, optimizer = pair(Branches(), optimizer_cls=SGD, lr=0.02)
    alone = Branches()
    plain = SGD(alone.parameters(), lr=0.02)
    for step in range(6):
        order = range(5) if step % 3 == 2 else ALL  # layer 5 has the skipped step's gradient alone
        ours(batch_of(step, rank()), order).square().mean().backward()
        ours.finish_gradient_sync()
        assert world_size() == 1 or all(p.grad is None for p in ours.parameters())
        step_of_one_process(alone, step, [order] * world_size())
        if step % 3 != 1:
            optimizer.step()
            plain.step()
        clear(ours, optimizer)
        clear(alone, plain)
        optimizer.finish_gather()
        assert_close(ours.parameters(), alone.parameters(), 5e-6)
    return fingerprint(ours.parameters())


def clear_in_every_way():
    return tuple(train_cleared(c) for c in (by_the_optimizer, to_zero, by_ddp, not_at_all))


@pytest.mark.parametrize("size", [1, 3])
def test_gradients_are_cleared_or_add_up_as_in_torch(size):
    results = run_distributed(clear_in_every_way, size)
    assert same_on_all_ranks(results)
    assert len(set(results[0][:3])) == 1
    assert results[0][3] != results[0][0]


def train_around(failures):
    """Steps 0, 2 and 3 with a failed step 1 between them, against those that had none."""
    digests = []
    for fail, failing_ranks, finish_first in failures:
        ddp, optimizer = pair(Branches(), optimizer_cls=SGD, lr=0.1, momentum=0.9)
        never_failed, plain = unsharded_pair(lr=0.1, momentum=0.9)
        for step in (0, 1, 2, 3):
            if step == 1:
                if rank() in failing_ranks:
                    with pytest.raises(recovery.Trouble):
                        fail(ddp)
                else:
                    ddp(recovery.batch_of(1), ALL).square().mean().backward()
                if finish_first:
                    ddp.finish_gradient_sync()
                ddp.zero_grad()
                assert all(p.grad is None for p in ddp.parameters())
                continue
            for model in (ddp, never_failed):
                recovery.good_step(model, step)
            step_and_clear(optimizer, plain)
            assert_close(ddp.parameters(), never_failed.parameters(), 0)
        digests.append(fingerprint(ddp.parameters()))
    return tuple(digests)


ANYWHERE = [
    recovery.fail_between_forward_and_backward,
    recovery.fail_in_backward,
    recovery.fail_under_no_sync,
    recovery.fail_after_a_micro_batch,
]


def test_when_all_ranks_fail_alike_clearing_the_gradients_is_enough():
    failures = [*ANYWHERE, recovery.fail_in_the_second_backward]
    results = run_distributed(train_around, 3, [(fail, range(3), False) for fail in failures])
    assert same_on_all_ranks(results)


def test_when_ranks_fail_differently_they_finish_the_sync_first():
    failures = [(fail, [failing], True) for fail in ANYWHERE for failing in (0, 2)]
    failures.append((recovery.fail_in_backward_at_a_place_of_its_own, range(3), True))  # type: ignore[arg-type]
    assert same_on_all_ranks(run_distributed(train_around, 3, failures))


def misuse():
    ddp, optimizer = pair(Branches(), optimizer_cls=SGD, lr=0.1)
    plain = SGD(ddp.parameters(), lr=0.1)
    before = fingerprint(ddp.parameters())
    ddp(batch_of(0, rank()), ALL).square().mean().backward()
    for step in (optimizer.step, plain.step):
        with pytest.raises(RuntimeError, match=r"step\(\) before finish_gradient_sync\(\)"):
            step()
    with pytest.raises(RuntimeError, match=r"clip_grad_norm\(\) before finish_gradient_sync\(\)"):
        optimizer.clip_grad_norm(1.0)
    for context in (contextlib.nullcontext, ddp.no_sync):
        loss = ddp(batch_of(0, rank()), ALL).square().mean()
        with context(), pytest.raises(RuntimeError, match="second backward before finish_gradient"):
            loss.backward()
    with pytest.raises(RuntimeError, match=r"a sync is under way"):
        ShardedOptimizer(ddp.parameters(), SGD, ddp=ddp, lr=0.1)
    ddp.finish_gradient_sync()
    assert all(p.grad is None for p in ddp.parameters())
    assert fingerprint(ddp.parameters()) == before
    # The late backwards were left out: the gradient is the first one's.
    optimizer.step()
    optimizer.finish_gather()
    other, plain = unsharded_pair(lr=0.1)
    recovery.good_step(other, 0)
    other.zero_grad()
    other(batch_of(0, rank()), ALL).square().mean().backward()
    other.finish_gradient_sync()
    plain.step()
    assert_close(ddp.parameters(), other.parameters(), 0)


def test_what_comes_before_the_finish_of_the_sync_is_an_error_that_says_so():
    run_distributed(misuse, 2)


def train_over_gloo():
    """As between hosts; the weights of the first layers are in use by no rank in some steps."""
    module = Branches(count=12)
    ddp = DDP(module, ONE_LAYER_MB, collectives=GlooCollectives())
    optimizer = ShardedOptimizer(module.parameters(), ADAMW, ddp=ddp, lr=0.05)
    unsharded = DDP(Branches(count=12), ONE_LAYER_MB)
    plain = ADAMW(unsharded.parameters(), lr=0.05)
    for step in range(4):
        for model in (ddp, unsharded):
            model(batch_of(step, rank()), range(3 * (step % 2), 12)).square().mean().backward()
            model.finish_gradient_sync()
        for each in (optimizer, plain):
            each.step()
            each.zero_grad()
    assert_close(ddp.state_dict().values(), unsharded.state_dict().values(), 0)


def test_between_hosts_training_is_the_same():
    run_distributed(train_over_gloo, 3)


class Counting:
    """How many buffers of the collectives are lent at a time."""

    def __init__(self, collectives: Any) -> None:
        self.lent = self.most = 0
        self._new_buffer, self._recycle = collectives.new_buffer, collectives.recycle
        collectives.new_buffer, collectives.recycle = self.new_buffer, self.recycle

    def new_buffer(self, *args):
        self.lent += 1
        self.most = max(self.most, self.lent)
        return self._new_buffer(*args)

    def recycle(self, buffer):
        self.lent -= 1
        self._recycle(buffer)


def buffers_lent(wire_dtype, count):
    dist.ddp.MOST_UNDER_WAY = int(3 * ONE_LAYER_MB * 2**20)
    module = Branches(count)
    ddp = DDP(module, ONE_LAYER_MB, wire_dtype=wire_dtype)
    optimizer = ShardedOptimizer(module.parameters(), SGD, ddp=ddp, lr=0.1)
    counting = Counting(ddp.collectives)
    alive = []
    for layer in module.layers:
        layer.weight.register_post_accumulate_grad_hook(
            lambda _: alive.append(sum(p.grad is not None for p in module.parameters()))
        )
    in_each_step = []
    for step in range(3):
        counting.most = counting.lent
        ddp(batch_of(step, rank()), range(count)).square().mean().backward()
        ddp.finish_gradient_sync()
        assert counting.lent == 0
        assert all(p.grad is None for p in module.parameters())
        in_each_step.append(counting.most)
        optimizer.step()
        optimizer.zero_grad()
    return in_each_step, max(alive)


@pytest.mark.parametrize("wire_dtype", [None, torch.bfloat16])
def test_full_gradients_live_until_they_are_sent_and_their_memory_is_used_again(wire_dtype):
    for in_each_step, most_alive in run_distributed(buffers_lent, 2, wire_dtype, 24):
        # One is filled, one is sent while three are on their way.
        assert max(in_each_step) <= 3 + 2 < 24
        assert most_alive <= 2  # a layer's weight and bias


def buffers_after_changes():
    """Optimizers that are built late, and groups that are added, leave no buffer behind."""
    module = Branches()
    ddp = DDP(module, ONE_LAYER_MB)
    counting = Counting(ddp.collectives)
    recovery.good_step(ddp, 0)
    kept = gradients(module)
    parameters = list(module.parameters())
    optimizer = ShardedOptimizer(parameters[:2], Keep, ddp=ddp)
    weights = 1
    assert_close(gradients(module), kept, 0)
    assert counting.lent == weights  # no gradient's; the flags have been replaced
    for start in range(2, 12, 2):
        recovery.good_step(ddp, 0)
        optimizer.add_param_group({"params": parameters[start : start + 2]})
        weights += 1
        assert counting.lent == weights
    ddp.zero_grad()
    recovery.good_step(ddp, 0)
    assert_close(shown_gradients(optimizer, module), kept, 0)


def test_buffers_go_back_when_gradients_are_shared_out_anew():
    run_distributed(buffers_after_changes, 2)


def waits_of_large_buckets():
    """Buckets that are each larger than all that may travel at a time."""
    dist.ddp.MOST_UNDER_WAY = 1
    module = Branches(3)
    ddp = DDP(module, ONE_LAYER_MB)
    ShardedOptimizer(module.parameters(), SGD, ddp=ddp, lr=0.1)
    events: list[tuple[str, int]] = []

    def recorded(name):
        method = getattr(Reducer, name)

        def record(reducer):
            events.append((name, id(reducer)))
            return method(reducer)

        return record

    with mock.patch.multiple(Reducer, send=recorded("send"), wait=recorded("wait")):
        ddp(batch_of(0, rank()), range(3)).square().mean().backward()
    order = [key for what, key in events if what == "send"]
    # Each is waited for when the next has been sent, the last not yet.
    assert events == [
        ("send", order[0]),
        ("send", order[1]),
        ("wait", order[0]),
        ("send", order[2]),
        ("wait", order[1]),
    ]
    ddp.finish_gradient_sync()


def test_a_bucket_that_was_just_sent_is_never_waited_for():
    run_distributed(waits_of_large_buckets, 2)


def give_other_memory():
    module = Branches(3)
    ddp = DDP(module)
    optimizer = ShardedOptimizer(module.parameters(), SGD, ddp=ddp, lr=1.0)
    module.layers[1].weight.data = module.layers[1].weight.data.clone()
    ddp(batch_of(0, rank()), range(3)).square().mean().backward()
    ddp.finish_gradient_sync()
    with pytest.raises(RuntimeError, match=r"shape \(5, 5\) has other memory than"):
        optimizer.step()


def list_in_another_order():
    module = Branches(3)
    parameters = list(module.parameters())
    ddp = DDP(module)
    for wrapper in (None, ddp):
        with pytest.raises(ValueError, match="different parameters, or the same in another order"):
            ShardedOptimizer(parameters[:: 1 if rank() else -1], SGD, ddp=wrapper, lr=0.0)


def train_stage_after_stage():
    """What an optimizer that is given up has hooked into the module does nothing any more."""
    module, alone = Branches(3), Branches(3)
    for stage in range(3):
        ddp = DDP(module)
        optimizer = ShardedOptimizer(module.parameters(), SGD, ddp=ddp, lr=0.1)
        for step in (2 * stage, 2 * stage + 1):
            ddp(batch_of(step, 0), range(3)).square().mean().backward()
            ddp.finish_gradient_sync()
            step_and_clear(optimizer)
            alone(batch_of(step, 0), range(3)).square().mean().backward()
            step_and_clear(SGD(alone.parameters(), lr=0.1))
        optimizer.finish_gather()
        assert_close(module.parameters(), alone.parameters(), 1e-6)
        del ddp, optimizer
        gc.collect()
        assert not any(part._forward_pre_hooks for part in module.modules())
    module(batch_of(0, 0), range(3)).square().mean().backward()
    assert all(p.grad is not None for p in module.parameters())


def backward_again_after_the_step():
    module = Branches(2)
    ddp = DDP(module)
    optimizer = ShardedOptimizer(module.parameters(), SGD, ddp=ddp, lr=0.1)
    loss = ddp(batch_of(0, rank()), range(2)).square().mean()
    loss.backward(retain_graph=True)
    ddp.finish_gradient_sync()
    optimizer.step()
    optimizer.finish_gather()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def set_16_bit_weights_by_hand(paired):
    module = Branches(2).bfloat16()
    ddp = DDP(module)
    settings: dict[str, Any] = {"ddp": ddp} if paired else {}
    optimizer = ShardedOptimizer(module.parameters(), SGD, lr=0.0, **settings)
    module.load_state_dict({k: torch.zeros_like(v) for k, v in module.state_dict().items()})
    ddp(batch_of(0, 0).bfloat16(), range(2)).square().mean().backward()
    ddp.finish_gradient_sync()
    optimizer.step()
    optimizer.finish_gather()
    assert not any(p.any() for p in module.parameters())


def whole_weights_are_needed():
    for cls in (torch.optim.LBFGS, torch.optim.Adafactor):
        with pytest.raises(ValueError, match="needs whole weights"):
            ShardedOptimizer(Branches(1).parameters(), cls)


def twice_differentiable():
    module = Branches(2)
    ddp = DDP(module)
    for _ in range(2):
        ddp.zero_grad()
        ddp(batch_of(0, rank()), range(2)).square().mean().backward(create_graph=True)
        ddp.finish_gradient_sync()
        # The average has no history, of vectors as of matrices.
        assert not any(p.grad is None or p.grad.requires_grad for p in ddp.parameters())


@pytest.mark.parametrize(
    "use",
    [
        give_other_memory,
        list_in_another_order,
        train_stage_after_stage,
        backward_again_after_the_step,
        whole_weights_are_needed,
        twice_differentiable,
    ],
)
def test_unusual_uses_are_right_or_refused(use):
    run_distributed(use, 2)


@pytest.mark.parametrize("paired", [True, False])
def test_16_bit_weights_that_were_set_by_hand_stay_so(paired):
    run_distributed(set_16_bit_weights_by_hand, 2, paired)
