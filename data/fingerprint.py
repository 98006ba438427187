"""A short string that pins what data a run trains on, in which order.

A checkpoint says how many samples are done, and that means something only over the same token
files. Size and order of the files give most differences away; a digest of tokens from many places
shows other text of the same length. Files of any size cost the same few milliseconds, so a change
that is smaller than the distance of two places in a very large file may stay unseen.
"""

import hashlib
import json
from collections.abc import Iterator

import numpy as np

from data.tokens import PreparedData, TokenSplit

# A split of up to a million tokens is read in whole, of a larger one as many in evenly spread
# blocks: 2 ms of hashing, and few enough places for a disk that has to seek.
BLOCKS_READ = 64
TOKENS_IN_BLOCK = 1 << 14


def data_fingerprint(data: PreparedData) -> str:
    """Hash tokenizer, sizes and order of the files, and tokens of both splits: 64 hex digits.

    Where the folder lies and when it was made do not matter, nor what its files are called as long
    as their order is the same.
    """
    splits = (data.train, data.val)
    statement = {
        "tokenizer": data.fingerprint,
        "dtypes": [[shard.dtype.name for shard in split.shards] for split in splits],
        "sizes": [[shard.size for shard in split.shards] for split in splits],
    }
    digest = hashlib.sha256(json.dumps(statement).encode("ascii"))
    for split in splits:
        for block in _blocks(split):
            digest.update(block.astype("<u4").tobytes())
    return digest.hexdigest()


def _blocks(split: TokenSplit) -> Iterator[np.ndarray]:
    """Pieces of at most TOKENS_IN_BLOCK tokens: the whole split, or evenly spread from end to end.

    Positions count through all files, so that many small files cost no more than a large one.
    """
    last = max(0, split.num_tokens - TOKENS_IN_BLOCK)
    needed = -(-split.num_tokens // TOKENS_IN_BLOCK)
    begins = np.linspace(0, last, min(needed, BLOCKS_READ)).astype(np.int64)
    ends = np.cumsum([shard.size for shard in split.shards])
    for begin in begins:
        end = min(begin + TOKENS_IN_BLOCK, split.num_tokens)
        for number in range(np.searchsorted(ends, begin, side="right"), len(ends)):
            first = ends[number] - split.shards[number].size
            if first >= end:
                break
            yield split.shards[number][max(0, begin - first) : end - first]
