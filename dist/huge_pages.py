"""Memory in pages of 2 MB, where Linux gives them.

Looking up the addresses of small pages takes a fifth to a third of the time that a large buffer is
read or written in. Most systems give huge ones only to those who ask, and to memory that processes
share only for each stretch (since Linux 6.1). Elsewhere the pages are what they are.
"""

import contextlib
import mmap

import torch
from torch import Tensor

HUGE_PAGE = 2**21
# Of madvise(2); the module mmap does not have it.
MADV_COLLAPSE = 25


def empty(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A flat tensor of this process, (numel,), of undefined content."""
    nbytes = numel * dtype.itemsize
    if device.type == "cpu" and nbytes >= HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        # Whole pages: of those the system begins a mapping where a huge one can.
        size = -(-nbytes // HUGE_PAGE) * HUGE_PAGE
        with contextlib.suppress(OSError):
            memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            memory.madvise(mmap.MADV_HUGEPAGE)
            return torch.frombuffer(memory, dtype=dtype, count=numel)
    return torch.empty(numel, dtype=dtype, device=device)


def map_file(descriptor: int, size: int) -> mmap.mmap:
    """A file of `size` bytes but for less than a huge page, from where one can begin.

    Raises:
        OSError: it cannot be mapped.
    """
    memory = mmap.mmap(descriptor, size)
    beyond = torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr() % HUGE_PAGE
    if beyond:
        # The kernel fills the address space from above: what is shorter begins that much higher.
        memory.close()
        memory = mmap.mmap(descriptor, size - (HUGE_PAGE - beyond))
    return memory


def collapse(memory: mmap.mmap, start: int, nbytes: int) -> None:
    """Let a file's memory that nobody has used yet consist of huge pages.

    Args:
        memory: from `map_file`.
        start: first byte, a multiple of HUGE_PAGE.
        nbytes: from there on; what is left over of a huge page stays in small ones.
    """
    whole = nbytes // HUGE_PAGE * HUGE_PAGE
    if whole == 0:
        return
    for page in range(start, start + whole, HUGE_PAGE):
        memory[page] = 0  # the kernel makes no huge page where there is none
    with contextlib.suppress(OSError):
        memory.madvise(MADV_COLLAPSE, start, whole)
