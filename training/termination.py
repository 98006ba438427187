"""SIGTERM and SIGHUP as an exception, where there is something to clean up before leaving.

By default they end a process where it stands, and no `finally` runs. Ctrl-C is an exception by
itself. The training, which saves before it leaves, has interrupt.py.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = tuple(name for name in ("SIGHUP", "SIGTERM") if hasattr(signal, name))  # as on Windows


class Terminated(BaseException):
    """A signal asks the process to end; as KeyboardInterrupt, no error that one might pass over."""

    def __init__(self, number: int) -> None:
        super().__init__(f"ended by {signal.Signals(number).name}")
        self.number = number


@contextmanager
def signals_raised() -> Iterator[None]:
    """Raise Terminated where a signal would end the process; afterwards it does so again.

    In the main thread alone, where Python takes signals. A SIGHUP that is ignored stays so: that is
    what nohup is for. Nothing cuts the cleaning up short: after the first signal others do nothing.
    """
    taken: list[int] = []

    def raise_terminated(number: int, frame: FrameType | None) -> None:
        for other in taken:
            signal.signal(other, signal.SIG_IGN)
        raise Terminated(number)

    try:
        if threading.current_thread() is threading.main_thread():
            for number in (int(signal.Signals[name]) for name in SIGNALS):
                if signal.getsignal(number) is signal.SIG_DFL:
                    taken.append(number)
                    signal.signal(number, raise_terminated)
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)
