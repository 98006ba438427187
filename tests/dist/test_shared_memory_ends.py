"""However the ranks end, the others end soon after, and neither memory nor sockets stay."""

import contextlib
import gc
import io
import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from dist.collectives import rank
from dist.ddp import DDP
from dist.process_group import init_process_group, shut_down
from dist.sharded_optimizer import ShardedOptimizer
from dist.shared_memory_collectives import SharedMemoryCollectives
from tests.harness import DistributedError, run_distributed

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is shared on Linux alone")

TIMEOUT_SECONDS = 2.0
RANKS, TROUBLE_RANK, TROUBLE_STEP, STEPS = 3, 1, 2, 4
LAYERS, WIDTH = 5, 1024  # 4 MB each: a rank shares 20 MB of gradients and, if sharded, of weights


def get_into(trouble):
    if trouble == "raise":
        raise ValueError("the cat sat on the keyboard")
    if trouble == "kill beside a child" and os.fork() == 0:
        time.sleep(600)  # as a loader of data would live on
    if trouble.startswith("kill"):
        os.kill(os.getpid(), signal.SIGKILL)
    if trouble == "sleep":
        time.sleep(600)


def make_model(sharded):
    layers = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
    ddp = DDP(layers, bucket_cap_mb=5)
    assert isinstance(ddp.collectives, SharedMemoryCollectives)
    optimizer_cls = torch.optim.SGD
    if sharded:
        return ddp, ShardedOptimizer(ddp.parameters(), optimizer_cls, ddp=ddp, lr=0.01)
    return ddp, optimizer_cls(ddp.parameters(), lr=0.01)


def train(sharded, trouble, where, folder):
    """A few steps; one rank gets into trouble at some place."""
    world = init_process_group("gloo", "cpu", TIMEOUT_SECONDS)
    ddp, optimizer = make_model(sharded)
    step = 0

    def now(place):
        if (world.rank, step, place) == (TROUBLE_RANK, TROUBLE_STEP, where):
            Path(folder, "trouble").write_text(str(time.monotonic()))
            get_into(trouble)

    def in_backward(*_):
        assert sent < ddp.collectives.bytes_sent  # so the others have begun to use this bucket
        now("in backward")

    def in_forward(*_):
        if sharded and step:
            assert optimizer._layout.gather._works  # the later layers' weights are on their way
        now("in forward")

    ddp.module[1].register_forward_pre_hook(in_forward)
    ddp.module[1].register_full_backward_hook(in_backward)
    for step in range(STEPS):
        inputs = torch.ones(2, WIDTH, requires_grad=True)
        loss = ddp(inputs).square().mean()
        now("before backward")
        sent = ddp.collectives.bytes_sent
        loss.backward()
        ddp.finish_gradient_sync()
        if step == 0:
            note_what_is_held(folder)
        now("before the optimizer")
        optimizer.step()
        optimizer.zero_grad()
    shut_down(world)


def note_what_is_held(folder):
    """Write down which shared memory and named sockets this process has."""
    links = [Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    descriptors = {os.readlink(link) for link in links if link.is_symlink()}
    sockets = [name for inode, name in named_sockets() if f"socket:[{inode}]" in descriptors]
    files = named_memory("self")
    memory = mapped_memory("self")
    held = {"memory": sorted(memory), "sockets": sockets, "files": sorted(files)}
    Path(folder, f"held by {rank()}").write_text(json.dumps(held))


def mapped_memory(process):
    """The inodes of bucket memory that a process has mapped."""
    with contextlib.suppress(OSError):  # it has ended meanwhile, or is another user's
        lines = Path("/proc", process, "maps").read_text().splitlines()
        return {line.split()[4] for line in lines if "memfd:buckets" in line}
    return set()


def named_sockets():
    """Inode and name of all sockets that have a name in Linux's abstract name space."""
    lines = Path("/proc/net/unix").read_text().splitlines()
    return [line.split()[6:8] for line in lines if " @" in line]


def open_memory(process):
    """The inodes of bucket memory that a process has a descriptor of."""
    found = set()
    with contextlib.suppress(OSError):
        for descriptor in Path("/proc", process, "fd").iterdir():
            with contextlib.suppress(OSError):
                if "memfd:buckets" in os.readlink(descriptor):
                    found.add(str(descriptor.stat().st_ino))
    return found


def named_memory(process):
    """The files of shared memory that a process has mapped or open."""
    found = set()
    with contextlib.suppress(OSError):
        lines = Path("/proc", process, "maps").read_text().splitlines()
        found |= {line.split(maxsplit=5)[5] for line in lines if " /dev/shm/" in line}
        for descriptor in Path("/proc", process, "fd").iterdir():
            with contextlib.suppress(OSError):
                found.add(os.readlink(descriptor))
    return {path for path in found if path.startswith("/dev/shm/")}


def all_named_memory():
    return {str(path) for path in Path("/dev/shm").iterdir()}


@pytest.fixture
def _nothing_stays(tmp_path):
    """What the ranks noted is gone after the test, and so is their memory."""
    before = all_named_memory()
    yield
    notes = [json.loads(path.read_text()) for path in tmp_path.glob("held by *")]
    memory = {inode for note in notes for inode in note["memory"]}
    sockets = {name for note in notes for name in note["sockets"]}
    files = {path for note in notes for path in note["files"]}
    assert len(notes) == len(memory) == RANKS
    assert len(sockets) == RANKS - 1  # those of the ranks that others called
    assert not sockets & {name for _, name in named_sockets()}

    def left():
        processes = list(filter(str.isdecimal, os.listdir("/proc")))
        held = {inode for p in processes for inode in mapped_memory(p) | open_memory(p)}
        # What a living process holds is another test's, unless a rank had it.
        others = {path for p in processes for path in named_memory(p)} - files
        return memory & held, all_named_memory() - before - others

    # A process that has just ended may still be letting go.
    deadline = time.monotonic() + 5
    while any(left()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left() == (set(), set())


def fail(sharded, trouble, where, folder):
    """The failures by rank, and when the trouble began, in seconds after the start."""
    start = time.monotonic()
    with pytest.raises(DistributedError) as caught:
        run_distributed(train, RANKS, sharded, trouble, where, str(folder), process_group=False)
    return caught.value.failures, float((folder / "trouble").read_text()) - start


PLACES = ["before backward", "in backward", "before the optimizer", "in forward"]


@pytest.mark.usefixtures("_nothing_stays")
@pytest.mark.parametrize("trouble", ["raise", "kill"])
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("sharded", [False, True], ids=["plain", "sharded"])
def test_a_dead_rank_is_noticed_and_named_at_once(sharded, where, trouble, tmp_path):
    failures, began = fail(sharded, trouble, where, tmp_path)
    kinds = {"raise": "ValueError", "kill": "killed by signal 9"}
    assert failures[TROUBLE_RANK].kind == kinds[trouble]
    others = sorted((failures[0], failures[2]), key=lambda failure: failure.seconds)
    for failure in others:
        assert failure.kind == "LostRankError"
        assert failure.seconds < began + TIMEOUT_SECONDS
    # The second may have found out by the end of the first.
    assert others[0].message == (
        f"rank {TROUBLE_RANK} has ended while rank {others[0].rank} was waiting for it"
    )
    assert "has ended while" in others[1].message


@pytest.mark.usefixtures("_nothing_stays")
def test_a_child_of_a_dead_rank_does_not_hide_its_end(tmp_path):
    failures, _ = fail(True, "kill beside a child", "in backward", tmp_path)
    others = [failures[other].message for other in range(RANKS) if other != TROUBLE_RANK]
    assert any(f"rank {TROUBLE_RANK} has ended while" in message for message in others), others
    assert all("has ended while" in message for message in others), others


@pytest.mark.usefixtures("_nothing_stays")
@pytest.mark.parametrize(
    ("sharded", "where"), [(False, "before backward"), (True, "in backward"), (True, "in forward")]
)
def test_a_silent_rank_is_given_up_after_the_timeout(sharded, where, tmp_path, monkeypatch):
    monkeypatch.setattr("tests.harness.SECONDS_AFTER_A_FAILURE", 1.5)
    failures, began = fail(sharded, "sleep", where, tmp_path)
    assert failures[TROUBLE_RANK].kind == "hang"
    others = sorted((failures[0], failures[2]), key=lambda failure: failure.seconds)
    for failure in others:
        assert failure.kind == "LostRankError"
        assert failure.seconds <= began + TIMEOUT_SECONDS + 5
    waited = f"Timed out after 2 s: rank {others[0].rank} waited for rank {TROUBLE_RANK}"
    assert others[0].message == waited


@pytest.mark.usefixtures("_nothing_stays")
@pytest.mark.parametrize("sharded", [False, True], ids=["plain", "sharded"])
def test_nothing_stays_after_a_good_end(sharded, tmp_path):
    run_distributed(train, RANKS, sharded, None, None, str(tmp_path), process_group=False)


def train_one_model_after_another():
    counts = []
    for _ in range(3):
        ddp, optimizer = make_model(sharded=True)
        ddp(torch.ones(2, WIDTH)).square().mean().backward()
        ddp.finish_gradient_sync()
        optimizer.step()
        counts.append(len(mapped_memory("self")))
        del ddp, optimizer
        gc.collect()
        counts.append(len(mapped_memory("self")))
    return counts


def test_the_memory_of_a_model_that_is_given_up_is_given_back():
    assert run_distributed(train_one_model_after_another, 2) == [[2, 0, 2, 0, 2, 0]] * 2


def saved_size():
    ddp, _ = make_model(sharded=True)
    file = io.BytesIO()
    torch.save(ddp.state_dict(), file)
    return file.tell(), sum(p.nbytes for p in ddp.parameters())


def test_what_torch_saves_of_a_model_is_the_model_and_not_the_memory_around_it():
    for saved, model in run_distributed(saved_size, 2):
        assert saved < 1.1 * model + 100_000
