"""Memory that the processes of one host share, and the word that they pass each other about it.

Between any two ranks there is one Unix socket. It carries three things: the descriptors of memory
to map; short messages, such as "my gradients of operation 7 lie in segment 2"; and, by its end of
file, the news that the other process is gone. So nobody polls a flag, and nobody waits in shared
memory for a process that has died. A message is also what orders memory between two cores: what
was written before it was sent is seen by whoever has received it.

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
from collections import defaultdict
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

# kind, operation, segment, size
MESSAGE = struct.Struct("<4Q")
SEGMENT = 0  # "here is memory of mine"; the other kinds are the users' own
LARGEST_SEND_BUFFER = 2**21
# All ranks are there and listen when links are made: who does not answer now never will.
LINK_TIMEOUT_SECONDS = 30.0


class LostRankError(RuntimeError):
    """Another process has gone, or is silent for longer than the time-out."""


class SharedMemory:
    """Links from this rank to every other, all of one host; made by `connect`.

    Attributes:
        rank, world_size: of this process.
        messages: (kind, operation) -> rank -> (segment, size), as received and not yet used.
    """

    def __init__(
        self, rank: int, world_size: int, sockets: dict[int, socket.socket], timeout: float
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self.messages: dict[tuple[int, int], dict[int, tuple[int, int]]] = defaultdict(dict)
        self._sockets = sockets
        self._timeout = timeout
        self._gone: set[int] = set()
        self._remote: dict[tuple[int, int], Tensor] = {}
        self._num_segments = 0
        self._poll = select.poll()
        self._ranks = {link.fileno(): other for other, link in sockets.items()}
        for link in sockets.values():
            link.setblocking(False)
            with contextlib.suppress(OSError):
                link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LARGEST_SEND_BUFFER)
            self._poll.register(link, select.POLLIN)

    def allocate(self, nbytes: int) -> tuple[int, Tensor]:
        """New memory that every rank can read and write: (its segment, uint8 of nbytes).

        Untouched pages cost nothing. The others map it when the message reaches them.
        """
        segment = self._num_segments
        self._num_segments += 1
        descriptor = os.memfd_create("bucket")
        try:
            os.ftruncate(descriptor, max(nbytes, 1))
            memory = _map(descriptor, nbytes)
            for other in self._sockets:
                self._send(other, MESSAGE.pack(SEGMENT, 0, segment, nbytes), [descriptor])
        finally:
            os.close(descriptor)
        return segment, memory

    def remote(self, rank: int, segment: int) -> Tensor:
        """Another rank's segment, uint8; its message has been received."""
        return self._remote[rank, segment]

    def tell_all(self, kind: int, operation: int, segment: int = 0, size: int = 0) -> None:
        """Send a message to every other rank."""
        message = MESSAGE.pack(kind, operation, segment, size)
        for other in self._sockets:
            self._send(other, message, [])

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

    def _send(self, other: int, message: bytes, descriptors: list[int]) -> None:
        link = self._sockets[other]
        if other in self._gone:
            return

        def sent() -> bool:
            with contextlib.suppress(BlockingIOError):
                if descriptors:
                    socket.send_fds(link, [message], descriptors)
                else:
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
                    message, descriptors, _, _ = socket.recv_fds(link, MESSAGE.size, 1)
                except BlockingIOError:
                    break
                except ConnectionResetError:
                    continue  # it ended without reading all of ours; its own words come next
                if not message:
                    self._gone.add(other)
                    self._poll.unregister(link)
                    break
                kind, operation, segment, size = MESSAGE.unpack(message)
                if kind == SEGMENT:
                    self._remote[other, segment] = _map(descriptors[0], size)
                    os.close(descriptors[0])
                else:
                    self.messages[kind, operation][other] = (segment, size)


def host_key() -> str:
    """Equal for processes that can share memory: one kernel, one network name space, one user."""
    if sys.platform != "linux":
        return secrets.token_hex()  # like nobody's
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return f"{boot} {os.stat('/proc/self/ns/net').st_ino} {os.getuid()}"


def may_allocate() -> bool:
    """Whether this process may make memory of any size: a limit on files' sizes counts here too."""
    with contextlib.suppress(OSError):
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


def connect(
    listener: socket.socket, names: Iterable[str], rank: int, timeout: float
) -> SharedMemory:
    """Link this rank with all others; every rank must call it.

    Args:
        listener: this rank's own, from `listen`.
        names: of all ranks' listeners, by rank; all of them are listening.
        rank: of this process.
        timeout: seconds for each wait later; now it is at most LINK_TIMEOUT_SECONDS.

    Raises:
        OSError: a link cannot be made.
    """
    names = list(names)
    link_timeout = min(timeout, LINK_TIMEOUT_SECONDS)
    sockets: dict[int, socket.socket] = {}
    for other in range(rank):
        link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        link.settimeout(link_timeout)
        link.connect(b"\0" + names[other].encode())
        link.send(f"{rank} {names[rank]}".encode())
        sockets[other] = link
    listener.settimeout(link_timeout)
    while len(sockets) < len(names) - 1:
        link, _ = listener.accept()
        link.settimeout(link_timeout)
        # Anybody on the machine can connect to an abstract name: believe our own user only.
        credentials = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        _, user, _ = struct.unpack("3i", credentials)
        text = link.recv(100).decode(errors="replace").split()
        if user == os.getuid() and len(text) == 2 and text[1] in names[rank + 1 :]:
            sockets[int(text[0])] = link
        else:
            link.close()
    return SharedMemory(rank, len(names), sockets, timeout)


def _map(descriptor: int, nbytes: int) -> Tensor:
    """All of a memory file, uint8."""
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    memory = mmap.mmap(descriptor, nbytes)
    with contextlib.suppress(OSError, AttributeError):
        memory.madvise(mmap.MADV_HUGEPAGE)  # fewer page faults, where the kernel allows it
    return torch.frombuffer(memory, dtype=torch.uint8)
