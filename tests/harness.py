"""The one harness of all tests that need several processes.

`run_distributed(function, world_size, *args)` runs a module-level function on every rank of a fresh
process group and returns what the ranks returned. `run_torchrun(script, world_size, *args)` runs a
real command and returns its exit status and output. Both bring every error back with its rank, end
what hangs, and leave no process behind. `start_distributed` and `start_torchrun` start the same for
tests that kill, signal or watch the processes meanwhile.

Importing torch takes seconds, a test should take a fraction of one. So workers are forked from a
server that has imported everything, the project's own modules included, and has started no thread:
each is a new process with nothing left over from the test before, and starts in milliseconds. GPUs
are hidden from all of them, so that a test does the same on every machine.
"""

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as torch_dist

from dist.process_group import World, init_process_group, shut_down

ROOT = Path(__file__).resolve().parent.parent
PRELOADED = [
    "hypothesis",
    "jsonargparse",
    "numpy",
    "pytest",
    "torch",
    "torch._dynamo",
    "torch.utils.tensorboard",
    "train_ddp",
    "tests.dist.helpers",
    "tests.faults",
    "tests.resuming",
]
WORKER_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
# What the ranks get to end by themselves once one of them has failed.
SECONDS_AFTER_A_FAILURE = 10.0
# What the processes of a command get to be gone once the command itself has ended.
SECONDS_AFTER_A_COMMAND = 5.0
JOB_MARK = "TEST_HARNESS_JOB"

_world: World | None = None


@dataclass(frozen=True)
class Failure:
    """How a rank ended badly.

    Attributes:
        rank: which.
        kind: class of the exception, or "killed by signal 9", "exit status 3", "hang".
        message: of the exception.
        details: its traceback; of a hang, where each thread stood.
        seconds: since all ranks had started.
    """

    rank: int
    kind: str
    message: str
    details: str
    seconds: float


class DistributedError(AssertionError):
    """Some ranks failed; the first to fail stands first.

    Attributes:
        failures: by rank.
        results: what the other ranks returned, by rank.
    """

    def __init__(self, failures: dict[int, Failure], results: dict[int, Any], size: int) -> None:
        self.failures = failures
        self.results = results
        parts = [
            f"rank {failure.rank} of {size}, after {failure.seconds:.1f} s: "
            f"{failure.kind}: {failure.message}\n{failure.details}"
            for failure in sorted(failures.values(), key=lambda failure: failure.seconds)
        ]
        super().__init__("\n".join(parts))


def run_distributed(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 60.0,
    process_group: bool = True,
) -> list[Any]:
    """Run `function(*args)` on every rank and return the results by rank.

    Args:
        function: of a module's top level. It finds RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE,
            MASTER_ADDR and MASTER_PORT set, and the process group formed; see `current_world`.
        world_size: number of processes; with 1 there is no process group, as in a training job.
        *args: picklable.
        timeout: seconds after which what still runs is ended, and counts as failed.
        process_group: False leaves forming the group to the function.

    Raises:
        DistributedError: a rank raised, died or did not end.
    """
    __tracebackhide__ = True
    group_timeout = timeout if process_group else None
    with _started(function, world_size, args, group_timeout) as ranks:
        return ranks.results(timeout)


@contextlib.contextmanager
def start_distributed(
    function: Callable[..., Any], world_size: int, *args: Any
) -> Iterator["Ranks"]:
    """Start what `run_distributed` runs, for tests that do something to it meanwhile.

    Forming the process group is left to the function, and to tests to say how long a wait may
    take. What still runs at the end of the block is killed.
    """
    with _started(function, world_size, args, None) as ranks:
        yield ranks


@contextlib.contextmanager
def _started(
    function: Callable[..., Any],
    world_size: int,
    args: tuple[Any, ...],
    group_timeout: float | None,
) -> Iterator["Ranks"]:
    task = pickle.dumps((function, args))
    # Held here, as torchrun holds it: no port is free at one moment and taken at the next.
    store = torch_dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    with tempfile.TemporaryDirectory() as folder:
        workers: list[_Worker] = []
        try:
            for rank in range(world_size):
                of_rank = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                stacks = Path(folder, f"{rank}.txt")
                workers.append(_Worker(rank, task, environment | of_rank, group_timeout, stacks))
            yield Ranks(workers)
        finally:
            for worker in workers:
                worker.end()


def current_world() -> World:
    """In a function that `run_distributed` runs: what `init_process_group` returned."""
    assert _world is not None, "run_distributed(..., process_group=False) forms no group"
    return _world


class Ranks:
    """The running processes of `start_distributed`."""

    def __init__(self, workers: list["_Worker"]) -> None:
        self._workers = workers
        # Only now: the first of all workers waits while the server imports torch.
        self._start = time.monotonic()

    @property
    def are_running(self) -> bool:
        """Whether none of them has ended."""
        return all(worker.process.is_alive() for worker in self._workers)

    @property
    def pids(self) -> list[int | None]:
        """Process ids by rank."""
        return [worker.process.pid for worker in self._workers]

    def send(self, number: int, *ranks: int) -> None:
        """Send a signal to some ranks, or to all; those that have ended are left alone."""
        for worker in self._workers:
            if (not ranks or worker.rank in ranks) and worker.process.is_alive():
                assert worker.process.pid is not None
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker.process.pid, number)

    def results(self, timeout: float) -> list[Any]:
        """What `run_distributed` returns, or raises.

        Args:
            timeout: seconds since the start after which what still runs counts as failed.
        """
        __tracebackhide__ = True
        return _results(self._workers, self._start, self._start + timeout)

    def statuses(self, timeout: float) -> list[int]:
        """Wait until all ranks have ended; their exit statuses by rank, -9 after SIGKILL.

        Args:
            timeout: seconds from now.

        Raises:
            AssertionError: a rank does not end; says where its threads stand.
        """
        deadline = time.monotonic() + timeout
        for worker in self._workers:
            worker.process.join(max(0.0, deadline - time.monotonic()))
        hanging = [worker for worker in self._workers if worker.process.is_alive()]
        for worker in hanging:
            worker.ask_for_stacks()
        if hanging:
            time.sleep(0.5)
            stacks = [f"rank {one.rank}:\n{one.hang(self._start).details}" for one in hanging]
            raise AssertionError(f"did not end within {timeout} s: " + "\n".join(stacks))
        return [worker.process.exitcode or 0 for worker in self._workers]


class _Worker:
    """A process that runs the task of one rank."""

    def __init__(
        self,
        rank: int,
        task: bytes,
        environment: dict[str, str],
        group_timeout: float | None,
        stacks: Path,
    ) -> None:
        self.rank = rank
        self.stacks = stacks
        context = _context()
        self.connection, theirs = context.Pipe(duplex=False)
        self.process = context.Process(
            target=_work, args=(task, environment, group_timeout, str(stacks), theirs)
        )
        with mock.patch.dict(os.environ, WORKER_ENVIRONMENT):
            self.process.start()
        theirs.close()

    def failure(self, start: float) -> Failure:
        """Describe a process that went without a word."""
        self.process.join()
        code = self.process.exitcode or 0
        kind = f"killed by signal {-code}" if code < 0 else f"exit status {code}"
        return Failure(self.rank, kind, "", "", time.monotonic() - start)

    def ask_for_stacks(self) -> None:
        """Let a process that does not end write down where its threads stand."""
        # Without the file the process has not come as far as answering signals.
        if self.process.pid is not None and self.stacks.exists():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGUSR2)

    def hang(self, start: float) -> Failure:
        """Describe a process that does not end."""
        stacks = self.stacks.read_text() if self.stacks.exists() else "(it had not begun)"
        return Failure(self.rank, "hang", "", stacks, time.monotonic() - start)

    def end(self) -> None:
        """Kill what is left of the process and of those that it started."""
        pid = self.process.pid
        if pid is not None:
            for kill in (os.killpg, os.kill) if self.process.is_alive() else (os.killpg,):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    kill(pid, signal.SIGKILL)
            self.process.join()
        self.connection.close()


def _context() -> ForkServerContext | SpawnContext:
    if sys.platform != "linux":  # elsewhere, system libraries do not survive a fork
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def _results(workers: list[_Worker], start: float, deadline: float) -> list[Any]:
    __tracebackhide__ = True
    pending = {worker.connection: worker for worker in workers}
    results: dict[int, Any] = {}
    failures: dict[int, Failure] = {}
    while pending:
        readable = wait(list(pending), max(0.0, deadline - time.monotonic()))
        if not readable:
            for worker in pending.values():
                worker.ask_for_stacks()
            time.sleep(0.5)
            failures |= {worker.rank: worker.hang(start) for worker in pending.values()}
            break
        for connection in readable:
            assert isinstance(connection, Connection)
            worker = pending.pop(connection)
            try:
                succeeded, answer = pickle.loads(connection.recv_bytes())
            except EOFError:
                failures[worker.rank] = worker.failure(start)
            else:
                if succeeded:
                    results[worker.rank] = answer
                else:
                    kind, message, details, when = answer
                    failures[worker.rank] = Failure(
                        worker.rank, kind, message, details, when - start
                    )
        if failures:
            deadline = min(deadline, time.monotonic() + SECONDS_AFTER_A_FAILURE)
    if failures:
        raise DistributedError(failures, results, len(workers))
    return [results[rank] for rank in range(len(workers))]


def _work(
    task: bytes,
    environment: dict[str, str],
    group_timeout: float | None,
    stacks: str,
    connection: Connection,
) -> None:
    """The worker's side; a failure leaves like a failed rank does, without a word to the others."""
    global _world
    os.setsid()  # so that its whole process group can be killed
    # A file that stays open: the handler writes to it at any later moment.
    faulthandler.register(signal.SIGUSR2, open(stacks, "w"), all_threads=True)  # noqa: SIM115
    os.environ.update(environment)
    torch.set_num_threads(1)
    try:
        function, args = pickle.loads(task)
        if group_timeout is not None:
            _world = init_process_group("gloo", "cpu", group_timeout)
        # By value: torch would otherwise share a tensor's memory, which ends with this process.
        answer = pickle.dumps((True, function(*args)))
        if _world is not None:
            shut_down(_world)
    except BaseException as error:
        report = (type(error).__name__, str(error), traceback.format_exc(), time.monotonic())
        connection.send_bytes(pickle.dumps((False, report)))
        sys.stdout.flush()
        os._exit(1)
    connection.send_bytes(answer)


def run_torchrun(
    script: str | Path,
    world_size: int,
    *args: object,
    env: Mapping[str, str] | None = None,
    timeout: float = 60.0,
    cwd: str | Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run `torchrun --standalone --nproc_per_node=world_size script args` to its end.

    Args:
        script: a path; relative ones are taken from the project's folder.
        world_size: number of processes.
        *args: the script's arguments.
        env: variables beside or over those of this process.
        timeout: seconds after which all of its processes are killed.
        cwd: folder to run in; the project's own by default.

    Raises:
        AssertionError: it did not end in time, or left processes behind.
    """
    with start_torchrun(script, world_size, *args, env=env, cwd=cwd) as job:
        return job.wait(timeout)


def run_python(
    script: str | Path,
    *args: object,
    env: Mapping[str, str] | None = None,
    timeout: float = 60.0,
    cwd: str | Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run `python script args` to its end; see `run_torchrun`."""
    with start_command([sys.executable, ROOT / script, *args], env=env, cwd=cwd) as job:
        return job.wait(timeout)


@contextlib.contextmanager
def start_torchrun(
    script: str | Path,
    world_size: int,
    *args: object,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
) -> Iterator["Job"]:
    """Start what `run_torchrun` runs, for tests that do something to it meanwhile."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world_size}"]
    command = [sys.executable, *torchrun, ROOT / script, *args]
    with start_command(command, env=env, cwd=cwd) as job:
        yield job


@contextlib.contextmanager
def start_command(
    command: list[Any],
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
) -> Iterator["Job"]:
    """Start a command with the project importable and no GPU; its processes end with the block."""
    with tempfile.TemporaryDirectory() as folder:
        job = Job([str(part) for part in command], env or {}, cwd or ROOT, Path(folder))
        try:
            yield job
        finally:
            job.kill()


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and is not yet waited for does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state not in ("Z", "X")


class Job:
    """A running command.

    Its processes are known by a mark in their environment: torchrun gives each rank a session of
    its own, so that neither the process group nor, after a crash, the parent leads to them.
    """

    def __init__(
        self, command: list[str], env: Mapping[str, str], cwd: str | Path, folder: Path
    ) -> None:
        self.command = command
        self._mark = uuid.uuid4().hex
        # Files, not pipes: a process that is left behind would hold a pipe open for ever.
        self._out, self._err = folder / "stdout", folder / "stderr"
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        base = {**os.environ, **WORKER_ENVIRONMENT, "PYTHONPATH": path, JOB_MARK: self._mark}
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self._process = subprocess.Popen(
                command,
                env={**base, **env},
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Of the process that was started: torchrun's."""
        return self._process.pid

    @property
    def stdout(self) -> str:
        """What was printed so far."""
        return self._out.read_text(errors="replace")

    @property
    def stderr(self) -> str:
        """What was printed as errors so far."""
        return self._err.read_text(errors="replace")

    def processes(self) -> list[int]:
        """All its living processes' ids."""
        pids = {pid for pid, _ in self._environments()}
        # For a moment after its start a process has no environment that could be read.
        if self._process.poll() is None:
            pids.add(self.pid)
        return sorted(pids)

    def rank_pids(self) -> dict[int, int]:
        """Process id by rank, of the ranks that torchrun has started and that live."""
        return {
            int(environment["RANK"]): pid
            for pid, environment in self._environments()
            if "RANK" in environment
        }

    def wait(self, timeout: float) -> subprocess.CompletedProcess[str]:
        """Wait for its end.

        Raises:
            AssertionError: it did not end in time, or left processes behind.
        """
        try:
            status = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(
                f"{' '.join(self.command)} did not end within {timeout} s\n"
                f"stdout:\n{self.stdout}\nstderr:\n{self.stderr}"
            ) from None
        deadline = time.monotonic() + SECONDS_AFTER_A_COMMAND
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.05)
        if left:
            self.kill()
            raise AssertionError(
                f"{' '.join(self.command)} left processes {left}\nstderr:\n{self.stderr}"
            )
        return subprocess.CompletedProcess(self.command, status, self.stdout, self.stderr)

    def kill(self) -> None:
        """Kill all its processes, those too that are started meanwhile."""
        killed: set[int] = set()
        while left := self.processes():
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            killed.update(left)
            if self.pid in left:
                self._process.wait()
            time.sleep(0.01)
        # A process that is giving back its memory has no environment any more, but is still there.
        while any(is_alive(pid) for pid in killed):
            time.sleep(0.01)

    def _environments(self) -> Iterator[tuple[int, dict[str, str]]]:
        mark = f"{JOB_MARK}={self._mark}".encode()
        if not Path("/proc/self/environ").exists():  # not Linux: the first process alone is known
            if self._process.poll() is None:
                yield self.pid, {}
            return
        for folder in Path("/proc").iterdir():
            if not folder.name.isdecimal():
                continue
            try:
                variables = (folder / "environ").read_bytes().split(b"\0")
            except OSError:
                continue  # ended meanwhile, or another user's
            if mark in variables:
                pairs = (os.fsdecode(variable).partition("=") for variable in variables)
                yield int(folder.name), {name: value for name, _, value in pairs}
