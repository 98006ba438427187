"""Updated weights are exchanged under the next forward, and nobody reads one before it is there.

Here a gather moves nothing before it is waited for, and until then the other ranks' shards are
NaN: whoever reads too early cannot get away with it.
"""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from dist.collectives import open_collectives, rank, world_size
from dist.ddp import DDP
from dist.sharded_optimizer import ShardedOptimizer
from tests.dist.helpers import Branches, assert_close, fingerprint
from tests.harness import run_distributed

ONE_LAYER_MB = 30 * 4 / 2**20  # a bucket holds one layer of Branches
SGD = torch.optim.SGD
ALL = range(6)


class Late:
    """Collectives whose gathers begin when they are waited for.

    Attributes:
        events: "send" of a bucket of gradients, ("wait", address) of a bucket of weights.
        gathers: ("gather", address) of a bucket of weights; others may note more.
        writable: addresses of buffers that no other rank reads any more.
    """

    def __init__(self) -> None:
        # A world of one has none.
        self._real: Any = open_collectives(torch.device("cpu")) if world_size() > 1 else None
        self.events: list[Any] = []
        self.gathers: list[tuple[str, int]] = []
        self.writable: set[int] = set()

    def __getattr__(self, name):
        return getattr(self._real, name)

    def reduce_scatter_mean(self, buffer, shard):
        self.events.append("send")
        return self._real.reduce_scatter_mean(buffer, shard)

    def wait_until_writable(self, buffer):
        self._real.wait_until_writable(buffer)
        self.writable.add(buffer.data_ptr())

    def all_gather(self, buffer):
        self.gathers.append(("gather", buffer.data_ptr()))
        self.writable.discard(buffer.data_ptr())
        for owner, shard in enumerate(buffer.chunk(world_size())):
            if owner != rank():
                shard.fill_(float("nan"))
        return LateGather(self, buffer)


class LateGather:
    def __init__(self, collectives, buffer) -> None:
        self.collectives, self.buffer = collectives, buffer

    def wait(self) -> None:
        self.collectives.events.append(("wait", self.buffer.data_ptr()))
        self.collectives._real.all_gather(self.buffer).wait()


def late_pair(module, bucket_cap_mb=ONE_LAYER_MB, optimizer_cls: Any = SGD, **settings):
    collectives: Any = Late()
    ddp = DDP(module, bucket_cap_mb, collectives=collectives)
    if optimizer_cls is WhatMayBeWritten:
        settings = {"collectives": collectives}
    settings = settings or {"lr": 0.1, "momentum": 0.9}
    optimizer = ShardedOptimizer(module.parameters(), optimizer_cls, ddp=ddp, **settings)
    return ddp, optimizer, collectives.events


def unsharded_pair(module, bucket_cap_mb=ONE_LAYER_MB):
    ddp = DDP(module, bucket_cap_mb)
    return ddp, SGD(module.parameters(), lr=0.1, momentum=0.9)


def batch_of(step, rows=3, width=5):
    generator = torch.Generator().manual_seed(100 * step + rank())
    return torch.randn(rows, width, generator=generator)


def train_step(ddp, optimizer, step, *args):
    loss = ddp(batch_of(step), *args).square().mean()
    loss.backward()
    ddp.finish_gradient_sync()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


class Rooted(nn.Module):
    """Blocks and a head, and a parameter of the root's own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(5))
        branches = Branches()
        self.blocks: Any = branches.layers[:5]
        self.head = branches.layers[5]

    def forward(self, x):
        x = x * self.scale
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


def order_of_waits():
    module = Rooted()
    ddp, optimizer, events = late_pair(module)
    units = [module, *module.blocks, module.head]
    for number, unit in enumerate(units):  # behind the gather's own hook
        unit.register_forward_pre_hook(lambda *_, number=number: events.append(number))
    found = []
    for step in range(3):
        train_step(ddp, optimizer, step)
        found.append([event for event in events if event != "send"])
        events.clear()
    # Which bucket holds which unit's weights.
    of_bucket = {
        shard.buffer.data_ptr(): {
            number
            for number, unit in enumerate(units)
            for p in unit.parameters(recurse=number > 0)
            if any(p is q for q in shard.bucket.parameters)
        }
        for shard in optimizer._layout.shards
    }
    named = [
        [("wait", of_bucket[e[1]]) if isinstance(e, tuple) else e for e in events]
        for events in found
    ]
    gather = optimizer._layout.gather
    return named, len(gather._works) if gather else 0, len(of_bucket)


def test_each_bucket_is_awaited_by_the_first_unit_that_reads_it_and_not_earlier():
    for steps, pending, num_buckets in run_distributed(order_of_waits, 2):
        assert steps[0] == [0, 1, 2, 3, 4, 5, 6]
        assert pending == num_buckets >= 6  # after step() nothing has been waited for
        for events in steps[1:]:
            read: set[int] = set()
            for place, event in enumerate(events):
                if isinstance(event, tuple):
                    # The next forward to begin is the first to read this bucket.
                    (reader,) = [e for e in events[place:] if not isinstance(e, tuple)][:1]
                    assert reader == min(event[1])
                    assert not event[1] & read
                else:
                    read.add(event)
            assert [e for e in events if not isinstance(e, tuple)] == [0, 1, 2, 3, 4, 5, 6]
            assert sum(isinstance(e, tuple) for e in events) == num_buckets


class WhatMayBeWritten(SGD):
    """Notes before every step which buffers no other rank reads any more."""

    def __init__(self, params, collectives) -> None:
        super().__init__(params, lr=0.1)
        self.collectives = collectives
        self.noted: list[set[int]] = []

    def step(self, closure: Any = None) -> Any:
        self.noted.append(set(self.collectives.writable))
        super().step()


def writes():
    ddp, optimizer, _ = late_pair(Branches(), optimizer_cls=WhatMayBeWritten)
    for step in range(3):
        train_step(ddp, optimizer, step, ALL)
    weights = {shard.buffer.data_ptr() for shard in optimizer._layout.shards}
    local: Any = optimizer._local.wrapped
    return [weights <= noted for noted in local.noted]


def test_a_step_waits_until_the_other_ranks_have_read_what_it_will_overwrite():
    assert run_distributed(writes, 2) == [[True] * 3] * 2


class InParts(torch.optim.SGD):
    """Says that it may be stepped so; torch's own class need not."""

    steps_in_parts = True


class AsAWhole(torch.optim.SGD):
    """An heir may count its calls, say."""


def kinds_of_events(optimizer_cls):
    """What one step does, of an optimizer with two groups, the second with the first weights."""
    module = Rooted()
    collectives: Any = Late()
    ddp = DDP(module, ONE_LAYER_MB, collectives=collectives)
    module.scale.requires_grad_(False)
    groups = [{"params": list(part.parameters())} for part in (module.head, module.blocks)]
    events = collectives.gathers
    optimizer = ShardedOptimizer(groups, optimizer_cls, ddp=ddp, lr=0.1)
    optimizer.add_param_group({"params": [module.scale]})

    def note(local: Any, *_: Any) -> None:
        events.append(("step", sum(len(group["params"]) for group in local.param_groups)))

    optimizer._local.wrapped.register_step_pre_hook(note)
    train_step(ddp, optimizer, 0)
    of_weight = {shard.buffer.data_ptr(): shard for shard in optimizer._layout.shards}
    weights = [id(weight) for weight in module.parameters()]
    return [
        (kind, min(weights.index(id(w)) for w in of_weight[what].bucket.parameters))
        if kind == "gather"
        else (kind, what)
        for kind, what in events
    ]


@pytest.mark.parametrize("optimizer_cls", [torch.optim.SGD, InParts, AsAWhole])
def test_what_forward_reads_first_is_on_its_way_before_the_rest_is_updated(optimizer_cls):
    (events, other) = run_distributed(kinds_of_events, 2, optimizer_cls)
    assert events == other
    # All but the root's own weight, which is frozen.
    gathers = [("gather", first) for first in (1, 3, 5, 7, 9, 11)]
    if optimizer_cls is not AsAWhole:
        assert events == [("step", 1), gathers[0], ("step", 5), *gathers[1:]]
    else:
        assert events == [("step", 7), *gathers]


class ReadsItsChild(nn.Module):
    """Uses weights of children that it does not call, or calls in every second forward."""

    def __init__(self) -> None:
        super().__init__()
        layers = Branches().layers
        self.first, self.second = layers[0], layers[1]
        self.inner = nn.ModuleDict({"a": nn.Sequential(layers[2], nn.Tanh()), "b": layers[3]})
        self.both = nn.ModuleList([layers[3], layers[4]])  # layers[3] is in two containers
        self.table = nn.ParameterList([torch.eye(5)])

    def forward(self, x, call):
        x = self.second(x)
        x = functional.linear(x, self.first.weight, self.first.bias)
        if call:
            x = self.both[1](self.inner["a"](x))
        else:
            linear: Any = self.inner["a"][0]  # type: ignore[index]
            x = functional.linear(x, linear.weight) @ self.table[0]
        return self.both[0](x)


def read_in_all_ways():
    modules = ReadsItsChild(), ReadsItsChild()
    ddp, optimizer, _ = late_pair(modules[0])
    reference, plain = unsharded_pair(modules[1])
    # What a forward calls is expected to be called by the next: the change to reading follows a
    # finish_gather.
    for step, call in enumerate([False, False, True, True, False, False, True]):
        if not call and step and optimizer._layout.gather:
            optimizer.finish_gather()
        losses = [
            train_step(model, each, step, call)
            for model, each in ((ddp, optimizer), (reference, plain))
        ]
        assert torch.equal(*losses), step
    optimizer.finish_gather()
    assert_close(ddp.parameters(), reference.parameters(), 0)


def unequal_forwards():
    """Layers that the last forward did not call, in other orders, and forwards that break off."""
    ddp, optimizer, _ = late_pair(Branches())
    reference, plain = unsharded_pair(Branches())
    for step, order in enumerate([[0, 1, 2], [3, 4, 5], [5, 0], [2, 1, 0, 3], [4], [4], ALL]):
        if step in (3, 5):
            with pytest.raises(TypeError):
                ddp(batch_of(step), [*order[:1], None])
        losses = [
            train_step(model, each, step, order)
            for model, each in ((ddp, optimizer), (reference, plain))
        ]
        assert torch.equal(*losses), step
    optimizer.finish_gather()
    assert_close(ddp.parameters(), reference.parameters(), 0)


def read_all():
    read_in_all_ways()
    unequal_forwards()


@pytest.mark.parametrize("size", [2, 3])
def test_weights_are_current_whoever_of_the_module_reads_them(size):
    run_distributed(read_all, size)


def between_steps():
    """After every step the model is used otherwise than by its forward."""
    modules = Branches(), Branches()
    ddp, optimizer, _ = late_pair(modules[0])
    reference, plain = unsharded_pair(modules[1])
    x = torch.ones(2, 5)

    def call_children():
        for mine, other in zip(modules[0].layers, modules[1].layers, strict=True):
            assert torch.equal(mine(x), other(x))

    def call_last_child():
        assert torch.equal(modules[0].layers[5](x), modules[1].layers[5](x))

    def evaluate():
        with torch.no_grad():
            assert torch.equal(ddp(x, ALL), reference(x, ALL))

    def infer():
        with torch.inference_mode():
            assert torch.equal(modules[0](x, [4, 2]), modules[1](x, [4, 2]))

    def save():
        assert_close(ddp.state_dict().values(), reference.state_dict().values(), 0)

    def save_a_child():
        mine, other = (module.layers[3].state_dict() for module in modules)
        assert_close(mine.values(), other.values(), 0)

    def load():
        other = Branches(seed=4).state_dict()
        for model in (ddp, reference):
            model.load_state_dict(other)

    def load_a_child():
        other = Branches(seed=5).layers[2].state_dict()
        for module in modules:
            module.layers[2].load_state_dict(other)

    def read():
        optimizer.finish_gather()
        assert_close(modules[0].parameters(), modules[1].parameters(), 0)

    def write():
        optimizer.finish_gather()
        torch.distributed.barrier()
        with torch.no_grad():
            for module in modules:
                for parameter in module.parameters():
                    parameter.mul_(0.5)

    uses = [call_children, call_last_child, evaluate, infer, save, save_a_child, load]
    uses += [load_a_child, read, write]
    for step, use in enumerate(uses):
        losses = [
            train_step(model, each, step, ALL)
            for model, each in ((ddp, optimizer), (reference, plain))
        ]
        assert torch.equal(*losses), uses[step - 1].__name__
        use()
    read()
    return fingerprint(modules[0].parameters())


@pytest.mark.parametrize("size", [2, 3])
def test_between_steps_the_model_may_be_called_saved_and_loaded(size):
    assert len(set(run_distributed(between_steps, size))) == 1


def load_in_half_precision():
    """What is loaded is what training goes on from, not the masters of the weights before."""
    whole, child = Branches(seed=4).bfloat16(), Branches(seed=5).bfloat16()
    module = Branches().bfloat16()
    ddp, optimizer, _ = late_pair(module, lr=1e-3)
    for step in range(2):
        half_step(ddp, optimizer, step)
    ddp.load_state_dict(whole.state_dict())
    module.layers[2].load_state_dict(child.layers[2].state_dict())
    whole.layers[2].load_state_dict(child.layers[2].state_dict())
    fresh, other, _ = late_pair(whole, lr=1e-3)
    for step in range(4):
        half_step(ddp, optimizer, step)
        half_step(fresh, other, step)
    assert_close(ddp.state_dict().values(), fresh.state_dict().values(), 0)
    # A child that is loaded costs the others nothing: their masters keep what rounding would lose.
    kept = optimizer.gather_state(module.named_parameters())
    module.layers[2].load_state_dict(child.layers[2].state_dict())
    found = optimizer.gather_state(module.named_parameters())
    if rank() == 0:
        for name, entries in found.items():
            if name.startswith("layers.2."):
                loaded = child.state_dict()[name]
                assert torch.equal(entries["master"].bfloat16(), loaded)
            else:
                assert torch.equal(entries["master"], kept[name]["master"])
        assert any(
            not torch.equal(entries["master"], entries["master"].bfloat16().float())
            for entries in found.values()
        )
    return fingerprint(module.parameters())


def half_step(ddp, optimizer, step):
    ddp(batch_of(step).bfloat16(), ALL).float().square().mean().backward()
    ddp.finish_gradient_sync()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("size", [1, 2])
def test_loaded_16_bit_weights_are_what_training_goes_on_from(size):
    assert len(set(run_distributed(load_in_half_precision, size))) == 1


class Block(nn.Module):
    def __init__(self, layer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return torch.tanh(self.layer(x)) + x


class Blocks(nn.Module):
    def __init__(self, checkpointing: bool) -> None:
        super().__init__()
        self.blocks: Any = nn.ModuleList(Block(layer) for layer in Branches().layers)
        self.checkpointing = checkpointing

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointing else block(x)
        return x


def train_blocks(checkpointing, backend, built_late):
    module, plain_module = Blocks(checkpointing), Blocks(False)
    if backend is not None:
        for block in module.blocks:
            block.compile(backend=backend)
    collectives: Any = Late()
    events = collectives.events
    for block in module.blocks:
        block.layer.register_forward_pre_hook(torch.compiler.disable(lambda *_: events.append("f")))
    ddp = DDP(module, ONE_LAYER_MB, collectives=collectives)
    reference, plain = unsharded_pair(plain_module)
    if built_late:  # the blocks' graphs are there already, without the gather's hooks
        for model in (ddp, reference):
            model(batch_of(0)).square().mean().backward()
            model.finish_gradient_sync()
            model.zero_grad()
    optimizer = ShardedOptimizer(module.parameters(), SGD, ddp=ddp, lr=0.1, momentum=0.9)
    module.blocks[0].layer.weight.register_post_accumulate_grad_hook(lambda _: events.append("end"))
    for step in range(4):
        events.clear()
        losses = [
            train_step(model, each, step) for model, each in ((ddp, optimizer), (reference, plain))
        ]
        torch.testing.assert_close(*losses, rtol=1e-6, atol=0)
        # All but the bucket of the first layer are on their way when backward ends.
        assert events[: events.index("end")].count("send") >= 5
        if step > 0:
            waits = [place for place, event in enumerate(events) if isinstance(event, tuple)]
            assert len(waits) == 6
            # Neither all at once nor all in the first block.
            forwards = [place for place, event in enumerate(events) if event == "f"]
            assert forwards[0] < waits[1] < forwards[1] < waits[2]
            assert forwards[4] < waits[5]
    optimizer.finish_gather()
    assert_close(module.parameters(), plain_module.parameters(), 0 if backend is None else 1e-6)
    return fingerprint(module.parameters())


@pytest.mark.parametrize(
    ("checkpointing", "backend", "built_late"),
    [
        (False, None, False),
        (True, None, False),
        (False, "aot_eager", False),
        (False, "aot_eager", True),
        (True, "aot_eager", False),
    ],
)
def test_blocks_that_are_run_again_or_compiled_wait_and_send_as_plain_ones(
    checkpointing, backend, built_late
):
    results = run_distributed(train_blocks, 2, checkpointing, backend, built_late)
    assert len(set(results)) == 1


def two_optimizers_of_one_module():
    """Each has gathers of its own under way."""
    modules = Branches(), Branches()
    collectives: Any = Late()
    ddp = DDP(modules[0], ONE_LAYER_MB, collectives=collectives)
    parameters = list(modules[0].parameters())
    optimizers = [
        ShardedOptimizer(parameters[start::2], SGD, ddp=ddp, lr=0.1, momentum=0.9)
        for start in (0, 1)
    ]
    reference, plain = unsharded_pair(modules[1])
    for step in range(4):
        losses = []
        for model, each in ((ddp, optimizers), (reference, [plain])):
            loss = model(batch_of(step), ALL).square().mean()
            loss.backward()
            model.finish_gradient_sync()
            for optimizer in each:
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss)
        assert torch.equal(*losses)
    assert_close(ddp.state_dict().values(), reference.state_dict().values(), 0)


def standalone_step():
    """Without DDP nothing would wait: step() does."""
    module = Branches()
    optimizer = ShardedOptimizer(module.parameters(), SGD, lr=0.5)
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    expected = [p - 0.5 for p in Branches().parameters()]
    optimizer.step()
    assert_close(module.parameters(), expected, 1e-7)
    optimizer.finish_gather()


def several():
    two_optimizers_of_one_module()
    standalone_step()


def test_every_optimizer_has_its_own_gathers_and_waits_at_once_without_ddp():
    run_distributed(several, 2)
