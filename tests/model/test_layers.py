"""Norm, rotary positions and feed-forward against torch and against float64 formulas."""

import pytest
import torch
from torch import Tensor

from model.layers import RMSNorm, RotaryEmbedding, SwiGLU, rotate


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def norm_with_weights(width: int, eps: float = 1e-6) -> RMSNorm:
    norm = RMSNorm(width, eps)
    torch.nn.init.uniform_(norm.weight, 0.5, 1.5, torch.Generator().manual_seed(1))
    return norm


@pytest.mark.parametrize("size", [1e-4, 1.0, 1e4])
@pytest.mark.parametrize("eps", [1e-6, 1e-2])
def test_rms_norm_and_its_gradients_are_those_of_torch(size, eps):
    ours, theirs = norm_with_weights(24, eps), torch.nn.RMSNorm(24, eps)
    theirs.load_state_dict(ours.state_dict())
    x = (normal(3, 5, 24) * size).requires_grad_()
    y = x.detach().clone().requires_grad_()
    towards = normal(3, 5, 24, seed=2)
    (ours(x) * towards).sum().backward()
    (theirs(y) * towards).sum().backward()
    torch.testing.assert_close(ours(x), theirs(y), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(x.grad, y.grad, rtol=2e-6, atol=2e-6 / size)
    torch.testing.assert_close(ours.weight.grad, theirs.weight.grad, rtol=2e-6, atol=2e-6)


def norm_in_plain_operations(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2**-8)])
def test_rms_norm_of_heads_has_the_gradients_of_autograd(dtype, tolerance):
    norm = norm_with_weights(24)
    # As in attention: heads before positions, so that rows do not follow each other in memory.
    x = normal(2, 7, 3, 24).to(dtype).transpose(1, 2).requires_grad_()
    y = x.detach().clone().requires_grad_()
    weight = norm.weight.detach().clone().requires_grad_()
    towards = normal(2, 3, 7, 24, seed=2).to(dtype)
    result, expected = norm(x), norm_in_plain_operations(y, weight, norm.eps)
    torch.testing.assert_close(result, expected, rtol=tolerance, atol=2e-6)
    result.backward(towards)
    expected.backward(towards)
    torch.testing.assert_close(x.grad, y.grad, rtol=tolerance, atol=2e-6)
    torch.testing.assert_close(norm.weight.grad, weight.grad, rtol=2e-6, atol=2e-6)


def test_rms_norm_of_bf16_is_the_exact_result_rounded_once():
    norm = norm_with_weights(4096)
    x = (normal(8, 4096) * 3).bfloat16()
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight
    result = norm(x)
    assert result.dtype == torch.bfloat16
    # Half a unit in the last of bf16's 8 bits: only the last rounding may show.
    assert ((result.double() - exact) / exact).abs().max() < 2**-8 * 1.01


def test_rotary_turns_pairs_of_the_two_halves_as_complex_numbers():
    head_dim, seq, theta = 16, 40, 500.0
    x = normal(2, 3, seq, head_dim)
    turned = rotate(x, *RotaryEmbedding(head_dim, seq, theta).at(torch.arange(seq)))
    pairs = torch.complex(x[..., : head_dim // 2].double(), x[..., head_dim // 2 :].double())
    wavelengths = theta ** (torch.arange(head_dim // 2, dtype=torch.float64) * 2 / head_dim)
    angles = torch.arange(seq, dtype=torch.float64)[:, None] / wavelengths
    expected = pairs * torch.polar(torch.ones_like(angles), angles)
    torch.testing.assert_close(
        turned.double(), torch.cat((expected.real, expected.imag), -1), rtol=0, atol=1e-6
    )


def test_rotary_angles_are_exact_at_far_positions():
    # An angle kept in fp32 would be wrong in the fourth digit at these positions.
    position, head_dim = 32767, 8
    cos, sin = RotaryEmbedding(head_dim, position + 1).at(torch.tensor([position]))
    angles = position / 10000.0 ** (torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.cat((angles, angles))
    torch.testing.assert_close(cos[0, 0].double(), angles.cos(), rtol=0, atol=1e-7)
    torch.testing.assert_close(sin[0, 0].double(), angles.sin(), rtol=0, atol=1e-7)


def test_turned_queries_and_keys_know_only_their_distance():
    rotary = RotaryEmbedding(8, 64)
    query, key = normal(1, 1, 1, 8), normal(1, 1, 1, 8, seed=1)

    def product(query_position: int, key_position: int) -> float:
        turned = [
            rotate(x, *rotary.at(torch.tensor([p])))
            for x, p in ((query, query_position), (key, key_position))
        ]
        return (turned[0] * turned[1]).sum().item()

    assert product(12, 5) == pytest.approx(product(60, 53), abs=1e-5)
    assert product(12, 5) != pytest.approx(product(12, 6), abs=1e-2)


def test_each_row_of_a_batch_is_turned_by_its_own_positions():
    rotary = RotaryEmbedding(8, 64)
    x = normal(2, 3, 4, 8)
    positions = torch.tensor([[0, 1, 2, 3], [7, 30, 9, 63]])
    together = rotate(x, *rotary.at(positions))
    for row in range(2):
        assert torch.equal(together[row], rotate(x[row : row + 1], *rotary.at(positions[row]))[0])


def test_what_is_rotated_is_contiguous_and_at_least_float32():
    angles = RotaryEmbedding(8, 4).at(torch.arange(4))
    for dtype, expected in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        x = normal(2, 4, 3, 8).to(dtype).transpose(1, 2)
        turned = rotate(x, *angles)
        assert turned.dtype == expected
        assert turned.is_contiguous()
        wide = x.to(expected).contiguous()
        torch.testing.assert_close(turned, rotate(wide, *angles), rtol=0, atol=0)


def test_the_gradient_of_a_rotation_is_that_of_autograd():
    def plainly(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-second, first), dim=-1) * sin

    angles = RotaryEmbedding(8, 16).at(torch.tensor([[3, 4, 5], [0, 9, 15]]))
    x = normal(2, 3, 4, 8).transpose(1, 2)[:, :, :3].requires_grad_()
    y = x.detach().clone().requires_grad_()
    towards = normal(2, 4, 3, 8, seed=2)
    rotate(x, *angles).backward(towards)
    plainly(y, *angles).backward(towards)
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-6, atol=1e-6)


def test_a_gradient_of_16_bits_goes_back_to_16_bit_heads():
    x = normal(2, 4, 3, 8).bfloat16().requires_grad_()
    rotate(x, *RotaryEmbedding(8, 4).at(torch.arange(3))).sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.bfloat16


def test_rotary_tables_are_not_in_the_state_dict():
    assert not RotaryEmbedding(8, 4).state_dict()


def test_feed_forward_is_the_gated_formula():
    layer = SwiGLU(12, 20)
    x = normal(2, 3, 12)
    gate, up = layer.gate_up.weight.double().split(20)
    x64 = x.double()
    gated = x64 @ gate.T
    expected = (gated / (1 + (-gated).exp()) * (x64 @ up.T)) @ layer.down.weight.double().T
    torch.testing.assert_close(layer(x).double(), expected, rtol=0, atol=1e-6)
