"""A gradient is written where `grad_memory` says, and is to the bit the one torch would make."""

import contextlib
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from model.linear import Embedding, Linear, grad_memory
from model.loss import head_loss
from tests.model.small_models import lively_model, random_ids

IDS = torch.tensor([[3, 0, 3], [4, 4, 4]])  # some stand several times, some not at all


def linear(is_plain: bool) -> tuple[Any, Tensor]:
    layer = (nn.Linear if is_plain else Linear)(7, 5)
    return layer, torch.randn(3, 7)


def embedding(is_plain: bool) -> tuple[Any, Tensor]:
    return (nn.Embedding if is_plain else Embedding)(6, 4), IDS


class Head(nn.Module):
    """Features and a head's loss."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(11, 7))

    def forward(self, features: Tensor) -> Tensor:
        return head_loss(features, self.weight, torch.arange(3) * 4)


def head(is_plain: bool) -> tuple[Any, Tensor]:
    return Head(), torch.randn(3, 7)


class Places:
    """A `grad_memory` that lends one place, once."""

    def __init__(self, weight: Tensor) -> None:
        self.place: Tensor | None = torch.full_like(weight, torch.nan)
        self.address = self.place.data_ptr()
        self.asked = 0

    def __call__(self, weight: Tensor) -> Tensor | None:
        self.asked += 1
        place, self.place = self.place, None
        return place


def backward_of(make: Any, is_plain: bool, dtype: torch.dtype, places: bool) -> tuple[Any, Any]:
    torch.manual_seed(0)
    layer, x = make(is_plain)
    lender = None
    if places:
        layer.weight.grad_memory = lender = Places(layer.weight)
    for _ in range(2):  # the second finds a gradient there, to be added to
        with contextlib.nullcontext() if dtype == torch.float32 else torch.autocast("cpu", dtype):
            out = layer(x)
        out.float().square().sum().backward()
    return layer.weight.grad, lender


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("make", [linear, embedding, head])
def test_the_gradient_is_torchs_wherever_it_is_written(make, dtype):
    expected, _ = backward_of(make, True, dtype, places=False)
    assert torch.equal(backward_of(make, False, dtype, places=False)[0], expected)
    found, lender = backward_of(make, False, dtype, places=True)
    assert torch.equal(found, expected)
    if make is linear and dtype == torch.float32:
        return  # torch's own product makes this one
    assert lender.asked == 2
    # Autograd has taken it as it is, without a copy.
    assert found.data_ptr() == lender.address


@pytest.mark.parametrize("make", [linear, embedding, head])
def test_a_gradient_that_somebody_else_sees_lies_in_no_place(make):
    layer, x = make(False)
    layer.weight.grad_memory = lender = Places(layer.weight)

    def loss() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return layer(x).float().square().sum()

    torch.autograd.grad(loss(), layer.weight)
    seen: list[Tensor] = []
    hook = layer.weight.register_hook(seen.append)
    loss().backward()
    hook.remove()
    layer.weight.grad = None
    hook = torch.autograd.graph.register_multi_grad_hook([layer.weight], seen.append)
    loss().backward()
    hook.remove()
    layer.weight.grad = None
    other = torch.zeros((), requires_grad=True)
    (loss() + other).backward(inputs=[other])
    assert len(seen) == 2
    assert lender.asked == 0
    loss().backward()
    assert lender.asked == 1


def test_what_autocast_leaves_alone_is_left_alone():
    pairs: Any = ((Linear(4, 4).double(), torch.randn(3, 4).double()), embedding(False))
    for layer, x in pairs:
        layer.weight.grad_memory = Places(layer.weight)
        with torch.autocast("cpu", torch.bfloat16):
            assert layer(x).dtype == layer.weight.dtype
    assert Linear(4, 3, device="meta")(torch.randn(2, 4, device="meta")).shape == (2, 3)


@pytest.mark.parametrize(
    ("ids", "options", "dtype"),
    [
        (torch.tensor(3), {}, torch.float32),
        (IDS[:, :0], {}, torch.float32),
        (IDS, {"padding_idx": 3}, torch.float32),
        (IDS, {"scale_grad_by_freq": True}, torch.float32),
        (IDS.repeat(50, 1), {}, torch.bfloat16),
    ],
)
def test_an_embedding_of_any_kind_has_torchs_gradient(ids, options, dtype):
    def gradient(kind: type[nn.Embedding]) -> Tensor:
        torch.manual_seed(0)
        layer: Any = kind(6, 4, dtype=dtype, **options)
        layer.weight.grad_memory = Places(layer.weight)
        layer(ids).float().square().sum().backward()
        return layer.weight.grad

    assert torch.equal(gradient(Embedding), gradient(nn.Embedding))


def test_a_map_that_is_used_twice_gets_the_sum():
    layer: Any = Linear(4, 4)
    layer.weight.grad_memory = Places(layer.weight)
    first: Any = nn.Linear(4, 4)
    second: Any = nn.Linear(4, 4)
    for twin in (first, second):
        twin.load_state_dict(layer.state_dict())
    x = torch.randn(3, 4)
    with torch.autocast("cpu", torch.bfloat16):
        out, expected = layer(layer(x)), second(first(x))
    for result in (out, expected):
        result.float().square().sum().backward()
    assert torch.equal(layer.weight.grad, first.weight.grad + second.weight.grad)
    assert layer.weight.grad_memory.asked == 2


@pytest.mark.parametrize("activation_checkpointing", [False, True])
@pytest.mark.parametrize("tie_weights", [False, True])
def test_a_models_gradients_are_the_same_with_places_for_all(tie_weights, activation_checkpointing):
    def gradients(is_placed: bool) -> list[Any]:
        model: Any = lively_model(tie_weights=tie_weights).train()
        model.activation_checkpointing = activation_checkpointing
        lenders = []
        if is_placed:
            for parameter in model.parameters():
                parameter.grad_memory = Places(parameter)
                lenders.append(parameter.grad_memory)
        ids = random_ids(2, 9, seed=0)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(ids[:, :-1], ids[:, 1:])
        loss.backward()
        if is_placed:  # every matrix's but no gain's
            assert sum(lender.asked > 0 for lender in lenders) == 10 - tie_weights
        return [parameter.grad for parameter in model.parameters()]

    for placed, plain in zip(gradients(True), gradients(False), strict=True):
        assert torch.equal(placed, plain)


@pytest.mark.parametrize("make", [linear, embedding])
def test_a_backward_that_is_differentiated_itself_is_torchs(make):
    def second(is_plain: bool) -> Tensor:
        torch.manual_seed(0)
        layer, x = make(is_plain)
        if not is_plain:
            layer.weight.grad_memory = Places(layer.weight)
        with torch.autocast("cpu", torch.bfloat16):
            out = layer(x)
        (first,) = torch.autograd.grad(out.float().pow(3).sum(), layer.weight, create_graph=True)
        if not is_plain:  # of what is differentiated again nothing is written elsewhere
            assert layer.weight.grad_memory.place is not None
        first.square().sum().backward()
        return layer.weight.grad

    assert torch.equal(second(False), second(True))


def test_without_a_place_there_is_none_and_the_layers_are_torchs():
    weight = nn.Parameter(torch.ones(2, 2))
    assert grad_memory(weight, None) is None
    assert pickle.loads(pickle.dumps(Linear(2, 3).state_dict())).keys() == {"weight", "bias"}
    with torch.autocast("cpu", torch.bfloat16):
        layer = Linear(2, 3)
        out = layer(torch.ones(1, 2))
        assert "Narrow" not in type(out.grad_fn.next_functions[0][0]).__name__
