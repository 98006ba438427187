"""Clipping against torch's, and where ours must differ from it."""

import math

import pytest
import torch
from torch import nn

from optim.clip import clip_grad_norm, clip_grads_with_norm, total_grad_norm

SHAPES = [(33, 17), (64,), (), (0,), (2, 3, 4, 5), (1000, 7)]


def make_params(dtype=torch.float32, size=1.0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES]
    for param in params:
        param.grad = (torch.randn(param.shape, generator=generator) * size).to(dtype)
    return [*params, nn.Parameter(torch.zeros(3, dtype=dtype))]  # the last has no gradient


def gradients(params: list[nn.Parameter]) -> list[torch.Tensor]:
    return [param.grad for param in params if param.grad is not None]


@pytest.mark.parametrize("size", [1e-4, 1.0, 1e4])
@pytest.mark.parametrize("max_norm", [1e-3, 0.1, 1.0, 50.0])
def test_clipping_is_that_of_torch_to_the_last_bit(size, max_norm):
    ours, theirs = make_params(size=size), make_params(size=size)
    norm = clip_grad_norm(ours, max_norm)
    wanted = nn.utils.clip_grad_norm_(theirs, max_norm)
    assert torch.equal(norm, wanted)
    for a, b in zip(gradients(ours), gradients(theirs), strict=True):
        assert torch.equal(a, b)


def test_norm_before_clipping_is_returned_and_norm_after_is_the_limit():
    params = make_params()
    norm = clip_grad_norm(params, 0.5)
    assert norm > 50
    assert total_grad_norm(params).item() == pytest.approx(0.5, rel=1e-6)


def test_gradients_below_the_limit_are_left_alone():
    params, untouched = make_params(), make_params()
    clip_grad_norm(params, 1e6)
    for a, b in zip(gradients(params), gradients(untouched), strict=True):
        assert torch.equal(a, b)


def test_infinite_limit_measures_and_changes_nothing():
    params, untouched = make_params(), make_params()
    assert torch.equal(clip_grad_norm(params, math.inf), total_grad_norm(untouched))
    for a, b in zip(gradients(params), gradients(untouched), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("max_norm", [0.5, 1e6, math.inf])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_scaled_gradients_are_unscaled_before_they_are_measured(max_norm, as_tensor):
    scaled, plain = make_params(size=1024.0), make_params()
    norm = clip_grad_norm(scaled, max_norm, torch.tensor(1024.0) if as_tensor else 1024.0)
    torch.testing.assert_close(norm, clip_grad_norm(plain, max_norm))
    for a, b in zip(gradients(scaled), gradients(plain), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("max_norm", [0.0, -1.0, math.nan])
def test_limit_that_is_not_above_zero_is_refused(max_norm):
    with pytest.raises(ValueError, match=f"max_norm {max_norm}"):
        clip_grad_norm(make_params(), max_norm)


def test_parameter_given_twice_counts_once_and_is_scaled_once():
    params = make_params()
    norm = clip_grad_norm([*params, params[0], params[-2]], 0.5)
    assert torch.equal(norm, total_grad_norm(make_params()))
    assert total_grad_norm(params).item() == pytest.approx(0.5, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_gradients_are_measured_and_scaled_in_float32(dtype):
    params = make_params(dtype=dtype)
    exact = [grad.float() for grad in gradients(params)]
    norm = clip_grad_norm(params, 0.7)
    wanted = torch.linalg.vector_norm(torch.cat([grad.flatten() for grad in exact]))
    assert norm.dtype == torch.float32
    torch.testing.assert_close(norm, wanted, rtol=1e-6, atol=0.0)
    for clipped, before in zip(gradients(params), exact, strict=True):
        assert torch.equal(clipped, (before * (0.7 / (norm + 1e-6))).to(dtype))


def test_float16_gradients_whose_squares_overflow_are_clipped():
    param = nn.Parameter(torch.zeros(4, dtype=torch.float16))
    param.grad = torch.full((4,), 60000.0, dtype=torch.float16)
    assert clip_grad_norm([param], 1.0).item() == 120000.0
    assert param.grad.tolist() == [0.5] * 4


def test_gradients_of_several_types_share_one_norm():
    params = [*make_params(), *make_params(torch.bfloat16), *make_params(torch.float64)]
    flat = torch.cat([grad.double().flatten() for grad in gradients(params)])
    norm = clip_grad_norm(params, 0.5)
    assert norm.item() == pytest.approx(flat.norm().item(), rel=1e-6)
    assert total_grad_norm(params).item() == pytest.approx(0.5, rel=1e-3)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_norm_that_is_not_finite_is_returned_and_gradients_stay(bad):
    params = make_params()
    gradients(params)[1][5] = bad
    before = [grad.clone() for grad in gradients(params)]
    assert not torch.isfinite(clip_grad_norm(params, 1.0))
    for a, b in zip(gradients(params), before, strict=True):
        assert torch.equal(a.nan_to_num(nan=7.0), b.nan_to_num(nan=7.0))


def test_without_gradients_the_norm_is_zero():
    assert clip_grad_norm([nn.Parameter(torch.zeros(3))], 1.0).item() == 0.0
    assert clip_grad_norm([], 1.0).item() == 0.0


def test_gradients_of_zero_stay_zero():
    param = nn.Parameter(torch.zeros(3))
    param.grad = torch.zeros(3)
    assert clip_grad_norm([param], 1.0).item() == 0.0
    assert param.grad.tolist() == [0.0] * 3


def test_single_parameter_and_generator_are_accepted():
    params = make_params()
    assert clip_grad_norm(params[0], 1.0) == total_grad_norm(make_params()[:1])
    params = make_params()
    clip_grad_norm((param for param in params), 1.0)
    assert total_grad_norm(params).item() == pytest.approx(1.0, rel=1e-6)


def test_pieces_clipped_with_the_norm_of_all_equal_the_whole_clipped():
    whole, pieces = make_params(), make_params()
    halves = [pieces[:3], pieces[3:]]
    norm = torch.stack([total_grad_norm(half) ** 2 for half in halves]).sum().sqrt()
    for half in halves:
        clip_grads_with_norm(half, 0.5, norm)
    torch.testing.assert_close(clip_grad_norm(whole, 0.5), norm, rtol=1e-6, atol=0.0)
    for a, b in zip(gradients(pieces), gradients(whole), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=0.0)


def test_clipping_reads_nothing_back_from_the_device():
    """The meta device has no values: whatever asks for one, and would wait for a GPU, raises."""
    param = nn.Parameter(torch.empty(5, device="meta"))
    param.grad = torch.empty(5, device="meta")
    assert clip_grad_norm([param], 1.0).is_meta
