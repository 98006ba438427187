"""Let the C library keep what a training step frees, for the next step to take again.

A step on a CPU makes and frees thousands of tensors, each step the same. By default glibc gives
large ones back to the system at once, and the system fills every page with zeros when it hands it
out again: 6,700 page faults and a fifth of the processor time of a step of the small ready run
(configs/shakespeare-char.yaml), none of which computes anything.

Besides, glibc gives each thread a heap of its own, and what a step has freed in one heap does not
serve the thread that writes a checkpoint: with one heap for all, rank 0 of two with 30 million
parameters held 1.28 to 1.31 GB at most instead of 1.43.
"""

import ctypes
import sys

# Numbers of mallopt(3), from malloc.h.
M_TRIM_THRESHOLD = -1
M_TOP_PAD = -2
M_MMAP_THRESHOLD = -3
M_ARENA_MAX = -8

# Blocks up to this size come from the heap, which keeps them; larger ones go back when freed. The
# first that is taken: before 2.35 glibc takes no more than half of what a thread's heap may be.
LARGEST_KEPT = (2**30, 2**25)
# So much may lie free at the end of the heap before any of it is given back: all of it.
MOST_FREE = 2**31 - 1
# By so much the heap grows at a time.
GROWTH = 2**26


def keep_freed_memory() -> bool:
    """Tell glibc's malloc to keep freed memory; whether it could be told.

    Elsewhere (macOS, musl) nothing happens. The peak of a process stays what it was; between the
    steps it holds what a step needs. Memory of GPUs is torch's own to cache, not malloc's.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    # A setting that is not taken gives 0; musl's mallopt takes none.
    mallopt(M_ARENA_MAX, 1)
    mallopt(M_TRIM_THRESHOLD, MOST_FREE)
    mallopt(M_TOP_PAD, GROWTH)
    return any(mallopt(M_MMAP_THRESHOLD, size) == 1 for size in LARGEST_KEPT)
