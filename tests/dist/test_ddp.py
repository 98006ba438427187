"""DDP's gradients are those of torch's DDP, and of one process over the whole batch."""

from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from dist.collectives import rank, world_size
from dist.ddp import DDP
from dist.reducer import MOST_OF_A_SMALL_VECTOR
from dist.sharded_optimizer import ShardedOptimizer
from dist.shared_memory_collectives import SharedMemoryCollectives
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
from tests.harness import run_distributed

ONE_LAYER_MB = 30 * 4 / 2**20  # a bucket holds one layer of Branches
EVERYTHING_MB = 25.0


def same_on_all_ranks(results):
    return len(set(results)) == 1


def accumulate(ddp, micro_batches):
    """Backward of all micro-batches, synced in the last, as a training loop does it."""
    for batch in micro_batches[:-1]:
        with ddp.no_sync():
            (language_model_loss(ddp, batch) / len(micro_batches)).backward()
    (language_model_loss(ddp, micro_batches[-1]) / len(micro_batches)).backward()


def train_three_ways(bucket_cap_mb):
    ours = DDP(TinyLanguageModel(seed=rank()), bucket_cap_mb)
    ensure_group()
    theirs = TorchDDP(TinyLanguageModel(seed=rank()), bucket_cap_mb=bucket_cap_mb)
    alone = TinyLanguageModel(seed=0)
    models = (ours, theirs, alone)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.3, momentum=0.9) for m in models]
    for step, accumulation_steps in enumerate([1, 1, 2, 3, 4, 1]):
        batch = tokens(step, rows=2 * world_size() * accumulation_steps)
        micro_batches = batch.chunk(world_size())[rank()].chunk(accumulation_steps)
        accumulate(ours, micro_batches)
        ours.finish_gradient_sync()
        accumulate(theirs, micro_batches)
        language_model_loss(alone, batch).backward()
        # A sum of two numbers has no order; at three ranks 1/3 is rounded before or after.
        assert_close(gradients(ours), gradients(theirs), 0 if world_size() <= 2 else 1e-6)
        assert_close(gradients(ours), gradients(alone), 2e-6)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return fingerprint(ours.parameters())


@pytest.mark.parametrize("size", WORLD_SIZES)
@pytest.mark.parametrize("bucket_cap_mb", [1e-6, 0.001, EVERYTHING_MB])
def test_gradients_are_those_of_torch_ddp_and_of_one_process(size, bucket_cap_mb):
    assert same_on_all_ranks(run_distributed(train_three_ways, size, bucket_cap_mb))


module_plans = st.fixed_dictionaries(
    {
        "widths": st.lists(st.integers(1, 6), min_size=2, max_size=6),
        "biases": st.lists(st.booleans(), min_size=6, max_size=6),
        "tied": st.booleans(),
        "frozen": st.sets(st.integers(0, 4), max_size=2),
        "wide": st.sets(st.integers(0, 4), max_size=2),
        "bucket_cap_mb": st.sampled_from([1e-6, 60 / 2**20, EVERYTHING_MB]),
        "accumulation_steps": st.integers(1, 4),
    }
)


def widen(layers, wide):
    """Make some layers float64, but none that shares its weight; they take any input."""
    weights = [id(layer.weight) for layer in layers]
    for index, layer in enumerate(layers):
        if index in wide and weights.count(id(layer.weight)) == 1:
            layer.double()
        layer.register_forward_pre_hook(lambda layer, x: x[0].to(layer.weight.dtype))


def build(plan):
    torch.manual_seed(3)
    layers = [
        nn.Linear(inputs, outputs, bias)
        for inputs, outputs, bias in zip(
            plan["widths"], plan["widths"][1:], plan["biases"], strict=False
        )
    ]
    shapes = [layer.weight.shape for layer in layers]
    if plan["tied"] and shapes[0] in shapes[1:]:
        layers[0].weight = layers[shapes.index(shapes[0], 1)].weight
    for index in plan["frozen"]:
        if 0 < index < len(layers):
            layers[index].requires_grad_(False)
    widen(layers, plan["wide"])
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.Tanh())))


def compare_drawn_modules(plans):
    digests = []
    for plan in plans:
        ours, alone = DDP(build(plan), plan["bucket_cap_mb"]), build(plan)
        theirs = TorchDDP(build(plan), bucket_cap_mb=plan["bucket_cap_mb"])
        rows = 2 * world_size() * plan["accumulation_steps"]
        for step in range(2):
            generator = torch.Generator().manual_seed(step)
            batch = torch.randn(rows, plan["widths"][0], generator=generator)
            micro_batches = batch.chunk(world_size())[rank()].chunk(plan["accumulation_steps"])
            for model in (ours, theirs):
                for part in micro_batches[:-1]:
                    with model.no_sync():
                        (model(part).square().mean() / len(micro_batches)).backward()
                (model(micro_batches[-1]).square().mean() / len(micro_batches)).backward()
            ours.finish_gradient_sync()
            alone(batch).square().mean().backward()
            assert_close(gradients(ours), gradients(theirs), 1e-6)
            assert_close(gradients(ours), gradients(alone), 1e-6)
        digests.append(fingerprint(gradients(ours)))
    return tuple(digests)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_modules_of_any_shape_train_as_with_torch_ddp(size):
    assert same_on_all_ranks(run_distributed(compare_drawn_modules, size, draw(module_plans, 25)))


def train_tied():
    ddp, alone = DDP(TinyLanguageModel(), 1e-6), TinyLanguageModel()
    for step in range(3):
        batch = tokens(step, rows=2 * world_size())
        language_model_loss(ddp, batch.chunk(world_size())[rank()]).backward()
        ddp.finish_gradient_sync()
        language_model_loss(alone, batch).backward()
        for model in (ddp, alone):
            torch.optim.SGD(model.parameters(), lr=0.5).step()
            model.zero_grad()
    module: Any = ddp.module
    assert module.head.weight is module.embedding.weight
    assert_close(ddp.parameters(), alone.parameters(), 2e-6)
    return sum(len(reducer.bucket.parameters) for reducer in ddp._reducers)


@pytest.mark.parametrize("size", [2, 3])
def test_a_tied_weight_is_sent_once_and_gets_the_sum_of_both_uses(size):
    assert run_distributed(train_tied, size) == [len(list(TinyLanguageModel().parameters()))] * size


class MixedDtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.high = nn.Linear(4, 4).double()
        self.low = nn.Linear(4, 4).bfloat16()
        self.middle = nn.Linear(4, 4)
        self.table = nn.Parameter(torch.arange(4), requires_grad=False)

    def forward(self, x):
        x = self.high(x.double())
        x = self.low(x.bfloat16())
        return self.middle(x.float() + self.table)


def train_mixed_dtypes():
    ours, theirs = DDP(MixedDtypes()), TorchDDP(MixedDtypes())
    for step in range(2):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank()))
        for model in (ours, theirs):
            model(x).square().mean().backward()
        ours.finish_gradient_sync()
        assert_close(gradients(ours), gradients(theirs), 0)
    found = {p.grad.dtype for p in ours.parameters() if p.grad is not None}
    assert found == {torch.float64, torch.bfloat16, torch.float32}
    return fingerprint(gradients(ours))


def test_each_dtype_is_averaged_in_its_own():
    assert same_on_all_ranks(run_distributed(train_mixed_dtypes, 2))


class WithBuffers(nn.Module):
    def __init__(self, value: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3, 2), float(value)))
        self.register_buffer("mask", torch.tensor([value == 0, True]))
        self.register_buffer("count", torch.tensor(value, dtype=torch.int16))
        self.register_buffer("table", torch.full((2,), float(value)), persistent=False)


def start_values():
    module: Any = WithBuffers(rank())
    DDP(module)
    return module.weight.tolist(), module.mask.tolist(), module.count.item(), module.table.tolist()


def test_every_rank_starts_from_the_parameters_and_buffers_of_rank_zero():
    assert run_distributed(start_values, 3) == [([[0, 0]] * 3, [True, True], 0, [0, 0])] * 3


def different_models(what):
    module: Any = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    module.register_buffer("mask", torch.ones(3))
    cap = 25.0
    if rank() == 2:
        if what == "shape":
            module[1] = nn.Linear(4, 5)
        elif what == "dtype":
            module[0].double()
        elif what == "name":
            module[1].weigth, module[1].weight = module[1].weight, None
        elif what == "frozen":
            module[0].bias.requires_grad_(False)
        elif what == "more":
            module.append(nn.Linear(2, 2))
        elif what == "fewer":
            del module[1]
        elif what == "buffer":
            module.register_buffer("mask", torch.ones(4))
        elif what == "tied":
            module[1].bias = nn.Parameter(torch.zeros(2))
            module[1].weight = module[0].weight
        elif what == "cap":
            cap = 1.0
    with pytest.raises(ValueError, match="ranks hold different models") as caught:
        DDP(module, cap)
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "difference"),
    [
        ("shape", "parameter 1.weight (2, 4) {}, rank 2 has parameter 1.weight (5, 4) {}"),
        ("dtype", "parameter 0.weight (4, 3) {}, rank 2 has parameter 0.weight (4, 3) {64}"),
        ("name", "parameter 1.weight (2, 4) {}, rank 2 has parameter 1.bias (2,) {}"),
        ("frozen", "parameter 0.bias (4,) {}, rank 2 has parameter 0.bias (4,) {frozen}"),
        ("more", "buffer mask (3,) torch.float32, rank 2 has parameter 2.weight (2, 2) {}"),
        ("fewer", "parameter 1.weight (2, 4) {}, rank 2 has buffer mask (3,) torch.float32"),
        ("buffer", "buffer mask (3,) torch.float32, rank 2 has buffer mask (4,) torch.float32"),
        ("tied", "parameter 1.weight (2, 4) {}, rank 2 has parameter 1.bias (2,) {}"),
        (
            "cap",
            "buckets of 25.0 MB, the first of 1.0 MB, None on the wire, "
            "rank 2 has buckets of 1.0 MB, the first of 1.0 MB, None on the wire",
        ),
    ],
)
def test_different_models_are_refused_with_the_first_difference_on_every_rank(what, difference):
    kinds = {
        "{}": "torch.float32 requires_grad=True",
        "{64}": "torch.float64 requires_grad=True",
        "{frozen}": "torch.float32 requires_grad=False",
    }
    for short, full in kinds.items():
        difference = difference.replace(short, full)
    message = f"ranks hold different models: where rank 0 has {difference}"
    assert run_distributed(different_models, 3, what) == [message] * 3


def state_dicts():
    module, other = TinyLanguageModel(), TinyLanguageModel(seed=5)
    ddp = DDP(module)
    names = list(ddp.state_dict())
    ddp.load_state_dict(other.state_dict())
    assert_close(module.parameters(), other.parameters(), 0)
    assert module.head.weight is module.embedding.weight
    return names


@pytest.mark.parametrize("size", [1, 2])
def test_the_state_dict_has_no_prefix(size):
    assert run_distributed(state_dicts, size) == [list(TinyLanguageModel().state_dict())] * size


def numbers_of_buckets():
    """Of six layers: to be all-reduced, and to be scattered."""
    caps: Any = {"bucket_cap_mb": ONE_LAYER_MB, "all_reduce_cap_mb": 3 * ONE_LAYER_MB}
    with mock.patch.multiple(SharedMemoryCollectives, **caps):
        by_default, given = DDP(Branches()), DDP(Branches(), ONE_LAYER_MB)
    found = []
    for ddp in (by_default, given):
        found.append(len(ddp._reducers))
        ShardedOptimizer(ddp.parameters(), torch.optim.SGD, ddp=ddp, lr=0.1)
        found.append(len(ddp._reducers))
    return found


def test_what_is_all_reduced_has_buckets_of_its_own_size_unless_one_is_given():
    assert run_distributed(numbers_of_buckets, 2) == [[3, 6, 6, 6]] * 2  # one, three and two


@pytest.mark.parametrize("bucket_cap_mb", [0.0, -1.0])
def test_a_bucket_without_room_is_refused(bucket_cap_mb):
    with pytest.raises(ValueError, match=f"bucket_cap_mb is {bucket_cap_mb}"):
        DDP(nn.Linear(1, 1), bucket_cap_mb)


def test_without_other_processes_ddp_is_the_module_and_nothing_else():
    module = TinyLanguageModel()
    ddp = DDP(module)
    batch = tokens(0, rows=2)
    with ddp.no_sync():
        loss = language_model_loss(ddp, batch)
    assert torch.equal(loss, language_model_loss(module, batch))
    loss.backward()
    before = [p.grad for p in module.parameters()]
    ddp.finish_gradient_sync()
    assert all(p.grad is grad for p, grad in zip(module.parameters(), before, strict=True))


def events_of_backward(order_by_rank, frozen_before=(), frozen=()):
    """What happens in which order: ("gradient", layer) and ("send", bucket)."""
    module = Branches(count=6)
    for index in frozen_before:
        module.layers[index].requires_grad_(False)
    ddp = DDP(module, ONE_LAYER_MB)
    for index, layer in enumerate(module.layers):
        layer.requires_grad_(index not in frozen)
    events: list[tuple[str, int]] = []
    collectives: Any = ddp.collectives
    send = collectives.all_reduce_mean

    def record_and_send(buffer):
        (number,) = [n for n, r in enumerate(ddp._reducers) if r._buffer is buffer]
        events.append(("send", number))
        return send(buffer)

    for index in set(range(6)) - set(frozen):
        module.layers[index].weight.register_post_accumulate_grad_hook(
            lambda _, index=index: events.append(("gradient", index))
        )
    with mock.patch.object(collectives, "all_reduce_mean", record_and_send):
        ddp(torch.ones(2, 5), order_by_rank[rank()]).sum().backward()
        events.append(("end of backward", 0))
        ddp.finish_gradient_sync()
    return events


@pytest.mark.parametrize(
    ("frozen_before", "frozen"),
    [([], []), ([5, 2], [5, 2]), ([5, 2], []), ([], [5, 2])],
    ids=["all trained", "some frozen", "thawed after construction", "frozen after it"],
)
def test_buckets_are_sent_while_backward_is_still_running(frozen_before, frozen):
    for events in run_distributed(events_of_backward, 2, [range(6)] * 2, frozen_before, frozen):
        # Buckets 0 to 4 hold layers 5 to 1. Nothing is sent for what was always frozen.
        asleep = {5 - index for index in set(frozen_before) & set(frozen)}
        assert not asleep & {number for what, number in events if what == "send"}
        for bucket in set(range(5)) - asleep:
            below = max(set(range(5 - bucket)) - set(frozen))
            assert events.index(("send", bucket)) < events.index(("gradient", below))
        assert events[-1] == ("end of backward", 0)


def test_buckets_are_sent_in_one_order_whatever_order_gradients_come_in():
    orders = [[0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0], [3, 0]]
    for events in run_distributed(events_of_backward, 3, orders):
        sent = [event[1] for event in events if event[0] == "send"]
        assert sent == [0, 1, 2, 3, 4, 5]


def sends_in_no_sync():
    ddp = DDP(Branches(), ONE_LAYER_MB)
    sent = []
    with mock.patch.object(ddp.collectives, "all_reduce_mean", lambda buffer: sent.append(buffer)):
        with ddp.no_sync():
            ddp(torch.ones(2, 5), range(6)).sum().backward()
            with ddp.no_sync():
                ddp(torch.ones(2, 5), range(6)).sum().backward()
            ddp(torch.ones(2, 5), range(6)).sum().backward()
        before_sync = len(sent)
        ddp(torch.ones(2, 5), range(6)).sum().backward()
    return before_sync, len(sent)


def test_nothing_is_sent_under_no_sync():
    assert run_distributed(sends_in_no_sync, 2) == [(0, 6)] * 2


def memory_of_gradients():
    ddp = DDP(TinyLanguageModel())
    (reducer,) = ddp._reducers
    for step in range(2):
        with ddp.no_sync():
            language_model_loss(ddp, tokens(step, rows=2)).backward()
        buffer: Any = reducer._buffer
        start, end = buffer.data_ptr(), buffer.data_ptr() + buffer.nbytes
        for is_averaged in (False, True):
            for gradient in [p.grad for p in ddp.parameters()]:
                assert gradient is not None
                assert start <= gradient.data_ptr() <= gradient.data_ptr() + gradient.nbytes <= end
            if not is_averaged:
                language_model_loss(ddp, tokens(step, rows=2)).backward()
                # On its way it is nobody's gradient.
                assert all(p.grad is None for p in ddp.parameters())
                ddp.finish_gradient_sync()


def test_gradients_are_views_of_what_is_sent():
    run_distributed(memory_of_gradients, 2)


class Vectors(nn.Module):
    """One that is small, one that is not, and one that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.Parameter(torch.ones(MOST_OF_A_SMALL_VECTOR))
        self.large = nn.Parameter(torch.ones(MOST_OF_A_SMALL_VECTOR + 1))
        self.unused = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return (self.small * x).sum() + (self.large * x).square().sum()


def places_of_vectors(is_accumulated):
    """Whether the gradients lie in the bucket before it is sent."""
    ddp: Any = DDP(Vectors())
    alone = Vectors()
    (reducer,) = ddp._reducers
    common, own = torch.tensor(3.0), [torch.tensor(5.0), torch.tensor(7.0)]
    if is_accumulated:
        with ddp.no_sync():
            ddp(common).backward()
        alone(common).backward()
    ddp(own[rank()]).backward()  # the unused one holds the bucket back
    buffer: Any = reducer._buffer
    in_buffer = [
        buffer.data_ptr() <= p.grad.data_ptr() < buffer.data_ptr() + buffer.nbytes
        for p in (ddp.module.small, ddp.module.large)
    ]
    ddp.finish_gradient_sync()
    for x in own:
        (alone(x) / 2).backward()
    assert_close(gradients(ddp), gradients(alone), 1e-6)
    return in_buffer


@pytest.mark.parametrize("is_accumulated", [False, True])
def test_small_vectors_move_when_they_are_sent_if_nothing_is_added_before(is_accumulated):
    assert run_distributed(places_of_vectors, 2, is_accumulated) == [[is_accumulated, True]] * 2


def one_storage_for_two():
    """What two vectors get lies in one place; the second backward must not add to it twice."""
    ddp: Any = DDP(nn.ParameterList([torch.ones(3), torch.ones(3)]))
    a, b = ddp.module
    with ddp.no_sync():
        for factor in (1.0, 10.0):
            ((a.view(1, 3) + b.view(1, 3)) * factor).sum().backward()
    ((a.view(1, 3) + b.view(1, 3)) * 100.0).sum().backward()
    ddp.finish_gradient_sync()
    return [p.grad.tolist() for p in (a, b)]


def test_gradients_that_autograd_made_in_one_place_are_added_up_apart():
    assert run_distributed(one_storage_for_two, 2) == [[[111.0] * 3] * 2] * 2


def clipped_step(max_norm):
    """The loop's order: backward, finish_gradient_sync, clip, step."""
    ddp, alone = DDP(TinyLanguageModel(), 1e-6), TinyLanguageModel()
    batch = tokens(0, rows=2 * world_size())
    language_model_loss(ddp, batch.chunk(world_size())[rank()]).backward()
    ddp.finish_gradient_sync()
    norm = nn.utils.clip_grad_norm_(ddp.parameters(), max_norm)
    language_model_loss(alone, batch).backward()
    reference = nn.utils.clip_grad_norm_(alone.parameters(), max_norm)
    torch.testing.assert_close(norm, reference, rtol=2e-6, atol=0)
    assert_close(gradients(ddp), gradients(alone), 1e-6)
    return norm.item()


@pytest.mark.parametrize("size", WORLD_SIZES)
def test_clip_is_taken_after_the_all_reduce(size):
    norms = run_distributed(clipped_step, size, 0.1)
    assert same_on_all_ranks(norms)
    assert norms[0] > 0.1


def clear_gradients(how):
    ddp, alone = DDP(TinyLanguageModel(), 0.001), TinyLanguageModel()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in (ddp, alone)]
    for step in range(3):
        batch = tokens(step, rows=2 * world_size())
        language_model_loss(ddp, batch.chunk(world_size())[rank()]).backward()
        ddp.finish_gradient_sync()
        language_model_loss(alone, batch).backward()
        assert_close(gradients(ddp), gradients(alone), 4e-6)
        for optimizer, model in zip(optimizers, (ddp, alone), strict=True):
            optimizer.step()
            if how == "to none":
                optimizer.zero_grad(set_to_none=True)
            elif how == "to zero":
                optimizer.zero_grad(set_to_none=False)
            elif how == "by the model":
                model.zero_grad()
            elif how == "by hand":
                for p in model.parameters():
                    p.grad = None
            elif how == "replaced":
                for p in model.parameters():
                    p.grad = torch.zeros_like(p)
    return fingerprint(ddp.parameters())


@pytest.mark.parametrize(
    "how", ["to none", "to zero", "by the model", "by hand", "replaced", "not at all"]
)
def test_gradients_may_be_cleared_in_any_way_between_steps(how):
    assert same_on_all_ranks(run_distributed(clear_gradients, 2, how))


def sizes_sent(first_bucket_mb):
    module = Branches(count=6)
    ddp = DDP(module, EVERYTHING_MB, first_bucket_mb)
    collectives: Any = ddp.collectives
    sent = []
    send = collectives.all_reduce_mean

    def record_and_send(buffer):
        sent.append(buffer.numel())
        return send(buffer)

    with mock.patch.object(collectives, "all_reduce_mean", record_and_send):
        ddp(torch.ones(2, 5), range(6)).sum().backward()
        ddp.finish_gradient_sync()
    return sent


def test_the_first_bucket_is_small_so_that_traffic_starts_early():
    assert run_distributed(sizes_sent, 2, 1.0) == [[6 * 30]] * 2
    assert run_distributed(sizes_sent, 2, ONE_LAYER_MB) == [[30, 5 * 30]] * 2
