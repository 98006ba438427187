"""Random numbers and random orders as pure functions of a position, on arrays of positions.

A training run that can stop anywhere and go on exactly needs an order of its data that can be
asked at any position, not a generator that must be wound forward. Both functions cost constant
memory and keep nothing between calls, so an order over a billion windows is as cheap as one
over ten, and each rank computes its own part alone.
"""

import numpy as np

# The odd constant of SplitMix64: 2**64 divided by the golden ratio.
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
# Four rounds of a Feistel network are indistinguishable from a random permutation as long as the
# halves are wide (Luby and Rackoff, 1988); small domains have narrow halves and get more.
FEISTEL_ROUNDS = 8


def random_bits(key: np.ndarray | int, position: np.ndarray | int) -> np.ndarray:
    """Give the 64 random bits that stand at `position` of the stream `key`.

    This is the generator SplitMix64 (Steele, Lea and Flood, 2014) with its counter handed in.

    Args:
        key: non-negative integers below 2**64, one stream each.
        position: non-negative integers, of a shape that broadcasts with `key`.

    Returns:
        uint64 of the broadcast shape.
    """
    with np.errstate(over="ignore"):
        start = _mix(np.asarray(key, dtype=np.uint64) + GOLDEN)
        return _mix(start + (np.asarray(position, dtype=np.uint64) + np.uint64(1)) * GOLDEN)


def random_below(limit: int, key: np.ndarray | int, position: np.ndarray | int) -> np.ndarray:
    """Give the random integer in [0, limit) at `position` of the stream `key`, as int64."""
    unit = (random_bits(key, position) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return (unit * limit).astype(np.int64)


def shuffled(positions: np.ndarray, size: int, key: np.ndarray | int) -> np.ndarray:
    """Say which element of a shuffled range(size) stands at each of `positions`.

    For one key this is a bijection of range(size): a Feistel network permutes the next power of
    four, and an image that falls outside the range is permuted again until it falls inside
    (cycle walking; Black and Rogaway, 2002), four turns on average at most.

    Args:
        positions: integers in [0, size).
        size: number of elements.
        key: the shuffle's number, one for all or one for each position.

    Returns:
        int64 of the shape of `positions`, each in [0, size).
    """
    images = np.array(positions, dtype=np.uint64)
    keys = np.broadcast_to(np.asarray(key, dtype=np.uint64), images.shape)
    half_bits = max(1, (max(size - 1, 1).bit_length() + 1) // 2)
    images = _feistel(images, keys, half_bits)
    while (outside := images >= size).any():
        images[outside] = _feistel(images[outside], keys[outside], half_bits)
    return images.astype(np.int64)


def _feistel(values: np.ndarray, keys: np.ndarray, half_bits: int) -> np.ndarray:
    """Permute the integers of 2 * half_bits bits; each round is undone by running it backwards."""
    shift = np.uint64(half_bits)
    mask = np.uint64((1 << half_bits) - 1)
    left, right = values >> shift, values & mask
    for number in range(FEISTEL_ROUNDS):
        noise = random_bits(keys, right * np.uint64(FEISTEL_ROUNDS) + np.uint64(number))
        left, right = right, left ^ (noise & mask)
    return (left << shift) | right


def _mix(bits: np.ndarray) -> np.ndarray:
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))
