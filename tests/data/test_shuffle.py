"""Random numbers and orders by position."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from data.shuffle import random_below, random_bits, shuffled


@given(size=st.integers(1, 3000), key=st.integers(0, 2**64 - 1))
def test_shuffled_is_a_bijection(size, key):
    assert np.array_equal(np.sort(shuffled(np.arange(size), size, key)), np.arange(size))


@given(position=st.integers(0, 10**12 - 1), key=st.integers(0, 2**64 - 1))
def test_shuffled_stays_within_a_range_that_would_never_fit_into_memory(position, key):
    assert 0 <= shuffled(np.array([position]), 10**12, key)[0] < 10**12


def test_every_order_of_few_elements_comes_up_about_equally_often():
    orders = shuffled(np.tile(np.arange(4), (6000, 1)), 4, np.arange(6000)[:, None])
    counts = np.unique(orders @ [64, 16, 4, 1], return_counts=True)[1]
    assert len(counts) == 24
    assert counts.min() > 250 * 0.7
    assert counts.max() < 250 * 1.3


def test_keys_and_neighbours_are_unrelated():
    size = 10_000
    one, other = (shuffled(np.arange(size), size, key) for key in (1, 2))
    for first, second in ((one, other), (one, np.arange(size)), (one[1:], one[:-1])):
        assert abs(np.corrcoef(first, second)[0, 1]) < 0.04


def test_each_position_can_have_a_key_of_its_own():
    positions, keys = np.array([3, 3, 7]), np.array([1, 2, 2])
    one_by_one = [shuffled(positions[i : i + 1], 50, int(keys[i]))[0] for i in range(3)]
    assert shuffled(positions, 50, keys).tolist() == one_by_one


def test_random_below_is_uniform_and_never_reaches_its_limit():
    counts = np.bincount(random_below(10, 7, np.arange(100_000)))
    assert len(counts) == 10
    assert counts.min() > 9_600
    assert counts.max() < 10_400


def test_the_generator_is_splitmix64():
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert splitmix64(1234567, 3) == published
    (state,) = splitmix64(42, 1)  # keys that follow each other become states far apart
    assert random_bits(42, np.arange(100)).tolist() == splitmix64(state, 100)


def splitmix64(state: int, count: int) -> list[int]:
    """Follow Vigna's splitmix64.c in integers of any size."""
    outputs = []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        bits = state
        bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB % 2**64
        outputs.append(bits ^ (bits >> 31))
    return outputs
