"""Let the C library keep what a training step frees, and have it in huge pages.

A step on a CPU makes and frees thousands of tensors, each step the same. By default glibc gives
large ones back to the system at once, and the system fills every page with zeros when it hands it
out again: 6,700 page faults and a fifth of the processor time of a step of the small ready run
(configs/shakespeare-char.yaml), none of which computes anything.

Besides, glibc gives each thread a heap of its own, and what a step has freed in one heap does not
serve the thread that writes a checkpoint: with one heap for all, rank 0 of two with 30 million
parameters held 1.28 to 1.31 GB at most instead of 1.43.

Pages of 2 MB are found in less time than the 512 small ones in their place: a step of 30 million
parameters takes 4 to 6 % less. Many Linux systems give them only to memory for which they are asked
(`madvise`), and glibc asks only if an environment variable said so before the process began. So the
addresses that the heap will grow into are taken now, huge pages are asked for there, and all is
given back to the heap: addresses, not memory, which the system hands out when it is first used.
"""

import contextlib
import ctypes
import mmap
import os
import resource
import sys
from pathlib import Path
from typing import Any

from dist.huge_pages import HUGE_PAGE

# Numbers of mallopt(3), from malloc.h.
M_TRIM_THRESHOLD = -1
M_TOP_PAD = -2
M_MMAP_THRESHOLD = -3
M_ARENA_MAX = -8

# Blocks up to this size come from the heap, which keeps them; larger ones go back when freed. The
# first that is taken: before 2.35 glibc takes no more than half of what a thread's heap may be.
LARGEST_KEPT = (2**30, 2**25)
# However much lies free at the end of the heap, none of it is given back.
NEVER = -1
# By so much the heap grows at a time.
GROWTH = 2**26
# In OVERCOMMIT: addresses count as if they were memory.
STRICT = "2"
OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")
# Whoever has set one of these chooses how glibc's memory is laid out, or wants it filled.
OTHER_WISHES = ("GLIBC_TUNABLES", "MALLOC_PERTURB_")
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def keep_freed_memory() -> bool:
    """Tell glibc's malloc to keep freed memory; whether it could be told.

    Where they are to be had, and in the main thread, memory that it takes from now on is in huge
    pages. Elsewhere (macOS, musl) nothing happens. The peak of a process stays what it was; between
    the steps it holds what a step needs. Memory of GPUs is torch's own to cache, not malloc's.
    """
    if not sys.platform.startswith("linux"):
        return False
    library = ctypes.CDLL(None)
    mallopt = getattr(library, "mallopt", None)
    if mallopt is None:
        return False
    # A setting that is not taken gives 0; musl's mallopt takes none.
    mallopt(M_ARENA_MAX, 1)
    mallopt(M_TRIM_THRESHOLD, NEVER)
    mallopt(M_TOP_PAD, GROWTH)
    for size in LARGEST_KEPT:
        if mallopt(M_MMAP_THRESHOLD, size) == 1:
            if size == LARGEST_KEPT[0] and _is_to_be_asked() and _addresses_cost_nothing():
                _grow_in_huge_pages(library)
            return True
    return False


def _is_to_be_asked() -> bool:
    """Whether this process gets huge pages where it asks for them, and only there."""
    if any(name in os.environ for name in OTHER_WISHES):
        return False
    with contextlib.suppress(OSError):
        return "[madvise]" in HUGE_PAGES.read_text()
    return False


def _addresses_cost_nothing() -> bool:
    """Whether a process may take addresses without memory behind them, and be none the poorer."""
    for limit in (resource.RLIMIT_AS, resource.RLIMIT_DATA):
        if resource.getrlimit(limit)[0] != resource.RLIM_INFINITY:
            return False
    with contextlib.suppress(OSError):
        return OVERCOMMIT.read_text().strip() != STRICT
    return False


def _grow_in_huge_pages(library: Any) -> None:
    """Ask for huge pages where the heap of the C library will be."""
    library.malloc.restype = ctypes.c_void_p
    library.malloc.argtypes = [ctypes.c_size_t]
    library.free.argtypes = [ctypes.c_void_p]
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    size = LARGEST_KEPT[0] - HUGE_PAGE  # the library adds a few bytes
    blocks: list[int] = []
    end = 0
    for _ in range(_most_addresses() // size):
        block = library.malloc(size)
        if block is None:
            break
        blocks.append(block)
        if len(blocks) > 1 and not 0 <= block - end < HUGE_PAGE:
            break  # the heap could not grow on where it was
        end = block + size
    if blocks:
        # All at once: each request beside another would be a mapping more, and those are limited.
        start = -(-blocks[0] // HUGE_PAGE) * HUGE_PAGE
        library.madvise(start, end // HUGE_PAGE * HUGE_PAGE - start, mmap.MADV_HUGEPAGE)
    for block in blocks:
        library.free(block)


def _most_addresses() -> int:
    """Bytes: half of the machine's memory. A mapping larger than all of it could not be forked."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
