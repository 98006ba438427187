"""Buckets arrive averaged, however they travel, however fast the ranks are, in bounded memory."""

import gc
import itertools
import os
import random
import resource
import socket
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as torch_dist
from hypothesis import strategies as st

from dist import collectives, shared_memory_collectives
from dist.collectives import (
    HALF_PRECISION,
    all_gather_objects,
    mean_into,
    open_collectives,
    rank,
    timeout_seconds,
    world_size,
)
from dist.gloo_collectives import GlooCollectives
from dist.huge_pages import HUGE_PAGE
from dist.shared_memory import LostRankError, SharedMemory, answer, call, listen
from dist.shared_memory_collectives import MOST_UNREAD, SharedMemoryCollectives
from tests.dist.helpers import draw, fingerprint
from tests.harness import run_distributed

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is shared on Linux alone")

CPU = torch.device("cpu")
SIZES = [2, 3, 4]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
# Elements a shard; the last is longer than what is averaged at a time.
LENGTHS = [1, 7, 1000, 70_001]


def both_kinds():
    shared = open_collectives(CPU)
    assert isinstance(shared, SharedMemoryCollectives)
    return [shared, GlooCollectives()]


def values_of(owner, seed, numel, dtype):
    """What a rank puts in, known to all."""
    generator = torch.Generator().manual_seed(100 * seed + owner)
    return torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype)


def values_of_all(seed, numel, dtype):
    return [values_of(owner, seed, numel, dtype) for owner in range(world_size())]


def new_buffer(kind, seed, numel, dtype):
    return kind.new_buffer(numel, dtype, CPU).copy_(values_of(rank(), seed, numel, dtype))


def assert_is_mean(result, parts):
    """Right to the rounding of the result, the sum rounded as float32 at least."""
    exact = torch.stack(parts).double()
    mean, size = exact.mean(0), exact.abs().mean(0)
    wide = torch.float32 if parts[0].dtype in HALF_PRECISION else parts[0].dtype
    narrow = torch.finfo(result.dtype)
    allowed = narrow.eps / 2 * mean.abs() + narrow.smallest_normal * narrow.eps
    allowed += (len(parts) + 1) * torch.finfo(wide).eps * size
    error = (result.double() - mean).abs()
    assert (error <= allowed).all(), f"differs from the mean by {error.max()}"


def own_shard(tensor):
    return tensor.chunk(world_size())[rank()]


def every_collective(kinds, dtype):
    """Check each at each length; returns digests of what must be the same on all ranks."""
    digests = []
    for seed, length in enumerate(LENGTHS):
        numel = length * world_size()
        parts = values_of_all(seed, numel, dtype)
        shards = defaultdict(list)
        for kind in kinds:
            for shard_dtype in {dtype, torch.float32} if dtype in HALF_PRECISION else {dtype}:
                shard = torch.full((length,), torch.nan, dtype=shard_dtype)
                buffer = new_buffer(kind, seed, numel, dtype)
                kind.reduce_scatter_mean(buffer, shard).wait()
                assert_is_mean(shard, [own_shard(part) for part in parts])
                shards[shard_dtype].append(shard)
                kind.recycle(buffer)

            buffer = new_buffer(kind, seed, numel, dtype)
            kind.all_reduce_mean(buffer).wait()
            assert_is_mean(buffer, parts)
            digests.append(fingerprint([buffer]))

            gathered = kind.new_buffer(numel, dtype, CPU).fill_(torch.nan)
            own_shard(gathered).copy_(own_shard(parts[rank()]))
            kind.all_gather(gathered).wait()
            pieces = [part.chunk(world_size())[owner] for owner, part in enumerate(parts)]
            assert torch.equal(gathered, torch.cat(pieces))

            everywhere = [(part > 1.5).to(torch.uint8) for part in parts]
            flags = kind.new_buffer(numel, torch.uint8, CPU).copy_(everywhere[rank()])
            result = torch.full((numel,), 7, dtype=torch.uint8)
            kind.all_reduce_max(flags, result).wait()
            assert torch.equal(result, torch.stack(everywhere).amax(0))
            assert torch.equal(flags, everywhere[rank()])
        for ours, gloos in shards.values():
            assert torch.equal(ours, gloos)  # both add up in the order of ranks
    return digests


def every_collective_of_every_dtype():
    kinds = both_kinds()
    return [every_collective(kinds, dtype) for dtype in DTYPES]


@pytest.mark.parametrize("size", SIZES)
def test_every_collective_equals_a_float64_reference_and_is_the_same_on_all_ranks(size):
    digests = run_distributed(every_collective_of_every_dtype, size)
    assert digests == digests[:1] * size


def ones_beside_a_large_value():
    """Rank 0 has a value beside which 16 bits cannot hold a one; all others have ones."""
    found = []
    for kind, dtype in itertools.product(both_kinds(), HALF_PRECISION):
        large = 2 / torch.finfo(dtype).eps
        mine = large if rank() == 0 else 1.0
        assert torch.tensor(large, dtype=dtype) + 1 == large
        shard = torch.empty(1)
        buffer = kind.new_buffer(world_size(), dtype, CPU).fill_(mine)
        kind.reduce_scatter_mean(buffer, shard).wait()
        buffer = kind.new_buffer(world_size(), dtype, CPU).fill_(mine)
        kind.all_reduce_mean(buffer).wait()
        exact = torch.tensor([(large + world_size() - 1) / world_size()])
        found.append((shard / exact - 1).abs().item() < 1e-6)
        found.append(torch.equal(buffer, exact.to(dtype).expand(world_size())))
    return found


def test_ones_are_not_lost_beside_a_large_value_in_16_bits():
    for found in run_distributed(ones_beside_a_large_value, 3):
        assert found == [True] * 8


def many_at_once():
    """200 operations of very different lengths, all started, then waited for in mixed order."""
    for kind in both_kinds():
        mixed = random.Random(rank())  # on each rank another
        if rank() == world_size() - 1:
            time.sleep(0.2)  # the others are far ahead
        started = []
        for seed in range(200):
            numel = world_size() * [1, 5_000, 3, 40, 700][seed % 5]
            dtype = DTYPES[seed % 3]
            buffer = new_buffer(kind, seed, numel, dtype)
            if seed % 2:
                started.append((kind.all_reduce_mean(buffer), buffer, seed, numel, dtype))
            else:
                shard = torch.empty(numel // world_size(), dtype=dtype)
                started.append((kind.reduce_scatter_mean(buffer, shard), shard, seed, numel, dtype))
        mixed.shuffle(started)
        for work, result, seed, numel, dtype in started:
            work.wait()
            parts = values_of_all(seed, numel, dtype)
            assert_is_mean(result, parts if seed % 2 else [own_shard(part) for part in parts])


@pytest.mark.parametrize("size", SIZES)
def test_many_operations_at_once_are_waited_for_in_any_order(size):
    run_distributed(many_at_once, size)


def few_descriptors():
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    if os.getuid() == 0:
        os.setresuid(65534, 65534, 65534)  # the kernel limits descriptors in flight for users alone
    many_at_once()


def test_the_number_of_buffers_is_not_limited_by_that_of_descriptors():
    run_distributed(few_descriptors, 3)


@dataclass(frozen=True)
class Step:
    """One operation of a schedule.

    `delays` are, by rank, how many more operations are started before this one is waited for;
    `naps` tell, by rank, whether it sleeps a little before it starts and before it waits.
    """

    name: str
    length: int
    dtype: torch.dtype
    delays: tuple[int, ...]
    naps: tuple[tuple[bool, bool], ...]
    recycles: bool


def schedules(size):
    nap = st.integers(0, 9).map(lambda number: number == 0)
    step = st.builds(
        Step,
        st.sampled_from(["reduce_scatter_mean", "all_reduce_mean", "all_gather", "all_reduce_max"]),
        st.sampled_from([1, 2, 30, 4000]),
        st.sampled_from(DTYPES),
        st.tuples(*[st.integers(0, 6)] * size),
        st.tuples(*[st.tuples(nap, nap)] * size),
        st.booleans(),
    )
    return st.lists(step, min_size=1, max_size=25)


class Player:
    """Carries a schedule out on one rank, and checks every result."""

    def __init__(self, kind):
        self.kind = kind
        self.kept = defaultdict(list)  # buffers that were not recycled, to be written again

    def play(self, schedule, seed):
        due = defaultdict(list)
        for place, step in enumerate(schedule):
            if step.naps[rank()][0]:
                time.sleep(0.002)
            due[place + step.delays[rank()]].append((step, self.start(step, seed + place)))
            for waiting, finish in due.pop(place, []):
                self.finish(waiting, finish)
        for place in sorted(due):
            for waiting, finish in due[place]:
                self.finish(waiting, finish)

    def finish(self, step, finish):
        if step.naps[rank()][1]:
            time.sleep(0.002)
        finish()

    def start(self, step, seed):
        numel = step.length * world_size()
        dtype = torch.uint8 if step.name == "all_reduce_max" else step.dtype
        parts = values_of_all(seed, numel, step.dtype)
        if dtype == torch.uint8:
            parts = [(part > 0.5).to(dtype) for part in parts]
        kept = self.kept[numel, dtype]
        if kept:
            buffer = kept.pop()
            self.kind.wait_until_writable(buffer)
        else:
            buffer = self.kind.new_buffer(numel, dtype, CPU)
        buffer.copy_(parts[rank()])
        result = buffer
        operation = getattr(self.kind, step.name)
        if step.name == "reduce_scatter_mean":
            result = torch.empty(step.length, dtype=dtype)
            work = operation(buffer, result)
        elif step.name == "all_reduce_max":
            result = torch.empty(numel, dtype=dtype)
            work = operation(buffer, result)
        else:
            work = operation(buffer)

        def finish():
            work.wait()
            self.check(step, result, parts)
            if step.recycles:
                self.kind.recycle(buffer)
            else:
                kept.append(buffer)

        return finish

    def check(self, step, result, parts):
        if step.name == "all_gather":
            pieces = [part.chunk(world_size())[owner] for owner, part in enumerate(parts)]
            assert torch.equal(result, torch.cat(pieces))
        elif step.name == "all_reduce_max":
            assert torch.equal(result, torch.stack(parts).amax(0))
        elif step.name == "all_reduce_mean":
            assert_is_mean(result, parts)
        else:
            assert_is_mean(result, [own_shard(part) for part in parts])


def play_all(all_schedules):
    for kind in both_kinds():
        player = Player(kind)
        for number, schedule in enumerate(all_schedules):
            player.play(schedule, seed=1000 * number)


@pytest.mark.parametrize("size", SIZES)
def test_any_schedule_gives_the_reference(size):
    run_distributed(play_all, size, draw(schedules(size), 20))


def ranks_of_changing_speed(rounds):
    """Two buffers are in flight at a time; each rank sleeps now and then, at any place."""
    for kind in both_kinds():
        clock = random.Random(rank())
        shards = [torch.empty(1000), torch.empty(3000)]
        with mock.patch.object(
            SharedMemory, "allocate", autospec=True, side_effect=SharedMemory.allocate
        ) as allocate:
            for number in range(rounds):
                works = []
                for shard in shards:
                    buffer = kind.new_buffer(len(shard) * world_size(), torch.float32, CPU)
                    buffer.fill_(number + rank())
                    works.append((kind.reduce_scatter_mean(buffer, shard), buffer))
                    if clock.random() < 0.15:
                        time.sleep(0.003 * clock.random())
                for (work, buffer), shard in zip(works, shards, strict=True):
                    work.wait()
                    mean = number + (world_size() - 1) / 2
                    assert (shard - mean).abs().max() < 1e-4, f"round {number}"
                    kind.recycle(buffer)
            if isinstance(kind, SharedMemoryCollectives):
                assert allocate.call_count <= 2 * (MOST_UNREAD + 1)
                assert len(kind._memory.messages) < 20


@pytest.mark.parametrize("size", SIZES)
def test_recycled_buffers_stay_right_and_few_at_any_speed(size):
    run_distributed(ranks_of_changing_speed, size, 200)


def run_ahead():
    """Rank 1 has begun ten operations and sleeps; rank 0 could finish all of its own meanwhile."""
    kind = open_collectives(CPU)
    shard = torch.empty(2)
    if rank() == 1:
        buffers = [kind.new_buffer(4, torch.float32, CPU).fill_(value) for value in range(10)]
        works = [kind.reduce_scatter_mean(buffer, shard) for buffer in buffers]
        torch_dist.barrier()
        for value, work in enumerate(works):
            time.sleep(0.01)
            work.wait()
            if value == 9:
                assert shard.tolist() == [9, 9]
        return 0
    torch_dist.barrier()
    with mock.patch.object(
        SharedMemory, "allocate", autospec=True, side_effect=SharedMemory.allocate
    ) as allocate:
        for value in range(10):
            buffer = kind.new_buffer(4, torch.float32, CPU).fill_(value)
            kind.reduce_scatter_mean(buffer, shard).wait()
            assert shard.tolist() == [value, value]
            kind.recycle(buffer)
    return allocate.call_count


def test_a_rank_that_is_far_ahead_waits_instead_of_taking_more_memory():
    assert max(run_distributed(run_ahead, 2)) <= MOST_UNREAD


def lend_again_what_is_being_read():
    """Rank 0 has done its part with a buffer that rank 1 has not read."""
    for kind in both_kinds():
        buffer = kind.new_buffer(4, torch.float32, CPU).fill_(1 + rank())
        shard = torch.empty(2)
        if rank() == 1:
            work = kind.reduce_scatter_mean(buffer, shard)
        torch_dist.barrier()
        if rank() == 0:
            kind.reduce_scatter_mean(buffer, shard).wait()
            kind.recycle(buffer)
            kind.new_buffer(4, torch.float32, CPU).fill_(-1)
        torch_dist.barrier()
        if rank() == 1:
            work.wait()
        assert shard.tolist() == [1.5, 1.5]


def write_again_what_is_being_read():
    """Rank 0 has all shards while rank 1 has not read rank 0's, and writes its own again."""
    for kind in both_kinds():
        buffer = kind.new_buffer(2, torch.float32, CPU).fill_(rank())
        work = kind.all_gather(buffer) if rank() == 1 else None
        torch_dist.barrier()
        if rank() == 1:
            time.sleep(0.1)
        work = work or kind.all_gather(buffer)
        work.wait()
        assert buffer.tolist() == [0, 1]
        kind.wait_until_writable(buffer)
        own_shard(buffer).fill_(-1)


def test_a_buffer_is_not_written_while_another_rank_reads_it():
    run_distributed(lend_again_what_is_being_read, 2)
    run_distributed(write_again_what_is_being_read, 2)


def lend_what_is_free_beside_what_is_not():
    kind = open_collectives(CPU)
    shard = torch.empty(2)
    buffers = [kind.new_buffer(4, torch.float32, CPU) for _ in range(MOST_UNREAD + 2)]
    if rank() == 1:
        works = [kind.reduce_scatter_mean(buffer, shard) for buffer in buffers]
        torch_dist.barrier()
        works[1].wait()
        torch_dist.barrier()
        torch_dist.barrier()
        return
    works = [kind.reduce_scatter_mean(buffer, shard) for buffer in buffers[:2]]
    torch_dist.barrier()
    torch_dist.barrier()
    works += [kind.reduce_scatter_mean(buffer, shard) for buffer in buffers[2:]]
    works[-1].wait()
    for buffer in reversed(buffers):
        kind.recycle(buffer)
    kind.new_buffer(4, torch.float32, CPU)
    torch_dist.barrier()


def test_a_free_buffer_is_lent_at_once_although_others_are_still_read():
    run_distributed(lend_what_is_free_beside_what_is_not, 2, timeout=5)


def count_bytes():
    """Of each operation, in shards of the buffer."""
    counts = []
    for kind, dtype in itertools.product(both_kinds(), DTYPES):
        buffer = kind.new_buffer(30 * world_size(), dtype, CPU).zero_()
        shard = torch.empty(30, dtype=dtype)
        sent = [kind.bytes_sent]
        kind.reduce_scatter_mean(buffer, shard).wait()
        sent.append(kind.bytes_sent)
        kind.all_gather(buffer).wait()
        sent.append(kind.bytes_sent)
        kind.all_reduce_mean(buffer).wait()
        sent.append(kind.bytes_sent)
        counts.append([(b - a) / shard.nbytes for a, b in itertools.pairwise(sent)])
    return counts


@pytest.mark.parametrize("size", SIZES)
def test_an_all_reduce_counts_as_the_bytes_of_both_its_halves(size):
    expected = [[size - 1, size - 1, 2 * (size - 1)]] * len(DTYPES) * 2
    assert run_distributed(count_bytes, size) == [expected] * size


def time_waits():
    """Seconds waited, by the clock that each call of it moves on by one: before, and after each."""
    counts = []
    for kind in both_kinds():
        buffer = kind.new_buffer(30 * world_size(), torch.float32, CPU).zero_()
        flags = kind.new_buffer(4, torch.uint8, CPU).zero_()
        clock = SimpleNamespace(perf_counter=itertools.count().__next__)
        with mock.patch("dist.wait_time.time", clock):
            waited = [kind.wait_time.seconds()]
            for start, arguments in (
                (kind.reduce_scatter_mean, (buffer, torch.empty(30))),
                (kind.all_gather, (buffer,)),
                (kind.all_reduce_mean, (buffer,)),
                (kind.all_reduce_max, (flags, torch.empty_like(flags))),
            ):
                work = start(*arguments)
                assert kind.wait_time.seconds() == waited[-1]
                work.wait()
                waited.append(kind.wait_time.seconds())
        counts.append(waited)
    return counts


def test_each_wait_for_other_ranks_is_counted_once_and_its_start_is_not():
    assert run_distributed(time_waits, 2) == [[[0, 1, 2, 3, 4]] * 2] * 2


def different_lengths():
    kind = open_collectives(CPU)
    with pytest.raises(RuntimeError, match="ranks are at different collectives") as caught:
        kind.all_reduce_mean(kind.new_buffer(12 + 12 * rank(), torch.float32, CPU)).wait()
    return str(caught.value)


def test_ranks_at_different_collectives_are_told_so():
    first, *_ = run_distributed(different_lengths, 3)
    assert "rank 0 has a buffer of 48 bytes, rank 1 one of 96" in first


def open_with_one_rank_that_cannot():
    """What is opened when rank 1 alone lacks something; and, last, when none does."""
    opened = []

    def open_one(patch=None):
        start = time.monotonic()
        if patch is not None and rank() == 1:
            with patch:
                opened.append(type(open_collectives(CPU)).__name__)
        else:
            opened.append(type(open_collectives(CPU)).__name__)
        assert time.monotonic() - start < 5

    def refused(*_):
        raise PermissionError("forbidden here")

    whole = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, whole[1]))
    open_one()
    resource.setrlimit(resource.RLIMIT_FSIZE, whole)
    space = resource.getrlimit(resource.RLIMIT_AS)
    if rank() == 1:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, space[1]))
    open_one()
    resource.setrlimit(resource.RLIMIT_AS, space)
    open_one(mock.patch.object(os, "memfd_create", refused))
    open_one(mock.patch.object(shared_memory_collectives, "host_key", return_value="another"))
    open_one(mock.patch.object(socket, "send_fds", refused))
    open_one(mock.patch.object(shared_memory_collectives, "call", refused))
    open_one(mock.patch.object(shared_memory_collectives, "answer", refused))
    open_one()
    return opened


def test_all_ranks_use_gloo_where_one_cannot_share_memory():
    expected = ["GlooCollectives"] * 7 + ["SharedMemoryCollectives"]
    assert run_distributed(open_with_one_rank_that_cannot, 3, timeout=40) == [expected] * 3


def open_without_linux():
    del os.memfd_create
    return type(open_collectives(CPU)).__name__


def test_all_ranks_use_gloo_where_there_is_no_such_memory():
    assert run_distributed(open_without_linux, 2) == ["GlooCollectives"] * 2


def linked():
    listener, name = listen()
    names = all_gather_objects(name)
    links = call(names, rank(), timeout_seconds())
    torch_dist.barrier()
    links |= answer(listener, names, rank(), timeout_seconds())
    listener.close()
    return SharedMemory(rank(), links, timeout_seconds())


def pieces_of_all_sizes():
    """Sizes from below to above a huge page's; every rank's are seen by the others as written."""
    memory = linked()
    sizes = [5000, HUGE_PAGE, 100, 3 * HUGE_PAGE + 1, HUGE_PAGE - 1, 2 * HUGE_PAGE]
    starts = []
    for number, nbytes in enumerate(sizes):
        start, piece = memory.allocate(nbytes)
        assert len(piece) == nbytes
        assert not piece.any()
        piece.fill_(10 * rank() + number)
        starts.append(start)
    torch_dist.barrier()
    for number, (start, nbytes) in enumerate(zip(starts, sizes, strict=True)):
        for other in range(world_size()):
            assert (memory.part_of(other, start, nbytes) == 10 * other + number).all()
    with pytest.raises(MemoryError):
        memory.allocate(2**60)
    return [
        start % HUGE_PAGE
        for start, nbytes in zip(starts, sizes, strict=True)
        if nbytes >= HUGE_PAGE
    ]


def test_large_pieces_of_memory_begin_where_huge_pages_can():
    assert run_distributed(pieces_of_all_sizes, 3, timeout=20) == [[0, 0, 0]] * 3


MESSAGES = 20_000  # several times as many as a socket holds


def send_to_one_who_does_not_read():
    memory = linked()
    if rank() == 1:
        torch_dist.barrier()
        time.sleep(0.3)
    else:
        memory.tell_all(1, 0)
        torch_dist.barrier()
    for number in range(1, MESSAGES):
        if rank() == 0:
            memory.tell_all(1, number, 7, number)
    if rank() == 1:
        memory.wait_for_all(1, MESSAGES - 1)
        assert memory.messages[1, 12345] == {0: (7, 12345)}
        assert len(memory.messages) == MESSAGES


def send_before_reading():
    memory = linked()
    for number in range(MESSAGES):
        memory.tell_all(1, number)
    memory.wait_for_all(1, MESSAGES - 1)
    assert memory.messages.keys() == {(1, number) for number in range(MESSAGES)}
    assert all(len(heard) == world_size() - 1 for heard in memory.messages.values())
    torch_dist.barrier()


def test_a_full_socket_blocks_nobody_for_ever():
    run_distributed(send_to_one_who_does_not_read, 2, timeout=20)
    run_distributed(send_before_reading, 3, timeout=20)


def last_words(speaks):
    """Rank 1 ends without having read what rank 0 said."""
    memory = linked()
    for number in range(100):
        memory.tell_all(1, number)
    torch_dist.barrier()
    if rank() == 1:
        del memory
        gc.collect()
    torch_dist.barrier()
    if rank() == 0:
        if speaks:
            memory.tell_all(2, 0)  # to nobody
        memory.wait_for_all(1, 99)
        start = time.monotonic()
        with pytest.raises(LostRankError, match="rank 1 has ended while rank 0 was waiting for it"):
            memory.wait_for_all(1, 100)
        assert time.monotonic() - start < 1
        memory.tell_all(2, 0)


@pytest.mark.parametrize("speaks", [False, True])
def test_the_last_words_of_a_rank_are_heard_after_its_end(speaks):
    run_distributed(last_words, 2, speaks)


LINES = 8


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_mean_into_targets_that_are_also_parts(dtype, count, monkeypatch):
    monkeypatch.setattr(collectives, "CHUNK", LINES)
    whole = LINES * torch.get_num_threads()
    for length in (0, 1, whole - 1, whole, whole + 1, 3 * whole - 1, 3 * whole + 1):
        parts = [values_of(owner, length, length, dtype) for owner in range(count)]
        before = [part.clone() for part in parts]
        other = torch.empty(length, dtype=torch.float64)
        mean_into([*parts[1:], other], parts, count)
        for result in parts[1:]:
            assert_is_mean(result, before)
        assert torch.equal(parts[0], before[0])
        assert_is_mean(other.float() if dtype != torch.float64 else other, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6])
def test_a_mean_does_not_depend_on_where_an_element_lies(dtype, count):
    """Shards are cut anywhere, and a vector unit takes the last elements one by one."""
    length = 67
    parts = [values_of(owner, length, length, dtype) for owner in range(count)]
    whole, piecewise = torch.empty(length), torch.empty(length)
    if dtype not in (torch.bfloat16, torch.float16):
        whole, piecewise = whole.to(dtype), piecewise.to(dtype)
    mean_into([whole], parts, count)
    for start in range(0, length, 3):
        piece = slice(start, start + 3)
        mean_into([piecewise[piece]], [part[piece] for part in parts], count)
    assert torch.equal(whole, piecewise)
