"""Archives: what torch.load reads is what was written, and no wrong bit goes unseen."""

import errno
import io
import os
import pickle
import pickletools
import struct
import subprocess
import sys
import threading
import time
import weakref
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from training import archive_check
from training.archive import STORAGES, ArchiveWriter, Record
from training.archive_check import ArchiveError, verify_archive

PROJECT = Path(__file__).parents[2]
DTYPES = tuple(STORAGES)


def write(path, content, values=()) -> None:
    """An archive of the content; `values` are pairs of a Record and its tensor."""
    with open(path, "wb") as file:
        writer = ArchiveWriter(file, content)
        for record, tensor in values:
            writer.write(record, tensor)
        writer.close()


def load(path, mmap):
    return torch.load(path, weights_only=True, mmap=mmap)


def bits(tensor):
    copy = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    return copy.dtype, copy.shape, copy.flatten().view(torch.uint8).tolist()


def arbitrary_bits(shape, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    count = torch.Size(shape).numel() * dtype.itemsize
    data = torch.randint(0, 256, (count,), generator=generator, dtype=torch.uint8)
    return data.view(dtype).reshape(shape)


LAYOUTS = {
    "contiguous": lambda tensor: tensor,
    "transposed": lambda tensor: tensor.mT if tensor.ndim > 1 else tensor,
    "every_second": lambda tensor: tensor[..., ::2] if tensor.ndim else tensor,
    "part": lambda tensor: tensor[1:] if tensor.ndim else tensor,
    "expanded": lambda tensor: tensor.expand(3, *tensor.shape),
    "parameter": lambda tensor: nn.Parameter(tensor, requires_grad=False),
}


@st.composite
def tensors(draw):
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    tensor = arbitrary_bits(shape, draw(st.sampled_from(DTYPES)), draw(st.integers(0, 1000)))
    return LAYOUTS[draw(st.sampled_from(sorted(LAYOUTS)))](tensor)


@settings(max_examples=60)
@given(st.lists(st.tuples(tensors(), st.booleans()), max_size=6), st.randoms())
def test_torch_load_gives_every_tensor_back_to_the_bit(tmp_path_factory, drawn, random):
    path = tmp_path_factory.mktemp("archive") / "a.pt"
    content = [Record(t.shape, t.dtype) if is_late else t for t, is_late in drawn]
    values = [(content[i], t) for i, (t, is_late) in enumerate(drawn) if is_late]
    random.shuffle(values)
    write(path, content, values)
    verify_archive(path)
    for mmap in (False, True):
        loaded = load(path, mmap)
        assert [bits(tensor) for tensor in loaded] == [bits(t) for t, _ in drawn]
        assert all(tensor.is_contiguous() for tensor in loaded)


def test_a_process_without_this_project_reads_the_file(tmp_path):
    content = {f"{d}": arbitrary_bits((2, 3), d, seed) for seed, d in enumerate(DTYPES)}
    record = Record((4,), torch.bfloat16)
    late = arbitrary_bits((4,), torch.bfloat16, 99)
    write(tmp_path / "ours.pt", content | {"late": record, "n": 3}, [(record, late)])
    script = (
        "import sys, torch\n"
        "loaded = [torch.load('ours.pt', weights_only=True, mmap=m) for m in (False, True)]\n"
        "assert 'training' not in sys.modules\n"
        "torch.save(loaded, 'theirs.pt')\n"
    )
    subprocess.run([sys.executable, "-I", "-c", script], cwd=tmp_path, check=True)
    for theirs in load(tmp_path / "theirs.pt", False):
        assert theirs.pop("n") == 3
        expected = {name: bits(tensor) for name, tensor in (content | {"late": late}).items()}
        assert {name: bits(tensor) for name, tensor in theirs.items()} == expected


def test_plain_values_come_back_with_their_types(tmp_path):
    content = {
        "text": ["", "é中", "\ud800", "'"],
        "numbers": [0, -1, 255, 256, 65536, 2**31, -(2**63), 2**2039 - 1, 0.1, -0.0, 1e-320],
        "not finite": [float("inf"), float("-inf")],
        "others": (None, True, False, (), [], {}),
        1: {None: {True: {0.5: "any plain key"}}},
    }
    write(tmp_path / "a.pt", content)
    verify_archive(tmp_path / "a.pt")
    assert repr(load(tmp_path / "a.pt", True)) == repr(content)


def test_an_ordered_dict_comes_back_as_a_plain_one(tmp_path):
    state = nn.Linear(2, 2).state_dict()
    assert type(state) is OrderedDict
    write(tmp_path / "a.pt", state)
    assert type(load(tmp_path / "a.pt", False)) is dict


def test_what_is_tied_is_stored_once_and_comes_back_tied(tmp_path):
    tensor, record = torch.ones(64, 64), Record((64, 64), torch.float32)
    content = {"a": tensor, "b": nn.Parameter(tensor), "c": record, "d": [{"e": record}]}
    write(tmp_path / "a.pt", content, [(record, 2 * tensor)])
    assert os.path.getsize(tmp_path / "a.pt") < 3 * 64 * 64 * 4
    for mmap in (False, True):
        loaded = load(tmp_path / "a.pt", mmap)
        loaded["a"][0, 0] = 5
        loaded["c"][0, 0] = 7
        assert loaded["b"][0, 0] == 5
        assert loaded["d"][0]["e"][0, 0] == 7


def test_what_only_begins_at_the_same_address_is_not_tied(tmp_path):
    square, wave = torch.tensor([[1.0, 2], [3, 4]]), torch.tensor([1 + 2j, 3 - 4j])
    content: list[Any] = [square, square.T, square[:1], square.view(torch.int32), wave, wave.conj()]
    content += [wave.conj().imag, wave.imag, Record((1,), torch.int8), Record((1,), torch.int8)]
    one, two = torch.ones(1, dtype=torch.int8), torch.full((1,), 2, dtype=torch.int8)
    write(tmp_path / "a.pt", content, [(content[-2], one), (content[-1], two)])
    loaded = load(tmp_path / "a.pt", True)
    assert [t.tolist() for t in loaded] == [t.tolist() for t in [*content[:-2], one, two]]


def test_a_sparse_tensor_can_be_the_values_of_a_record(tmp_path):
    tensor, record = torch.tensor([[0.0, 2], [0, 0]]), Record((2, 2), torch.float32)
    write(tmp_path / "a.pt", record, [(record, tensor.to_sparse())])
    assert load(tmp_path / "a.pt", True).equal(tensor)


class Number(int):
    pass


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ({1, 2}, "set"),
        (b"bytes", "bytes"),
        (np.float64(1), "float64"),  # a float, but pickled as numpy's
        (Number(3), "Number"),
        (torch.float32, "dtype"),
        (torch.Size([2]), "Size"),
        (lambda: 0, "function"),
        (2**2039, "int of up to 255 bytes"),
        (torch.zeros(2).to_sparse(), "dense tensor"),
        (torch.zeros(2, device="meta"), "dense tensor"),
        (torch.zeros(2, dtype=torch.uint16), "torch.uint16"),
        (Record((2,), torch.float8_e5m2), "torch.float8_e5m2"),
        ({Number(1): 2}, "a key of content['model'][1]['a.b'] cannot be stored: it is a Number"),
    ],
)
def test_what_is_not_plain_is_refused_with_its_place(value, kind):
    with pytest.raises(TypeError) as caught:
        ArchiveWriter(io.BytesIO(), {"n": 1, "model": [0, {"a.b": value}]})
    assert "content['model'][1]['a.b'] cannot be stored" in str(caught.value)
    assert kind in str(caught.value)


def test_the_pickle_names_only_what_torch_save_would_name(tmp_path):
    tensors = [torch.ones(2, dtype=dtype) for dtype in DTYPES]
    record = Record((2,), torch.float32)
    content = {"a": tensors, "b": {"c": record}, "d": [1, "x", 2.0, None, True, (3,)]}
    write(tmp_path / "ours.pt", content, [(record, torch.zeros(2))])
    torch.save(content | {"b": {"c": torch.zeros(2)}}, tmp_path / "theirs.pt")

    def pickled_names(path):
        data = zipfile.ZipFile(path).read(f"{zipfile.ZipFile(path).namelist()[0]}")
        opcodes = [(opcode.name, argument) for opcode, argument, _ in pickletools.genops(data)]
        assert not {"STACK_GLOBAL", "INST", "OBJ", "NEWOBJ", "BUILD"} & {
            name for name, _ in opcodes
        }
        return {argument for name, argument in opcodes if name == "GLOBAL"}

    assert pickled_names(tmp_path / "ours.pt") == pickled_names(tmp_path / "theirs.pt")


def test_zip_tools_read_it_and_every_record_is_aligned(tmp_path):
    path, tensors = tmp_path / "a.pt", [torch.ones(n, dtype=torch.uint8) for n in range(130)]
    write(path, tensors)
    data = path.read_bytes()
    with zipfile.ZipFile(path) as opened:
        assert opened.testzip() is None
        assert opened.namelist()[:3] == [
            f"archive/{n}" for n in ("data.pkl", "version", "byteorder")
        ]
        assert opened.read("archive/version") == b"3\n"
        assert opened.read("archive/data/129") == b"\1" * 129
        for info in opened.infolist():
            assert info.compress_type == zipfile.ZIP_STORED
            name, extra = struct.unpack_from("<2H", data, info.header_offset + 26)
            start = info.header_offset + 30 + name + extra
            assert start % 64 == 0
            assert data[start : start + info.file_size] == opened.read(info)


def test_equal_content_makes_equal_files(tmp_path):
    for name in "ab":
        write(tmp_path / name, {"x": torch.arange(5), "y": [1, 2.5]})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_values_must_be_those_that_the_content_announced():
    first, second = Record((2, 3), torch.float32), Record((), torch.int64)
    writer = ArchiveWriter(io.BytesIO(), {"model": {"w": first}, "n": [second]})
    with pytest.raises(ValueError, match="does not stand in the content"):
        writer.write(Record((2, 3), torch.float32), torch.ones(2, 3))
    for wrong in (torch.ones(3, 2), torch.ones(6), torch.ones(2, 3, dtype=torch.float64)):
        with pytest.raises(
            ValueError, match=r"content\['model'\]\['w'\] is torch.float32 of shape"
        ):
            writer.write(first, wrong)
    with pytest.raises(
        ValueError, match=r"2 of 2 .* content\['model'\]\['w'\], content\['n'\]\[0\]"
    ):
        writer.close()
    writer.write(first, torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"content\['model'\]\['w'\] is written already"):
        writer.write(first, torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"1 of 2 records lack values: content\['n'\]\[0\]$"):
        writer.close()
    writer.write(second, torch.tensor(1))
    writer.close()
    with pytest.raises(ValueError, match="closed"):
        writer.close()


def test_the_writer_keeps_no_tensor_and_copies_none_that_lies_right():
    seen = set()

    class Addresses(io.BytesIO):
        def write(self, data):
            seen.add(np.frombuffer(data, np.uint8).ctypes.data)
            return super().write(data)

    record, file = Record((50,), torch.bfloat16), Addresses()
    early, late = torch.ones(70), torch.ones(50, dtype=torch.bfloat16)
    writer = ArchiveWriter(file, [early, record])
    writer.write(record, late)
    assert {early.data_ptr(), late.data_ptr()} <= seen
    references = [weakref.ref(early), weakref.ref(late)]
    del early, late
    assert [reference() for reference in references] == [None, None]
    writer.close()


def test_close_hands_everything_to_the_system_and_leaves_the_file_open(tmp_path):
    with open(tmp_path / "a.pt", "wb") as file:
        ArchiveWriter(file, [torch.ones(3)]).close()
        verify_archive(tmp_path / "a.pt")
        assert not file.closed


class Disk(io.RawIOBase):
    """Cannot seek, takes a few bytes at a time, and is full after `capacity`."""

    def __init__(self, capacity=1 << 30):
        self.data, self.capacity = bytearray(), capacity
        self.error = OSError(errno.ENOSPC, "No space left on device")

    def write(self, data):
        if len(self.data) >= self.capacity:
            raise self.error
        part = bytes(data[: min(7, self.capacity - len(self.data))])
        self.data += part
        return len(part)


def write_to(disk) -> None:
    record = Record((20,), torch.float32)
    writer = ArchiveWriter(disk, {"a": torch.arange(9), "b": record})
    writer.write(record, torch.arange(20.0))
    writer.close()


def test_a_file_that_takes_parts_gets_all_of_them(tmp_path):
    disk = Disk()
    write_to(disk)
    (tmp_path / "a.pt").write_bytes(disk.data)
    verify_archive(tmp_path / "a.pt")
    assert load(tmp_path / "a.pt", True)["b"].equal(torch.arange(20.0))


def test_a_full_disk_is_the_systems_own_error_wherever_it_comes():
    complete, threads = Disk(), threading.active_count()
    write_to(complete)
    for capacity in range(0, len(complete.data), 5):
        disk = Disk(capacity)
        with pytest.raises(OSError, match="No space left") as caught:
            write_to(disk)
        assert caught.value is disk.error
    assert threading.active_count() == threads


def test_after_an_error_of_the_file_nothing_is_written_any_more():
    disk: Any = Disk()
    record = Record((2,), torch.float32)
    writer = ArchiveWriter(disk, record)
    disk.capacity = len(disk.data) + 100
    with pytest.raises(OSError, match="No space left"):
        writer.write(record, torch.ones(2))
    disk.capacity = 1 << 30
    with pytest.raises(ValueError, match="writing to it has failed"):
        writer.write(record, torch.ones(2))


@pytest.fixture
def small(tmp_path):
    path, record = tmp_path / "small.pt", Record((3,), torch.int64)
    write(path, {"a": torch.arange(5.0), "b": record, "c": [1, "x"]}, [(record, torch.arange(3))])
    verify_archive(path)
    return path


@pytest.fixture
def unsealed(tmp_path):
    path = tmp_path / "unsealed.pt"
    torch.save({"x": torch.arange(10), "y": torch.ones(3, 4)}, path)
    verify_archive(path)
    return path


def check_that_every_flipped_bit_is_found(path, offsets) -> None:
    data = path.read_bytes()
    with open(path, "r+b", buffering=0) as file:
        for offset in offsets:
            for bit in range(8):
                os.pwrite(file.fileno(), bytes([data[offset] ^ 1 << bit]), offset)
                with pytest.raises(ArchiveError):
                    verify_archive(path)
            os.pwrite(file.fileno(), data[offset : offset + 1], offset)
    verify_archive(path)


def test_every_flipped_bit_is_found(small):
    check_that_every_flipped_bit_is_found(small, range(os.path.getsize(small)))


def test_every_flipped_bit_of_a_tensor_without_seal_is_found(unsealed):
    for values in (torch.arange(10), torch.ones(3, 4)):
        start = unsealed.read_bytes().index(values.numpy().tobytes())
        check_that_every_flipped_bit_is_found(unsealed, range(start, start + values.nbytes))


@pytest.mark.parametrize("kind", ["small", "unsealed"])
def test_every_truncation_is_found(kind, request):
    path = request.getfixturevalue(kind)
    for length in reversed(range(os.path.getsize(path))):
        os.truncate(path, length)
        with pytest.raises(ArchiveError):
            verify_archive(path)


@pytest.mark.parametrize("kind", ["small", "unsealed"])
def test_every_continuation_is_found(kind, request):
    path = request.getfixturevalue(kind)
    data = path.read_bytes()
    for more in (*[bytes([byte]) for byte in range(256)], bytes(22), bytes(4096), data):
        path.write_bytes(data + more)
        with pytest.raises(ArchiveError):
            verify_archive(path)


def test_an_archive_that_ends_within_a_tensor_is_no_archive(unsealed, tmp_path):
    inner, path = unsealed.read_bytes(), tmp_path / "outer.pt"
    write(path, torch.frombuffer(bytearray(inner), dtype=torch.uint8))
    verify_archive(path)
    os.truncate(path, path.read_bytes().index(inner) + len(inner))
    with pytest.raises(ArchiveError, match="does not begin with a record"):
        verify_archive(path)


def no_thread(thread) -> None:
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize("can_start_threads", [True, False])
def test_threads_share_the_records_and_miss_none(tmp_path, monkeypatch, can_start_threads):
    monkeypatch.setattr(archive_check, "VERIFY_THREAD_BYTES", 1)
    monkeypatch.setattr(archive_check, "VERIFY_CHUNK_BYTES", 100)
    preadv, lengths = os.preadv, set()

    def slow_in_other_threads(number, buffers, offset):
        lengths.add(len(buffers[0]))
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.001)
        return preadv(number, buffers, offset)

    monkeypatch.setattr(os, "preadv", slow_in_other_threads)
    if not can_start_threads:
        monkeypatch.setattr(threading.Thread, "start", no_thread)
    path, count = tmp_path / "a.pt", threading.active_count()
    tensors = [arbitrary_bits((1000 + n,), torch.uint8, n) for n in range(12)]
    write(path, tensors)
    verify_archive(path)
    data = path.read_bytes()
    for n, tensor in enumerate(tensors):
        changed = bytearray(data)
        changed[data.index(tensor.numpy().tobytes()) + 950] ^= 1
        path.write_bytes(changed)
        with pytest.raises(ArchiveError, match=f"a.pt is damaged: archive/data/{n} is not what"):
            verify_archive(path)
    assert threading.active_count() == count
    assert max(lengths) == 100


def test_a_disk_that_cannot_read_is_told_as_damage(small, monkeypatch):
    def preadv(number, buffers, offset):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises(ArchiveError, match="Input/output error"):
        verify_archive(small)


def test_what_is_no_archive_is_told_so_and_what_is_missing_too(tmp_path):
    (tmp_path / "pickle.pt").write_bytes(pickle.dumps({"a": 1}))
    (tmp_path / "empty.pt").touch()
    zipfile.ZipFile(tmp_path / "no_record.pt", "w").close()
    for name in ("pickle.pt", "empty.pt", "no_record.pt"):
        with pytest.raises(ArchiveError, match=f"{name} is damaged"):
            verify_archive(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        verify_archive(tmp_path / "missing.pt")


def test_a_background_thread_finishes_after_the_main_thread_has(tmp_path):
    script = (
        "import threading, time, torch\n"
        "from pathlib import Path\n"
        "from training import archive, archive_check\n"
        "archive_check.VERIFY_THREAD_BYTES = 1\n"
        "def save():\n"
        "    threading.main_thread().join()\n"
        "    time.sleep(0.2)\n"
        f"    path = Path({str(tmp_path / 'a.pt')!r})\n"
        "    with open(path, 'wb') as file:\n"
        "        archive.ArchiveWriter(file, [torch.ones(10), torch.zeros(10)]).close()\n"
        "    archive_check.verify_archive(path)\n"
        "    path.with_name('verified').touch()\n"
        "threading.Thread(target=save).start()\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=PROJECT, check=True, capture_output=True, text=True
    )
    assert (tmp_path / "verified").exists(), result.stderr
