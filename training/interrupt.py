"""Leaving a run in time: what has asked it to stop, looked at once a step.

A signal, a time limit or a launcher that is gone only sets a reason here. The training loop looks
at it between two steps, where the ranks agree, save and leave; so nothing is cut off half way. A
reason has a number besides its text, because ranks agree by one reduction: the largest number of
all ranks is what stops all of them.

torchrun ends its ranks when a signal ends it, except for one that it does not know, such as SIGUSR1
by default, or cannot know, such as SIGKILL. Then its ranks go on as orphans that nobody waits for;
each sees by its parent's process id that its launcher is gone.
"""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType

# What can stop a run, the stronger reason later: SIGUSR1 asks to go on in another job, SIGTERM and
# SIGINT ask to end, whatever else some ranks have seen.
LAUNCHER_GONE = "launcher gone"
MAX_MINUTES = "max_minutes"
REASONS = (MAX_MINUTES, LAUNCHER_GONE, "SIGUSR1", "SIGHUP", "SIGTERM", "SIGINT")
SIGNALS = tuple(name for name in REASONS if hasattr(signal, name))  # Windows has fewer

# One Ctrl-C can arrive twice, from the terminal and from the launcher that it has reached too.
SECONDS_OF_ONE_INTERRUPT = 0.5
STATUS_AFTER_SECOND_INTERRUPT = 130


@dataclass
class _Start:
    """Of this process, noted as early as can be: importing torch counts as time of the job, too."""

    seconds: float
    launcher: int

    def note(self) -> None:
        """Note it for the process that runs this."""
        self.seconds, self.launcher = time.monotonic(), os.getppid()


_start = _Start(time.monotonic(), os.getppid())
if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_start.note)


class StopRequest:
    """Why the run should save and leave, if it should.

    Args:
        max_minutes: how long the job may take; None: as long as it likes.
        started: `time.monotonic()` from which that counts; None: the process's start, nearly.
    """

    def __init__(self, max_minutes: float | None = None, started: float | None = None) -> None:
        if started is None:
            started = _start.seconds
        self._deadline = None if max_minutes is None else started + 60.0 * max_minutes
        self._has_launcher = "RANK" in os.environ
        self._speaks = os.environ.get("RANK", "0") == "0"
        self._interrupted_at: float | None = None
        self._reason: str | None = None

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Take the signals, in the main thread alone; afterwards they do what they did before.

        A second SIGINT leaves at once, with exit status 130. A SIGHUP that is ignored stays so:
        that is what nohup is for.
        """
        before = {}
        for name in SIGNALS:
            number = signal.Signals[name]
            if name == "SIGHUP" and signal.getsignal(number) is signal.SIG_IGN:
                continue
            before[number] = signal.signal(number, self._on_signal)
        try:
            yield
        finally:
            for number, handler in before.items():
                # None: installed by C code, which Python cannot put back.
                signal.signal(number, signal.SIG_DFL if handler is None else handler)

    @property
    def reason(self) -> str | None:
        """The first of REASONS that came, or None; costs less than a microsecond."""
        if self._reason is None:
            if self._has_launcher and os.getppid() != _start.launcher:
                self._reason = LAUNCHER_GONE
            elif self._deadline is not None and time.monotonic() >= self._deadline:
                self._reason = MAX_MINUTES
        return self._reason

    @property
    def code(self) -> int:
        """The reason as a number above 0, or 0: what ranks reduce, the largest wins."""
        reason = self.reason
        return 0 if reason is None else 1 + REASONS.index(reason)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._reason is None:
            self._reason = signal.Signals(number).name
        if number == signal.SIGINT:
            self._on_interrupt()

    def _on_interrupt(self) -> None:
        now = time.monotonic()
        if self._interrupted_at is None:
            self._interrupted_at = now
            self._say("interrupted: saving after this step; interrupt again to leave at once")
        elif now - self._interrupted_at > SECONDS_OF_ONE_INTERRUPT:
            self._say("interrupted again: leaving without saving")
            os._exit(STATUS_AFTER_SECOND_INTERRUPT)

    def _say(self, line: str) -> None:
        """Speak past Python's buffers, which the code that was interrupted may be using."""
        if self._speaks:
            with contextlib.suppress(OSError):
                os.write(2, f"{line}\n".encode())


def reason_of(code: int) -> str | None:
    """What `StopRequest.code` stood for; None for 0."""
    return REASONS[code - 1] if code else None
