"""Head and loss in chunks against torch's head and loss in one piece."""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from model import loss as loss_module
from model.loss import head_loss

IGNORED = -100


@pytest.fixture(autouse=True, params=[7 * 50, 10**9], ids=["chunks", "one piece"])
def chunk_elements(request):
    """Seven tokens at a time, the last chunk smaller; or all at once."""
    elements = {"cpu": request.param, "cuda": 1}
    with mock.patch.multiple(loss_module, CHUNK_ELEMENTS=elements, FEWEST_TOKENS=1):
        yield


def make_case(ignored: float = 0.0, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Features (4, 6, 16), a weight (50, 16) and targets (4, 6)."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(4, 6, 16, generator=generator)
    weight = torch.randn(50, 16, generator=generator)
    targets = torch.randint(0, 50, (4, 6), generator=generator)
    targets[torch.rand(4, 6, generator=generator) < ignored] = IGNORED
    return [features.to(dtype), weight.to(dtype), targets]


def plain(features: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    logits = features @ weight.T
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def with_gradients(function, features, weight, targets, factor=0.7):
    features = features.clone().requires_grad_()
    weight = weight.clone().requires_grad_()
    loss = function(features, weight, targets)
    (loss * factor).backward()
    return loss.detach(), features.grad, weight.grad


@pytest.mark.parametrize("ignored", [0.0, 0.4])
def test_loss_and_gradients_are_those_of_the_plain_way(ignored):
    case = make_case(ignored)
    for ours, theirs in zip(
        with_gradients(head_loss, *case), with_gradients(plain, *case), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_without_a_target_that_counts_it_is_nan_and_moves_nothing():
    loss, grad_features, grad_weight = with_gradients(head_loss, *make_case(1.1))
    assert loss.isnan()
    assert not grad_features.any()
    assert not grad_weight.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_products_are_narrow_and_gradients_wide(dtype):
    features, weight, targets = make_case()
    with torch.autocast("cpu", dtype):
        loss, grad_features, grad_weight = with_gradients(head_loss, features, weight, targets)
        expected = with_gradients(plain, features, weight, targets)
    assert (loss.dtype, grad_features.dtype, grad_weight.dtype) == (torch.float32,) * 3
    exact = with_gradients(plain, features.double(), weight.double(), targets)
    for ours, theirs, reference in zip(
        (loss, grad_features, grad_weight), expected, exact, strict=True
    ):
        error = (ours.double() - reference).norm() / reference.norm()
        assert error < 0.01
        assert error < 1.5 * (theirs.double() - reference).norm() / reference.norm() + 1e-6


def test_a_small_mean_does_not_vanish_in_float16():
    """Divided by the number of tokens before it is narrowed, the gradient would be 0."""
    torch.manual_seed(0)
    features, weight = torch.randn(1, 30_000, 2) * 1e-3, torch.randn(50, 2)
    targets = torch.randint(0, 50, (1, 30_000))
    with torch.autocast("cpu", torch.float16):
        _, grad_features, _ = with_gradients(head_loss, features, weight, targets, 1e-2)
    exact = with_gradients(plain, features.double(), weight.double(), targets, 1e-2)[1]
    assert (grad_features - exact).norm() < 0.01 * exact.norm()


@pytest.mark.parametrize("frozen", [0, 1])
def test_what_is_frozen_gets_no_gradient(frozen):
    features, weight, targets = make_case()
    (features, weight)[1 - frozen].requires_grad_()
    head_loss(features, weight, targets).backward()
    assert (features, weight)[frozen].grad is None
    assert (features, weight)[1 - frozen].grad is not None


def test_weights_of_16_bits_have_gradients_of_16_bits():
    case = make_case(dtype=torch.bfloat16)
    for ours, theirs in zip(
        with_gradients(head_loss, *case), with_gradients(plain, *case), strict=True
    ):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.02)


def test_a_head_that_is_also_the_embedding_adds_both_gradients():
    _, weight, targets = make_case()
    grads = []
    for function in (head_loss, plain):
        tied = weight.clone().requires_grad_()
        function(F.embedding(targets, tied), tied, targets.roll(1)).backward()
        grads.append(tied.grad)
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-5, atol=1e-6)


def test_without_gradients_it_is_the_same_loss():
    features, weight, targets = make_case()
    loss = head_loss(features, weight, targets)
    torch.testing.assert_close(loss, plain(features, weight, targets))
    assert not loss.requires_grad
