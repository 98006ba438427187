"""Memory that a step frees stays in the process, where the C library can be told so."""

import ctypes
import subprocess
import sys

import pytest

from training import allocator

# What a large tensor takes is freed and taken again, before and after the call.
TRIAL = """
import ctypes, resource
from concurrent.futures import ThreadPoolExecutor
from training.allocator import keep_freed_memory

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]

def page_faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        block = libc.malloc(2**24)
        ctypes.memset(block, 1, 2**24)
        libc.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

print(page_faults(), keep_freed_memory(), page_faults())
with ThreadPoolExecutor(1) as pool:
    print(pool.submit(page_faults).result())
"""


def has_glibc() -> bool:
    return sys.platform.startswith("linux") and hasattr(ctypes.CDLL(None), "gnu_get_libc_version")


@pytest.mark.skipif(not has_glibc(), reason="glibc's malloc is what can be told")
def test_freed_memory_is_taken_again_without_page_faults():
    result = subprocess.run(
        [sys.executable, "-c", TRIAL], capture_output=True, text=True, check=True, timeout=60
    )
    before, told, after, in_a_thread = result.stdout.split()
    assert told == "True"
    # Each time all pages, then at most once, and in a thread of its own never.
    assert int(after) * 4 < int(before)
    assert int(in_a_thread) * 4 < int(before)


@pytest.mark.parametrize(("limit", "takes_it"), [(2**40, True), (2**25, True), (0, False)])
def test_a_library_is_told_what_it_takes(monkeypatch, limit, takes_it):
    """An old glibc takes no threshold of a gigabyte, and musl's takes nothing."""

    class Library:
        def mallopt(self, name: int, value: int) -> int:
            return int(value <= limit)

    monkeypatch.setattr(allocator.sys, "platform", "linux")
    monkeypatch.setattr(allocator.ctypes, "CDLL", lambda name: Library())
    assert allocator.keep_freed_memory() is takes_it


def test_elsewhere_nothing_is_touched(monkeypatch):
    monkeypatch.setattr(allocator.sys, "platform", "darwin")
    monkeypatch.setattr(allocator.ctypes, "CDLL", lambda name: pytest.fail("touched"))
    assert not allocator.keep_freed_memory()
