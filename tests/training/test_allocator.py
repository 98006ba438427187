"""Memory that a step frees stays in the process, where the C library can be told so."""

import ctypes
import os
import resource
import subprocess
import sys

import pytest

from dist.huge_pages import HUGE_PAGE
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


# Where the heap grows after the call: what it takes, what is asked for there, what it keeps.
GROWTH = """
import ctypes, os, re, resource, sys
from pathlib import Path

limit = int(sys.argv[1])
if limit:
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
from training import allocator

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]

def memory():
    status = Path("/proc/self/status").read_text()
    sizes = (re.search(name + r":\\s+(\\d+) kB", status)[1] for name in ("VmSize", "VmRSS"))
    return [int(size) * 1024 for size in sizes]

def is_advised(address):
    found = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match("([0-9a-f]+)-([0-9a-f]+) ", line):
            start, end = (int(bound, 16) for bound in bounds.groups())
            found = start <= address < end
        elif found and line.startswith("VmFlags:"):
            return " hg" in line
    raise LookupError(address)

size, resident = memory()
told = allocator.keep_freed_memory()
after_size, after_resident = memory()
first = libc.malloc(2**26)
ctypes.memset(first, 1, 2**26)
second = libc.malloc(2**29)  # only addresses
advised = [is_advised(block + 2**25) for block in (first, second)]
libc.free(second)
libc.free(first)
kept_size, _ = memory()
if (child := os.fork()) == 0:
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
print(told, after_size - size, after_resident - resident, kept_size - size, *advised)
"""


def has_huge_pages() -> bool:
    return has_glibc() and allocator._is_to_be_asked() and allocator._addresses_cost_nothing()


def grow(limit: int = 0, **environment: str) -> tuple[bool, int, int, int, list[bool]]:
    """Whether it was told; bytes: addresses and memory taken, addresses kept; what is advised."""
    command = [sys.executable, "-c", GROWTH, str(limit)]
    result = subprocess.run(
        command,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    told, taken, resident, kept, *advised = result.stdout.split()
    return (
        told == "True",
        int(taken),
        int(resident),
        int(kept),
        [word == "True" for word in advised],
    )


@pytest.mark.skipif(not has_huge_pages(), reason="no huge pages to ask for")
def test_the_heap_grows_in_huge_pages():
    told, taken, resident, kept, advised = grow()
    assert told
    assert advised == [True, True]
    # Addresses, but no memory; and they stay the heap's.
    assert taken > allocator._most_addresses() - 2**30
    assert resident < 2**25
    assert kept >= taken


@pytest.mark.skipif(not has_huge_pages(), reason="no huge pages to ask for")
def test_where_addresses_are_counted_none_are_taken():
    told, taken, _, _, advised = grow(limit=2**36)
    assert told
    assert taken < 2**28
    assert advised == [False, False]


@pytest.mark.skipif(not has_huge_pages(), reason="no huge pages to ask for")
def test_a_memory_that_is_to_be_filled_is_not_made_larger():
    told, taken, resident, _, advised = grow(MALLOC_PERTURB_="85")
    assert told
    assert max(taken, resident) < 2**28
    assert advised == [False, False]


@pytest.mark.parametrize(("mode", "is_free"), [("0\n", True), ("1\n", True), ("2\n", False)])
def test_strict_accounting_counts_addresses(monkeypatch, tmp_path, mode, is_free):
    monkeypatch.setattr(allocator.resource, "getrlimit", lambda name: (resource.RLIM_INFINITY,) * 2)
    monkeypatch.setattr(allocator, "OVERCOMMIT", tmp_path / "overcommit_memory")
    assert not allocator._addresses_cost_nothing()  # who knows
    allocator.OVERCOMMIT.write_text(mode)
    assert allocator._addresses_cost_nothing() is is_free


@pytest.mark.parametrize(
    ("choice", "environment", "is_asked"),
    [
        ("always [madvise] never\n", {}, True),
        ("[always] madvise never\n", {}, False),
        ("always madvise [never]\n", {}, False),
        (None, {}, False),
        ("always [madvise] never\n", {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}, False),
    ],
)
def test_only_who_gets_huge_pages_by_asking_asks(
    monkeypatch, tmp_path, choice, environment, is_asked
):
    for name in allocator.OTHER_WISHES:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(allocator, "HUGE_PAGES", tmp_path / "enabled")
    if choice is not None:
        allocator.HUGE_PAGES.write_text(choice)
    assert allocator._is_to_be_asked() is is_asked


class Heap:
    """A library whose heap has room for some blocks one after the other; then it goes elsewhere."""

    def __init__(self, room: int, elsewhere: int | None) -> None:
        self.room = room
        self.taken: list[int] = []
        self.freed: list[int] = []
        self.advised: list[tuple[int, int]] = []

        # Functions that take attributes, as those of ctypes do.
        def malloc(size: int) -> int | None:
            if len(self.taken) == room:
                if elsewhere is not None:
                    self.taken.append(elsewhere)
                return elsewhere
            self.taken.append(self.taken[-1] + size + 16 if self.taken else 4096 + 16)
            return self.taken[-1]

        def free(block: int) -> None:
            self.freed.append(block)

        def madvise(start: int, length: int, advice: int) -> int:
            self.advised.append((start, length))
            return 0

        self.malloc, self.free, self.madvise = malloc, free, madvise


@pytest.mark.parametrize("elsewhere", [None, 2**46, 16])
@pytest.mark.parametrize("room", [0, 1, 3, 9])
def test_one_request_covers_what_lies_together(monkeypatch, room, elsewhere):
    monkeypatch.setattr(allocator, "_most_addresses", lambda: 5 * 2**30)
    heap = Heap(room, elsewhere)
    allocator._grow_in_huge_pages(heap)
    assert sorted(heap.freed) == sorted(heap.taken)
    together = min(room, 5)
    if together:
        ((start, length),) = heap.advised
        assert start == HUGE_PAGE
        assert start % HUGE_PAGE == length % HUGE_PAGE == 0
        # Of the last block no more than what it is too short or lies askew.
        assert 0 <= together * (2**30 - HUGE_PAGE) + 4096 - (start + length) < HUGE_PAGE + 2**12


@pytest.mark.parametrize(("limit", "takes_it"), [(2**40, True), (2**25, True), (0, False)])
def test_a_library_is_told_what_it_takes(monkeypatch, limit, takes_it):
    """An old glibc takes no threshold of a gigabyte, and musl's takes nothing."""

    class Library:
        def mallopt(self, name: int, value: int) -> int:
            return int(value <= limit)

    monkeypatch.setattr(allocator.sys, "platform", "linux")
    monkeypatch.setattr(allocator.ctypes, "CDLL", lambda name: Library())
    monkeypatch.setattr(allocator, "_is_to_be_asked", lambda: True)
    monkeypatch.setattr(allocator, "_addresses_cost_nothing", lambda: True)
    grown: list[object] = []
    monkeypatch.setattr(allocator, "_grow_in_huge_pages", grown.append)
    assert allocator.keep_freed_memory() is takes_it
    # Many small blocks would take long, and memory for what the library notes beside each.
    assert len(grown) == (limit >= 2**30)


def test_elsewhere_nothing_is_touched(monkeypatch):
    monkeypatch.setattr(allocator.sys, "platform", "darwin")
    monkeypatch.setattr(allocator.ctypes, "CDLL", lambda name: pytest.fail("touched"))
    assert not allocator.keep_freed_memory()
