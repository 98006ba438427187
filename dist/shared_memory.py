"""Memory that the processes of one host share, and the word that they pass each other about it.

Between any two ranks there is one Unix socket. It carries three things: at the beginning, the
descriptor of each other's memory; then short messages, such as "my gradients of operation 7 lie at
byte 4096"; and, by its end of file, the news that the other process is gone. So nobody polls a
flag, and nobody waits in shared memory for a process that has died. A message is also what orders
memory between two cores: what was written before it was sent is seen by whoever has received it.

A rank's memory is one file as large as all its buffers could ever be. The kernel provides pages for
what is written alone, so it costs nothing, and the number of buffers has no limit: a descriptor for
each would soon meet that of 1024 that most systems set, on those open and on those in flight.

Nothing here has a name that could outlive the processes. The memory is anonymous (`memfd_create`)
and exists as long as somebody maps it, the sockets live in Linux's abstract name space: after any
kind of end, kill -9 included, the kernel has taken all of it back. Nor does a container's small
/dev/shm limit it.
"""

import contextlib
import mmap
import os
import secrets
import select
import socket
import struct
import sys
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dist.huge_pages import HUGE_PAGE, collapse, map_file

# kind, operation, first byte, size
MESSAGE = struct.Struct("<4Q")
LARGEST_SEND_BUFFER = 2**21
# Half of what a process can address: all ranks' memory together is mapped to no more.
LARGEST_ADDRESS_SPACE = 2**46
# All ranks are there and listen when links are made: who does not answer now never will.
LINK_TIMEOUT_SECONDS = 30.0


# All that this process has links of. A child that is forked later would keep them open, and hide
# from the other ranks that this one has died.
_linked: "weakref.WeakSet[SharedMemory]" = weakref.WeakSet()


def _close_links_in_child() -> None:
    for memory in list(_linked):
        memory.close_links()


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_close_links_in_child)


class LostRankError(RuntimeError):
    """Another process has gone, or is silent for longer than the time-out."""


class SharedMemory:
    """Memory of every rank, and links from this one to all others; all of one host.

    Every rank must construct it.

    Args:
        rank: of this process.
        sockets: by rank, from `call` and `answer`.
        timeout: seconds for each wait.

    Attributes:
        rank, world_size: of this process.
        messages: (kind, operation) -> rank -> (first byte, size), as received and not yet used.

    Raises:
        OSError: the memory cannot be exchanged or mapped.
    """

    def __init__(self, rank: int, sockets: dict[int, socket.socket], timeout: float) -> None:
        self.rank, self.world_size = rank, len(sockets) + 1
        self.messages: dict[tuple[int, int], dict[int, tuple[int, int]]] = defaultdict(dict)
        self._sockets = sockets
        self._timeout = timeout
        self._gone: set[int] = set()
        self._memories = _exchange_memory(rank, sockets)
        self._num_used = 0
        self._poll = select.poll()
        self._ranks = {link.fileno(): other for other, link in sockets.items()}
        for link in sockets.values():
            link.setblocking(False)
            with contextlib.suppress(OSError):
                link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LARGEST_SEND_BUFFER)
            self._poll.register(link, select.POLLIN)
        _linked.add(self)

    def close_links(self) -> None:
        """Close this process's ends; others see that only if no other process has them open."""
        for link in self._sockets.values():
            link.close()

    def allocate(self, nbytes: int) -> tuple[int, Tensor]:
        """New memory that every rank can read and write: (its first byte, uint8 of nbytes).

        Raises:
            MemoryError: this rank has been given more than the machine has.
        """
        unit = HUGE_PAGE if nbytes >= HUGE_PAGE else mmap.PAGESIZE
        start = -(-self._num_used // unit) * unit
        memory = self._memories[self.rank]
        size = len(memory) - HUGE_PAGE  # another rank may have mapped that much less
        if start + nbytes > size:
            raise MemoryError(f"{nbytes} bytes after {start}: the machine has {size}")
        self._num_used = start + -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        collapse(memory, start, nbytes)
        return start, self.part_of(self.rank, start, nbytes)

    def part_of(self, rank: int, start: int, nbytes: int) -> Tensor:
        """Part of some rank's memory, uint8.

        It is a tensor with a storage of its own: torch.save writes whole storages.
        """
        memory = self._memories[rank]
        return torch.frombuffer(memory, dtype=torch.uint8, count=nbytes, offset=start)

    def tell_all(self, kind: int, operation: int, start: int = 0, size: int = 0) -> None:
        """Send a message to every other rank."""
        message = MESSAGE.pack(kind, operation, start, size)
        for other in self._sockets:
            self._send(other, message)

    def heard_from_all(self, kind: int, operation: int) -> bool:
        """Whether every other rank's message has been received; receives what has come."""
        if len(self.messages[kind, operation]) < self.world_size - 1:
            self._receive()
        return len(self.messages[kind, operation]) == self.world_size - 1

    def wait_for_all(self, kind: int, operation: int) -> None:
        """Wait for every other rank's message.

        Raises:
            LostRankError: a rank that is still missing has gone, or the time-out has passed.
        """
        if not self.heard_from_all(kind, operation):
            heard = self.messages[kind, operation]
            self._wait(
                lambda: len(heard) == self.world_size - 1,
                lambda: [other for other in self._sockets if other not in heard],
            )

    def _send(self, other: int, message: bytes) -> None:
        link = self._sockets[other]
        if other in self._gone:
            return

        def sent() -> bool:
            with contextlib.suppress(BlockingIOError):
                link.send(message)
                return True
            return False

        try:
            if not sent():
                # The other is far behind. It may be waiting for room here in turn: keep reading.
                self._poll.modify(link, select.POLLIN | select.POLLOUT)
                try:
                    self._wait(sent, lambda: [other])
                finally:
                    if other not in self._gone:
                        self._poll.modify(link, select.POLLIN)
        except (BrokenPipeError, ConnectionResetError):
            # It has ended, which matters only to those who still wait for a word of its. Its last
            # words may be unread: whether it is gone, `_receive` finds out after them.
            pass

    def _wait(self, is_over: Callable[[], bool], missing: Callable[[], list[int]]) -> None:
        deadline = time.monotonic() + self._timeout
        while not is_over():
            lost = [other for other in missing() if other in self._gone]
            if lost:
                raise LostRankError(
                    f"rank {lost[0]} has ended while rank {self.rank} was waiting for it"
                )
            left = deadline - time.monotonic()
            if left <= 0:
                raise LostRankError(
                    f"Timed out after {self._timeout:g} s: rank {self.rank} waited for rank "
                    f"{missing()[0]}"
                )
            self._poll.poll(min(left * 1000 + 1, 2**31 - 1))
            self._receive()

    def _receive(self) -> None:
        for descriptor, _ in self._poll.poll(0):
            other = self._ranks[descriptor]
            link = self._sockets[other]
            while True:
                try:
                    message = link.recv(MESSAGE.size)
                except BlockingIOError:
                    break
                except ConnectionResetError:
                    continue  # it ended without reading all of ours; its own words come next
                if not message:
                    self._gone.add(other)
                    self._poll.unregister(link)
                    break
                kind, operation, start, size = MESSAGE.unpack(message)
                self.messages[kind, operation][other] = (start, size)


def host_key() -> str:
    """Equal for processes that can share memory: one kernel, one network name space, one user."""
    if sys.platform != "linux":
        return secrets.token_hex()  # like nobody's
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return f"{boot} {os.stat('/proc/self/ns/net').st_ino} {os.getuid()}"


def may_allocate() -> bool:
    """Whether this process may make memory of any size: a limit on files' sizes counts here too."""
    with contextlib.suppress(OSError, AttributeError):  # only Linux has it
        descriptor = os.memfd_create("probe")
        try:
            os.ftruncate(descriptor, 2**40)  # no page of it is ever touched
            return True
        finally:
            os.close(descriptor)
    return False


def listen() -> tuple[socket.socket, str]:
    """A socket for the others to connect to, and its (abstract) name."""
    name = secrets.token_hex(16)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(b"\0" + name.encode())
    listener.listen(socket.SOMAXCONN)
    return listener, name


def call(names: Sequence[str], rank: int, timeout: float) -> dict[int, socket.socket]:
    """Links to all lower ranks, by rank.

    Args:
        names: of all ranks' listeners, by rank; all of them are listening.
        rank: of this process.
        timeout: seconds for each wait.

    Raises:
        OSError: a link cannot be made.
    """
    links = {}
    for other in range(rank):
        link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        link.settimeout(timeout)
        link.connect(b"\0" + names[other].encode())
        link.send(f"{rank} {names[rank]}".encode())
        links[other] = link
    return links


def answer(
    listener: socket.socket, names: Sequence[str], rank: int, timeout: float
) -> dict[int, socket.socket]:
    """Links to all higher ranks, by rank; all of them have called.

    Args:
        listener: this rank's own, from `listen`.
        names: of all ranks' listeners, by rank.
        rank: of this process.
        timeout: seconds for each wait.

    Raises:
        OSError: a link cannot be made.
    """
    links: dict[int, socket.socket] = {}
    listener.settimeout(timeout)
    while len(links) < len(names) - 1 - rank:
        link, _ = listener.accept()
        link.settimeout(timeout)
        # Anybody on the machine can connect to an abstract name: believe our own user only.
        credentials = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        _, user, _ = struct.unpack("3i", credentials)
        text = link.recv(100).decode(errors="replace").split() if user == os.getuid() else []
        if len(text) == 2 and text[1] in names[rank + 1 :]:
            links[int(text[0])] = link
        else:
            link.close()
    return links


def _exchange_memory(rank: int, sockets: dict[int, socket.socket]) -> list[mmap.mmap]:
    """Every rank's memory, by rank."""
    world_size = len(sockets) + 1
    memories = []
    try:
        # One rank after the other, so that few descriptors are in flight at a time.
        for owner in range(world_size):
            descriptor = _create(world_size) if owner == rank else _receive_from(sockets[owner])
            try:
                memories.append(map_file(descriptor, os.fstat(descriptor).st_size))
                if owner == rank:
                    for link in sockets.values():
                        socket.send_fds(link, [b"memory"], [descriptor])
            finally:
                os.close(descriptor)
    except OSError:
        for link in sockets.values():
            link.close()  # then the others do not wait for this rank's
        raise
    return memories


def _create(world_size: int) -> int:
    """The descriptor of a memory file that is larger than all that a rank can ever fill."""
    largest = os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE
    largest = min(largest, LARGEST_ADDRESS_SPACE // world_size)
    descriptor = os.memfd_create("buckets")
    try:
        os.ftruncate(descriptor, largest // mmap.PAGESIZE * mmap.PAGESIZE)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _receive_from(link: socket.socket) -> int:
    _, descriptors, _, _ = socket.recv_fds(link, 100, 1)
    if not descriptors:
        raise ConnectionError("another rank could not give its memory")
    return descriptors[0]
