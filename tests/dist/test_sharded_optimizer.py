"""The sharded optimizer computes the unsharded one's numbers, with its share of the state."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as torch_dist
from torch import nn

from dist.collectives import rank, world_size
from dist.ddp import DDP
from dist.sharded_optimizer import ShardedOptimizer
from optim.adamw import AdamW
from tests.dist.helpers import (
    WORLD_SIZES,
    TinyLanguageModel,
    assert_close,
    fingerprint,
    gradients,
    language_model_loss,
    tokens,
)
from tests.harness import run_distributed

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "adam": (torch.optim.Adam, {"lr": 0.01, "betas": (0.8, 0.95)}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "adamw amsgrad": (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True}),
    "nadam": (torch.optim.NAdam, {"lr": 0.01}),
}
ADAMW = torch.optim.AdamW


def write_gradients(model, step, skip=()):
    """The same on every rank, as after a sync."""
    generator = torch.Generator().manual_seed(step)
    for position, parameter in enumerate(model.parameters()):
        gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        parameter.grad = None if position in skip or not parameter.requires_grad else gradient


def same_on_all_ranks(results):
    return len(set(results)) == 1


def two_groups(model):
    """Matrices decay, the rest does not: groups of different hyperparameters."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.2, "lr": 0.02},
        {"params": [p for p in parameters if p.dim() < 2]},
    ]


def step_both(optimizers, models, step, skip=()):
    for optimizer, model in zip(optimizers, models, strict=True):
        write_gradients(model, step, skip)
        optimizer.step()
        optimizer.zero_grad()
    assert_close(models[0].parameters(), models[1].parameters(), 0)


def leave_a_step_out(optimizer_cls, settings):
    """Step 1 of three has an infinity on all ranks, and a tensor says to leave it out."""
    models = TinyLanguageModel(), TinyLanguageModel()
    sharded = ShardedOptimizer(models[0].parameters(), optimizer_cls, **settings)
    plain = optimizer_cls(models[1].parameters(), **settings)
    for step in range(3):
        for optimizer, model in ((sharded, models[0]), (plain, models[1])):
            write_gradients(model, step)
            if optimizer is sharded:
                sharded.found_inf = torch.tensor(float(step == 1))
                if step == 1:
                    gradient = next(model.parameters()).grad
                    assert gradient is not None
                    gradient.view(-1)[0] = float("inf")
            if optimizer is sharded or step != 1:
                optimizer.step()
            optimizer.zero_grad()
        assert_close(models[0].parameters(), models[1].parameters(), 0)
    state = sharded.gather_state(models[0].named_parameters())
    return {float(entries["step"]) for entries in state.values() if "step" in entries}


def leave_a_step_out_of_each():
    return [
        leave_a_step_out(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),  # the host decides
        leave_a_step_out(torch.optim.AdamW, {"lr": 0.01}),
        leave_a_step_out(torch.optim.AdamW, {"lr": 0.01, "fused": True}),  # the device does
        leave_a_step_out(AdamW, {"lr": 0.01}),
    ]


@pytest.mark.parametrize("size", [1, 2])
def test_a_step_that_a_tensor_says_to_leave_out_changes_nothing_and_is_not_counted(size):
    plain, *counting = run_distributed(leave_a_step_out_of_each, size)[0]
    assert plain == set()
    assert counting == [{2.0}] * 3


def train_both(name):
    return [train_with(*OPTIMIZERS[name], grouped) for grouped in (False, True)]


def train_with(optimizer_cls, settings, grouped):
    models = TinyLanguageModel(), TinyLanguageModel()
    parts = [two_groups(m) if grouped else list(m.parameters()) for m in models]
    sharded = ShardedOptimizer(parts[0], optimizer_cls, **settings)
    plain = optimizer_cls(parts[1], **settings)
    for step in range(5):
        for optimizer in (sharded, plain):
            if step == 2:
                optimizer.param_groups[0]["lr"] = 0.003
            if step == 3:
                optimizer.param_groups[-1]["weight_decay"] = 0.3
        step_both((sharded, plain), models, step, skip=[{0}, {}, {2, 3}, {1}, {}][step])
    assert models[0].head.weight is models[0].embedding.weight
    return fingerprint(models[0].parameters())


@pytest.mark.parametrize("size", WORLD_SIZES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_step_is_that_of_the_unsharded_optimizer_bit_for_bit(size, name):
    digests = run_distributed(train_both, size, name)
    assert digests == digests[:1] * size


def state_share(vocab_size, freeze):
    model = TinyLanguageModel(vocab_size=vocab_size, width=32)
    if freeze == "embedding":  # more than half of the model
        model.embedding.weight.requires_grad_(False)
    elif freeze == "bias":
        model.hidden.bias.requires_grad_(False)
    optimizer = ShardedOptimizer(two_groups(model), ADAMW)
    write_gradients(model, 0)
    optimizer.step()
    plain = ADAMW([p for p in model.parameters() if p.grad is not None])
    plain.step()
    whole = sum(
        value.nbytes
        for state in plain.state.values()
        for key, value in state.items()
        if key != "step"
    )
    return optimizer.state_bytes(), whole


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize(("vocab_size", "freeze"), [(509, ""), (509, "embedding"), (512, "bias")])
def test_every_rank_keeps_one_share_of_the_state_within_a_percent(size, vocab_size, freeze):
    shares = run_distributed(state_share, size, vocab_size, freeze)
    held, whole = [share for share, _ in shares], shares[0][1]
    assert max(held) * size / sum(held) <= 1.01
    assert whole <= sum(held) <= 1.01 * whole


class Odd(nn.Module):
    """Fewer elements than ranks in one group, none in another."""

    def __init__(self, shapes) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        self.weights = nn.ParameterList(
            nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes
        )


ODD_SHAPES = {
    "more ranks than elements": [[(2,)]],
    "a group of one scalar": [[(3, 3)], [()]],
    "zero-size weights among others": [[(0, 4), (3,), (0,), (2, 2), (4, 0)]],
    "zero-size weights alone": [[(0, 4), (0,)], [(5,)]],
    "scalars": [[(), (), ()]],
}


def train_odd(groups):
    models = [Odd([shape for group in groups for shape in group]) for _ in range(2)]
    parts = []
    for model in models:
        remaining = iter(model.weights)
        parts.append([{"params": [next(remaining) for _ in group]} for group in groups])
    sharded, plain = ShardedOptimizer(parts[0], ADAMW, lr=0.1), ADAMW(parts[1], lr=0.1)
    for step in range(3):
        step_both((sharded, plain), models, step)
    named = list(models[0].named_parameters())
    state = sharded.gather_state(named)
    if rank() == 0:
        for name, parameter in models[1].named_parameters():
            if parameter.numel() > 0:
                for key, value in plain.state[parameter].items():
                    assert torch.equal(state[name][key], value), (name, key)
    sharded.load_state(named, broadcast(state))
    step_both((sharded, plain), models, 3)
    return fingerprint(models[0].parameters())


def broadcast(state):
    box = [state]
    if torch_dist.is_initialized():
        torch_dist.broadcast_object_list(box)
    return box[0]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("case", ODD_SHAPES)
def test_weights_of_odd_sizes_train_save_and_load(size, case):
    assert same_on_all_ranks(run_distributed(train_odd, size, ODD_SHAPES[case]))


def train_with_a_frozen_weight():
    models = TinyLanguageModel(), TinyLanguageModel()
    for model in models:
        model.hidden.weight.requires_grad_(False)
    start = models[0].hidden.weight.clone()
    sharded = ShardedOptimizer(models[0].parameters(), ADAMW)
    plain = ADAMW(models[1].parameters())
    step_both((sharded, plain), models, 0)
    assert torch.equal(models[0].hidden.weight, start)
    assert not models[0].hidden.weight.requires_grad
    for model in models:
        model.hidden.weight.requires_grad_(True)
    step_both((sharded, plain), models, 1)
    assert not torch.equal(models[0].hidden.weight, start)


@pytest.mark.parametrize("size", [1, 3])
def test_a_frozen_weight_stays_and_moves_once_thawed(size):
    run_distributed(train_with_a_frozen_weight, size)


def add_a_group():
    models = TinyLanguageModel(), TinyLanguageModel()
    late = [list(model.down.parameters()) for model in models]
    early = [
        [p for p in model.parameters() if not any(p is q for q in others)]
        for model, others in zip(models, late, strict=True)
    ]
    sharded, plain = ShardedOptimizer(early[0], ADAMW, lr=0.1), ADAMW(early[1], lr=0.1)
    step_both((sharded, plain), models, 0)
    for optimizer, parameters in zip((sharded, plain), late, strict=True):
        optimizer.add_param_group({"params": parameters, "lr": 0.5})
    assert sharded.param_groups[1].keys() == plain.param_groups[1].keys()
    for step in (1, 2):
        step_both((sharded, plain), models, step)
    with pytest.raises(ValueError, match="more than one parameter group"):
        sharded.add_param_group({"params": late[0]})


class OfPositiveRate(torch.optim.SGD):
    def add_param_group(self, param_group):
        if param_group.get("lr", 0.0) < 0.0:
            raise ValueError(f"lr {param_group['lr']} is below 0")
        super().add_param_group(param_group)


def add_a_group_that_the_wrapped_optimizer_refuses():
    models = TinyLanguageModel(), TinyLanguageModel()
    sharded = ShardedOptimizer(models[0].parameters(), OfPositiveRate, lr=0.1)
    plain = OfPositiveRate(models[1].parameters(), lr=0.1)
    step_both((sharded, plain), models, 0)
    weight = nn.Parameter(torch.ones(3))
    place = weight.data_ptr()
    for _ in range(2):
        with pytest.raises(ValueError, match="is below 0"):
            sharded.add_param_group({"params": [weight], "lr": -1.0})
    assert weight.data_ptr() == place
    assert len(sharded.param_groups) == 1
    step_both((sharded, plain), models, 1)
    sharded.add_param_group({"params": [weight], "lr": 0.5})
    weight.grad = torch.ones(3)
    sharded.step()
    assert weight.tolist() == [0.5] * 3


@pytest.mark.parametrize("size", [1, 3])
def test_a_param_group_may_be_added_later(size):
    run_distributed(add_a_group, size)
    run_distributed(add_a_group_that_the_wrapped_optimizer_refuses, size)


def with_a_scheduler():
    models = TinyLanguageModel(), TinyLanguageModel()
    optimizers = (
        ShardedOptimizer(models[0].parameters(), ADAMW, lr=0.1),
        ADAMW(models[1].parameters(), lr=0.1),
    )
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in optimizers]
    for step in range(3):
        step_both(optimizers, models, step)
        for scheduler in schedulers:
            scheduler.step()
    return optimizers[0].param_groups[0]["lr"]


def test_a_scheduler_of_torch_steers_it():
    assert run_distributed(with_a_scheduler, 2) == [0.1 * 0.5**3] * 2


def with_a_closure():
    model = nn.Linear(2, 1)
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)

    def closure():
        loss = model(torch.ones(1, 2)).square().sum()
        loss.backward()
        return loss

    return optimizer.step(closure).requires_grad


def test_a_closure_computes_the_loss_with_gradients():
    assert run_distributed(with_a_closure, 1) == [True]


def mixed_dtypes():
    """The reference of a 16-bit weight is a float32 one that is rounded after every step."""
    models = nn.Linear(5, 3), nn.Linear(5, 3)
    for model in models:
        torch.manual_seed(0)
        model.reset_parameters()
    models[0].weight.data = models[0].weight.data.bfloat16()
    models[1].weight.data = models[0].weight.data.float()
    sharded, plain = ShardedOptimizer(models[0].parameters(), ADAMW), ADAMW(models[1].parameters())
    for step in range(20):
        write_gradients(models[0], step)
        for ours, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
            assert ours.grad is not None
            theirs.grad = ours.grad.float()
        sharded.step()
        plain.step()
        assert torch.equal(models[0].weight, models[1].weight.bfloat16())
        assert torch.equal(models[0].bias, models[1].bias)
    named = dict(models[0].named_parameters())
    state = sharded.gather_state(named.items())
    if rank() == 0:
        assert torch.equal(state["weight"]["master"], models[1].weight)
        assert "master" not in state["bias"]
    # The next steps go on from the master, not from its rounded image.
    sharded.load_state(named.items(), broadcast(state))
    write_gradients(models[0], 20)
    gradient: Any = models[0].weight.grad
    models[1].weight.grad = gradient.float()
    sharded.step()
    plain.step()
    assert torch.equal(models[0].weight, models[1].weight.bfloat16())
    return models[0].weight.dtype, models[0].bias.dtype


@pytest.mark.parametrize("size", [1, 3])
def test_weights_of_16_bits_have_masters_in_float32(size):
    assert run_distributed(mixed_dtypes, size) == [(torch.bfloat16, torch.float32)] * size


def moved_weights():
    model = TinyLanguageModel()
    before, objects = [p.clone() for p in model.parameters()], list(model.parameters())
    ShardedOptimizer(two_groups(model), ADAMW)
    assert all(a is b for a, b in zip(model.parameters(), objects, strict=True))
    assert_close(model.parameters(), before, 0)
    other = TinyLanguageModel(seed=9)
    model.load_state_dict(other.state_dict())
    assert_close(model.parameters(), other.parameters(), 0)


def test_the_weights_move_but_stay_what_and_who_they_are():
    run_distributed(moved_weights, 2)


def refused_state_dicts():
    optimizer = ShardedOptimizer(nn.Linear(2, 2).parameters(), ADAMW)
    with pytest.raises(RuntimeError, match=r"use gather_state\(names\)"):
        optimizer.state_dict()
    with pytest.raises(RuntimeError, match=r"use load_state\(names, state\)"):
        optimizer.load_state_dict({})


def test_a_part_of_the_state_is_never_given_out_as_a_state_dict():
    run_distributed(refused_state_dicts, 1)


def make(sharded):
    """A model with its optimizer, and a reader and a writer of the optimizer's named state."""
    model = TinyLanguageModel()
    named = list(model.named_parameters())
    optimizer: Any
    if sharded:
        optimizer = ShardedOptimizer(two_groups(model), ADAMW, lr=0.05)
        return (
            model,
            optimizer,
            lambda: optimizer.gather_state(named),
            lambda s: optimizer.load_state(named, s),
        )
    optimizer = ADAMW(two_groups(model), lr=0.05)

    def write(state):
        for name, parameter in named:
            if name in state:
                optimizer.state[parameter] = {k: v.clone() for k, v in state[name].items()}

    return model, optimizer, lambda: {n: optimizer.state[p] for n, p in named}, write


def train_from(checkpoint, sharded, steps):
    model, optimizer, read, write = make(sharded)
    if checkpoint is not None:
        weights, state = checkpoint
        model.load_state_dict(weights)
        write(state)
    for step in steps:
        write_gradients(model, step, skip={0} if step < 2 else {})
        optimizer.step()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    return weights, read()


def assert_same_checkpoint(ours, theirs):
    assert ours[0].keys() == theirs[0].keys()
    assert_close(ours[0].values(), theirs[0].values(), 0)
    assert ours[1].keys() == theirs[1].keys()
    for name, entries in theirs[1].items():
        assert ours[1][name].keys() == entries.keys()
        assert_close(ours[1][name].values(), entries.values(), 0)


@pytest.mark.parametrize("saved_at", ["plain", 2, 3])
def test_a_saved_state_goes_on_bit_for_bit_at_any_world_size_sharded_or_not(saved_at):
    size = 1 if saved_at == "plain" else saved_at
    straight = run_distributed(train_from, 1, None, False, range(6))[0]
    saved, *others = run_distributed(train_from, size, None, saved_at != "plain", range(3))
    assert [state for _, state in others] == [{}] * (size - 1)  # gathered by rank 0 alone
    for world, sharded in [(1, True), (2, True), (3, True), (4, True), (1, False), (2, False)]:
        resumed = run_distributed(train_from, world, saved, sharded, range(3, 6))
        assert_same_checkpoint(resumed[0], straight)
        for weights, _ in resumed:
            assert_close(weights.values(), straight[0].values(), 0)


def largest_messages():
    """Elements of the largest tensor that gathering the state moves, and of the largest weight."""
    model = TinyLanguageModel(vocab_size=509)
    optimizer = ShardedOptimizer(model.parameters(), ADAMW)
    write_gradients(model, 0)
    optimizer.step()
    received = []
    irecv = torch_dist.irecv

    def record(data, **kwargs):
        received.append(data.numel() // 4)  # bytes of float32
        return irecv(data, **kwargs)

    with mock.patch.object(torch_dist, "irecv", record):
        optimizer.gather_state(model.named_parameters())
    return received, max(p.numel() for p in model.parameters())


def test_state_is_gathered_one_piece_at_a_time_and_by_rank_zero_alone():
    (received, largest), *others = run_distributed(largest_messages, 4)
    assert len(received) > 4
    assert max(received) <= largest
    assert [messages for messages, _ in others] == [[]] * 3


def loaded_strangers():
    model = nn.Linear(3, 2)
    optimizer = ShardedOptimizer(model.parameters(), ADAMW)
    write_gradients(model, 0)
    optimizer.step()
    named = list(model.named_parameters())
    before = optimizer.state_bytes()
    state = {"weight": {"step": torch.tensor(1.0), "exp_avg": torch.zeros(2, 3)}}
    messages = []
    for wrong in (
        {**state, "gate": state["weight"]},
        {"bias": state["weight"]},
        {"weight": {"exp_avg": torch.zeros(3, 2)}},
    ):
        with pytest.raises(ValueError, match="parameter") as caught:
            optimizer.load_state(named, wrong)
        messages.append(str(caught.value))
    assert optimizer.state_bytes() == before > 0
    return messages


def test_state_of_another_model_is_refused_by_name():
    for messages in run_distributed(loaded_strangers, 2):
        assert messages == [
            "state for gate, which is no parameter of this optimizer",
            "exp_avg of bias has shape (2, 3), the parameter has (2,)",
            "exp_avg of weight has shape (3, 2), the parameter has (2, 3)",
        ]


def missing_state():
    """State is by name: what it lacks starts anew, what it has goes where it belongs."""
    model, optimizer, read, write = make(sharded=True)
    write_gradients(model, 0)
    optimizer.step()
    state = broadcast(read())
    kept = {name: state[name] for name in reversed(list(state)) if name != "norm.weight"}
    write(kept)
    return sorted(broadcast(read())) == sorted(kept)


def test_state_is_found_by_name_and_may_lack_a_parameter():
    assert run_distributed(missing_state, 2) == [True, True]


def train_with_ddp(sharded, optimizer_first, steps=5):
    """The whole of a training step, clip included, on the ranks' own parts of the batch."""
    module = TinyLanguageModel(seed=rank())
    groups = two_groups(module)

    def make_optimizer():
        return ShardedOptimizer(groups, ADAMW, lr=0.05) if sharded else ADAMW(groups, lr=0.05)

    if optimizer_first:
        optimizer = make_optimizer()
        ddp = DDP(module, 0.001)
    else:
        ddp = DDP(module, 0.001)
        optimizer = make_optimizer()
    norms = []
    for step in range(steps):
        batch = tokens(step, rows=12).chunk(world_size())[rank()]
        language_model_loss(ddp, batch).backward()
        ddp.finish_gradient_sync()
        norms.append(nn.utils.clip_grad_norm_(ddp.parameters(), 0.1).item())
        optimizer.step()
        optimizer.zero_grad()
    return fingerprint(module.parameters()), [p.detach() for p in module.parameters()], norms


@pytest.mark.parametrize("size", WORLD_SIZES)
@pytest.mark.parametrize("optimizer_first", [False, True])
def test_ddp_with_the_sharded_optimizer_equals_ddp_with_the_plain_one(size, optimizer_first):
    ((plain, _, plain_norms), *_) = run_distributed(train_with_ddp, size, False, optimizer_first)
    for digest, _, norms in run_distributed(train_with_ddp, size, True, optimizer_first):
        assert digest == plain
        assert norms == plain_norms


def test_clipped_steps_are_those_of_one_process_with_sharding_or_without():
    # The tied embedding spans two shards.
    ((_, reference, reference_norms),) = run_distributed(train_with_ddp, 1, False, False)
    assert min(reference_norms) > 0.1
    for size, sharded in [(2, False), (2, True), (4, True)]:
        _, weights, norms = run_distributed(train_with_ddp, size, sharded, False)[0]
        assert norms == pytest.approx(reference_norms, rel=1e-5)
        assert_close(weights, reference, 1e-4)


def unequal_use():
    """A weight that no rank uses is left alone; one that a single rank uses is not."""
    model: Any = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
    ddp = DDP(model)
    optimizer = ShardedOptimizer(model.parameters(), ADAMW, lr=0.1)
    before = [layer.weight.clone() for layer in model]
    x = torch.ones(2, 3)
    (model[0](x) if rank() == 0 else model[1](model[0](x))).square().mean().backward()
    ddp.finish_gradient_sync()
    optimizer.step()
    moved = [not torch.equal(a.weight, b) for a, b in zip(model, before, strict=True)]
    assert gradients(model)[4] is None
    return moved, fingerprint(model.parameters())


def test_a_weight_without_gradient_is_left_alone_by_every_rank():
    results = run_distributed(unequal_use, 3)
    assert [moved for moved, _ in results] == [[True, True, False]] * 3
    assert same_on_all_ranks([digest for _, digest in results])


def memory_of_weights():
    model = TinyLanguageModel()
    optimizer = ShardedOptimizer(model.parameters(), ADAMW)
    elements = sum(p.numel() for p in model.parameters())
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage() for p in model.parameters()}
    write_gradients(model, 0)
    optimizer.step()
    segments = [segment for shard in optimizer._layout.shards for segment in shard.segments]
    assert not any(segment.parameter.grad is not None for segment in segments)
    return len(storages), sum(s.nbytes() for s in storages.values()) - 4 * elements


def test_the_weights_lie_in_one_flat_buffer_and_no_piece_holds_on_to_gradients():
    for storages, padding in run_distributed(memory_of_weights, 3):
        assert storages == 1
        assert padding < 3 * 4
