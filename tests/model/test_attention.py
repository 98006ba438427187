"""Attention against a loop over positions in float64, and its cache against no cache."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from model import attention as attention_module
from model.attention import MAX_SHORT_SEQ, Attention, KeyValueCache, ShortAttention, is_short
from model.layers import RotaryEmbedding
from tests.model.small_models import small_config

SEQ = 20


def make_attention(num_kv_heads: int = 2, qk_norm: bool = True) -> Attention:
    attention = Attention(small_config(num_kv_heads=num_kv_heads, qk_norm=qk_norm), layer=0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in attention.parameters():
            # Large enough that the softmax is far from uniform.
            if parameter.dim() == 2:
                parameter.normal_(std=0.4, generator=generator)
            else:
                parameter.uniform_(0.5, 1.5, generator=generator)
    return attention.requires_grad_(False)


def make_input(batch: int = 2, seq: int = SEQ) -> Tensor:
    return torch.randn(batch, seq, 32, generator=torch.Generator().manual_seed(3))


def angles_at(positions: Tensor) -> tuple[Tensor, Tensor]:
    return RotaryEmbedding(head_dim=8, max_seq_len=32).at(positions)


def attend_in_loops(attention: Attention, x: Tensor) -> Tensor:
    """The definition, one query at a time."""
    heads, kv_heads, width = attention.num_heads, attention.num_kv_heads, attention.head_dim

    def normalised(vector: Tensor, norm) -> Tensor:
        if norm is None:
            return vector
        return vector / (vector.square().mean() + norm.eps).sqrt() * norm.weight.double()

    def turned(vector: Tensor, position: int) -> Tensor:
        half = width // 2
        angle = position / 10000.0 ** (torch.arange(half, dtype=torch.float64) / half)
        pairs = torch.complex(vector[:half], vector[half:])
        pairs = pairs * torch.polar(torch.ones_like(angle), angle)
        return torch.cat((pairs.real, pairs.imag))

    def vectors(rows: Tensor, count: int) -> list[list[Tensor]]:
        return [list(row.view(count, width)) for row in rows]

    output = torch.zeros(x.shape, dtype=torch.float64)
    for b, sequence in enumerate(x.double()):
        projected = sequence @ attention.qkv.weight.double().T
        parts = projected.split([heads * width, kv_heads * width, kv_heads * width], dim=-1)
        queries, keys, values = map(vectors, parts, (heads, kv_heads, kv_heads))
        for q in range(len(sequence)):
            mixed = []
            for head in range(heads):
                group = head // (heads // kv_heads)
                query = turned(normalised(queries[q][head], attention.query_norm), q)
                scores = torch.stack(
                    [
                        query @ turned(normalised(keys[k][group], attention.key_norm), k)
                        for k in range(q + 1)
                    ]
                )
                weights = (scores / width**0.5).exp()
                weights /= weights.sum()
                mixed.append(sum(w * values[k][group] for k, w in enumerate(weights)))
            output[b, q] = torch.cat(mixed) @ attention.output.weight.double().T
    return output


@pytest.mark.parametrize("qk_norm", [True, False])
@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
def test_attention_is_a_softmax_over_the_past_of_each_query(num_kv_heads, qk_norm):
    attention, x = make_attention(num_kv_heads, qk_norm), make_input(batch=1, seq=9)
    result = attention(x, angles_at(torch.arange(9)))
    torch.testing.assert_close(result.double(), attend_in_loops(attention, x), rtol=0, atol=2e-5)


def test_a_later_input_changes_no_earlier_output():
    attention, x = make_attention(), make_input()
    before = attention(x, angles_at(torch.arange(SEQ)))
    x[:, 11] += 1.0
    after = attention(x, angles_at(torch.arange(SEQ)))
    torch.testing.assert_close(before[:, :11], after[:, :11], rtol=0, atol=1e-6)
    assert (before[:, 11:] - after[:, 11:]).abs().amin(dim=-1).max() > 1e-4


def read_in_pieces(attention: Attention, x: Tensor, pieces: list[int], cache) -> Tensor:
    """Feed a batch piece by piece, each query masked to the entries up to its own position."""
    outputs, start = [], 0
    for length in pieces:
        positions = torch.arange(start, start + length).expand(len(x), length)
        mask = torch.arange(start + length) <= positions[:, None, :, None]
        piece = x[:, start : start + length]
        outputs.append(attention(piece, angles_at(positions), cache, positions, mask))
        start += length
    return torch.cat(outputs, dim=1)


def empty_cache(batch: int, num_kv_heads: int = 2) -> KeyValueCache:
    config = small_config(num_kv_heads=num_kv_heads)
    return KeyValueCache(config, batch, torch.device("cpu"), torch.float32)


@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
@pytest.mark.parametrize("pieces", [[1] * SEQ, [7, 1, 1, 5, 6], [19, 1]])
def test_reading_through_the_cache_in_pieces_equals_reading_at_once(pieces, num_kv_heads):
    attention, x = make_attention(num_kv_heads), make_input()
    at_once = attention(x, angles_at(torch.arange(SEQ)))
    in_pieces = read_in_pieces(attention, x, pieces, empty_cache(2, num_kv_heads))
    torch.testing.assert_close(in_pieces, at_once, rtol=0, atol=1e-5)


def test_what_lies_in_the_cache_beyond_a_row_is_never_read():
    attention, x = make_attention(), make_input()
    clean, dirty = empty_cache(2), empty_cache(2)
    for tensors in (dirty.keys, dirty.values):
        tensors[0].fill_(1e4)
    pieces = [6, 1, 1, 1]
    assert torch.equal(
        read_in_pieces(attention, x, pieces, clean), read_in_pieces(attention, x, pieces, dirty)
    )


def test_rows_of_a_batch_may_stand_at_different_positions():
    attention, x = make_attention(), make_input()
    alone = attention(x, angles_at(torch.arange(SEQ)))
    cache = empty_cache(2)
    # Row 0 has 10 tokens and goes on at position 10. Row 1 has 4, filled up with something else.
    filled = x.clone()
    filled[1, 4:] = 1.0
    read_in_pieces(attention, filled, [10], cache)
    positions = torch.tensor([[10], [4]])
    newest = torch.stack((x[0, 10:11], x[1, 4:5]))
    mask = torch.arange(11) <= positions[:, None, :, None]
    result = attention(newest, angles_at(positions), cache, positions, mask)
    torch.testing.assert_close(result[0, 0], alone[0, 10], rtol=0, atol=1e-5)
    torch.testing.assert_close(result[1, 0], alone[1, 4], rtol=0, atol=1e-5)


def test_cache_holds_one_copy_per_key_value_head():
    cache = empty_cache(batch=3, num_kv_heads=1)
    assert len(cache.keys) == len(cache.values) == 2  # layers
    assert {tensor.shape for tensor in cache.keys + cache.values} == {(3, 1, 32, 8)}


def attend_plainly(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(queries, keys, values, is_causal=True)


def output_and_gradients(attend, dtype: torch.dtype, sharpness: float, seq: int) -> list[Tensor]:
    """Of causal attention over bf16 numbers, computed in `dtype`; as float64."""
    generator = torch.Generator().manual_seed(5)
    drawn = [torch.randn(2, 3, seq, 16, generator=generator) for _ in range(4)]
    drawn[0] *= sharpness
    *inputs, towards = (x.bfloat16().to(dtype) for x in drawn)
    for x in inputs:
        x.requires_grad_()
    output = attend(*inputs)
    return [x.double() for x in (output.detach(), *torch.autograd.grad(output, inputs, towards))]


def relative_errors(results: list[Tensor], exact: list[Tensor]) -> list[float]:
    return [((a - b).norm() / b.norm()).item() for a, b in zip(results, exact, strict=True)]


@pytest.mark.parametrize("sharpness", [1.0, 6.0])
@pytest.mark.parametrize("seq", [1, 37, 128])
def test_short_attention_in_fp32_is_torchs_attention(seq, sharpness):
    expected = output_and_gradients(attend_plainly, torch.float32, sharpness, seq)
    result = output_and_gradients(ShortAttention.apply, torch.float32, sharpness, seq)
    for a, b in zip(result, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sharpness", [1.0, 6.0])
def test_short_attention_in_bf16_is_as_exact_as_torchs(sharpness):
    exact = output_and_gradients(attend_plainly, torch.float64, sharpness, 128)
    theirs = output_and_gradients(attend_plainly, torch.bfloat16, sharpness, 128)
    with torch.autocast("cpu", torch.bfloat16):  # must not narrow the scores
        ours = output_and_gradients(ShortAttention.apply, torch.bfloat16, sharpness, 128)
    for our_error, their_error in zip(
        relative_errors(ours, exact), relative_errors(theirs, exact), strict=True
    ):
        assert our_error < 1.5 * their_error


@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
def test_training_in_bf16_with_short_attention_gives_the_gradients_of_torchs(
    num_kv_heads, monkeypatch
):
    attention = make_attention(num_kv_heads).requires_grad_()

    def gradients() -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            output = attention(make_input(), angles_at(torch.arange(SEQ)))
        return list(torch.autograd.grad(output.square().mean(), list(attention.parameters())))

    calls = []

    def is_short_and_seen(queries: Tensor) -> bool:
        calls.append(is_short(queries))
        return calls[-1]

    monkeypatch.setattr(attention_module, "is_short", is_short_and_seen)
    result = gradients()
    assert calls == [True]
    monkeypatch.setattr(attention_module, "is_short", lambda queries: False)
    for a, b in zip(result, gradients(), strict=True):
        assert (a - b).norm() < 0.02 * b.norm()  # bf16 has 8 bits


def test_short_attention_is_for_training_in_bf16_on_the_cpu():
    def queries(
        seq: int = MAX_SHORT_SEQ, dtype=torch.bfloat16, requires_grad=True, device="cpu"
    ) -> Tensor:
        shape = (1, 1, seq, 8)
        return torch.empty(shape, dtype=dtype, requires_grad=requires_grad, device=device)

    assert is_short(queries())
    assert not is_short(queries(seq=MAX_SHORT_SEQ + 1))
    assert not is_short(queries(dtype=torch.float32))
    assert not is_short(queries(requires_grad=False))
    assert not is_short(queries(device="meta"))
