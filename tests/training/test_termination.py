"""Signals that end a process are an exception for a while, and only those that would end it."""

import signal
import threading

import pytest

from training.termination import Terminated, signals_raised


@pytest.fixture(autouse=True)
def no_nohup():
    before = {number: signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGTERM)}
    for number in before:
        signal.signal(number, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_a_signal_is_raised_and_ends_the_process_again_afterwards(number):
    with pytest.raises(Terminated) as raised, signals_raised():
        signal.raise_signal(number)
    assert raised.value.number == number
    assert signal.getsignal(number) is signal.SIG_DFL


def test_a_second_signal_does_not_cut_the_cleaning_up_short():
    cleaned = []

    def clean_up_late() -> None:
        try:
            signal.raise_signal(signal.SIGHUP)
        finally:
            signal.raise_signal(signal.SIGHUP)
            signal.raise_signal(signal.SIGTERM)
            cleaned.append("all")

    with pytest.raises(Terminated), signals_raised():
        clean_up_late()
    assert cleaned == ["all"]


def test_a_hangup_that_nohup_ignores_stays_ignored():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with signals_raised():
        signal.raise_signal(signal.SIGHUP)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_what_another_has_taken_stays_with_it():
    taken: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: taken.append(number))
    with signals_raised():
        signal.raise_signal(signal.SIGTERM)
    assert taken == [signal.SIGTERM]


def test_another_thread_leaves_the_signals_alone():
    seen = []

    def look() -> None:
        with signals_raised():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [signal.SIG_DFL]
