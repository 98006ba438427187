"""Memory in huge pages is memory like any other."""

import mmap
import os
import sys
from typing import Any

import pytest
import torch

from dist import huge_pages
from dist.huge_pages import HUGE_PAGE

CPU = torch.device("cpu")


@pytest.mark.parametrize("nbytes", [0, 4, HUGE_PAGE - 4, HUGE_PAGE, 3 * HUGE_PAGE + 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tensor_has_its_length_whatever_pages_it_lies_in(nbytes, dtype):
    first, second = (huge_pages.empty(nbytes // dtype.itemsize, dtype, CPU) for _ in range(2))
    assert first.dtype == dtype
    assert first.shape == (nbytes // dtype.itemsize,)
    first.fill_(1)
    second.fill_(2)  # elsewhere
    assert (first == 1).all()
    del second
    clone = first.clone()
    assert torch.equal(first.mul_(3), 3 * clone)


def test_where_no_pages_can_be_mapped_memory_is_torchs(monkeypatch):
    def refuse(*_args, **_options):
        raise OSError("no")

    monkeypatch.setattr(mmap, "mmap", refuse)
    assert huge_pages.empty(HUGE_PAGE, torch.float32, CPU).fill_(5).sum() == 5 * HUGE_PAGE


def test_on_another_device_memory_is_torchs():
    meta = torch.device("meta")
    assert huge_pages.empty(HUGE_PAGE, torch.float32, meta).device == meta


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has such files")
@pytest.mark.parametrize("beyond", [0, 4096, HUGE_PAGE - 4096])
def test_a_file_is_mapped_from_where_a_huge_page_can_begin(beyond):
    descriptor = os.memfd_create("test")
    size = 8 * HUGE_PAGE + beyond
    os.ftruncate(descriptor, size)
    memory = huge_pages.map_file(descriptor, size)
    os.close(descriptor)
    assert size - HUGE_PAGE < len(memory) <= size
    assert torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % HUGE_PAGE == 0


@pytest.mark.parametrize("nbytes", [0, HUGE_PAGE - 1, HUGE_PAGE, 3 * HUGE_PAGE + 5])
def test_whole_huge_pages_are_asked_for_once_each_is_touched(nbytes):
    start, whole = 2 * HUGE_PAGE, nbytes // HUGE_PAGE
    asked = []

    class Memory(dict[int, int]):
        def madvise(self, *arguments: int) -> None:
            asked.append((sorted(self), arguments))
            raise OSError("this kernel cannot")

    memory: Any = Memory()
    huge_pages.collapse(memory, start, nbytes)
    pages = [start + number * HUGE_PAGE for number in range(whole)]
    expected = [(pages, (huge_pages.MADV_COLLAPSE, start, whole * HUGE_PAGE))]
    assert asked == (expected if whole else [])
