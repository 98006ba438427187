"""Reasons to leave: each is seen, the first one stays, and ranks can agree on them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from training.interrupt import LAUNCHER_GONE, MAX_MINUTES, REASONS, StopRequest, reason_of

ROOT = Path(__file__).parents[2]
SIGNALS = ["SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP"]
LISTENER = """
import sys, time
from training.interrupt import StopRequest

stop = StopRequest()
with stop.listening():
    print("listening", flush=True)
    while stop.reason is None:
        time.sleep(0.01)
    print(stop.reason, flush=True)
    time.sleep(float(sys.argv[1]))
print("left by itself", flush=True)
"""


@pytest.fixture(autouse=True)
def no_launcher_and_no_nohup(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def listener(seconds: float = 0.0, **environment: str) -> subprocess.Popen[str]:
    """A process that listens until a reason comes, and for some seconds more."""
    process = subprocess.Popen(
        [sys.executable, "-c", LISTENER, str(seconds)],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert next_line(process) == "listening"
    return process


def next_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().rstrip("\n")


def test_nothing_stops_a_run_that_nobody_asked_to_stop():
    stop = StopRequest()
    with stop.listening():
        assert stop.reason is None
        assert stop.code == 0


@pytest.mark.parametrize("name", SIGNALS)
def test_signal_becomes_the_reason_and_the_process_goes_on(name):
    stop = StopRequest()
    with stop.listening():
        signal.raise_signal(signal.Signals[name])
        assert stop.reason == name
    assert stop.reason == name


@pytest.mark.parametrize("name", SIGNALS)
def test_signal_of_another_process_becomes_the_reason(name):
    process = listener()
    process.send_signal(signal.Signals[name])
    stdout, _ = process.communicate(timeout=20)
    assert stdout == f"{name}\nleft by itself\n"
    assert process.returncode == 0


def test_first_reason_stays():
    stop = StopRequest(max_minutes=0.0)
    with stop.listening():
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGTERM)
        assert stop.reason == "SIGUSR1"


@pytest.mark.parametrize("name", SIGNALS)
def test_signals_do_afterwards_what_they_did_before(name):
    seen = []
    number = signal.Signals[name]
    before = signal.signal(number, lambda *_: seen.append(name))
    try:
        stop = StopRequest()
        with pytest.raises(ValueError, match="step"), stop.listening():
            raise ValueError("a step that fails")
        signal.raise_signal(number)
        assert seen == [name]
        assert stop.reason is None
    finally:
        signal.signal(number, before)


def test_hangup_that_is_ignored_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        stop = StopRequest()
        with stop.listening():
            signal.raise_signal(signal.SIGHUP)
            assert stop.reason is None
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_second_interrupt_leaves_at_once():
    process = listener(seconds=30.0)
    process.send_signal(signal.SIGINT)
    assert next_line(process) == "SIGINT"
    time.sleep(0.6)  # sooner, it would count as the same one
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=10)
    assert process.returncode == 130
    assert stdout == ""
    assert stderr.splitlines() == [
        "interrupted: saving after this step; interrupt again to leave at once",
        "interrupted again: leaving without saving",
    ]


def test_interrupt_that_arrives_by_two_ways_is_one():
    process = listener(seconds=0.3)
    process.send_signal(signal.SIGINT)
    assert next_line(process) == "SIGINT"
    process.send_signal(signal.SIGINT)
    stdout, _ = process.communicate(timeout=10)
    assert stdout == "left by itself\n"
    assert process.returncode == 0


def test_only_rank_zero_speaks_of_an_interrupt():
    process = listener(RANK="1")
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=10)
    assert stdout == "SIGINT\nleft by itself\n"
    assert stderr == ""


def test_minutes_are_counted_from_the_start_that_is_given():
    now = time.monotonic()
    assert StopRequest(max_minutes=2.0, started=now - 119.0).reason is None
    assert StopRequest(max_minutes=2.0, started=now - 121.0).reason == MAX_MINUTES
    assert StopRequest(max_minutes=None, started=now - 1e9).reason is None


def test_minutes_are_counted_from_the_start_of_the_process_by_default():
    script = """
import time, training.interrupt as i
time.sleep(0.2)
print(i.StopRequest(0.1 / 60).reason, i.StopRequest(60 / 60).reason)
"""
    printed = subprocess.check_output([sys.executable, "-c", script], cwd=ROOT, text=True)
    assert printed == "max_minutes None\n"


@pytest.mark.parametrize(("environment", "reason"), [({"RANK": "0"}, LAUNCHER_GONE), ({}, "none")])
def test_rank_sees_that_its_launcher_is_gone(tmp_path, environment, reason):
    """Without a launcher a parent that ends is just a shell that was closed."""
    rank = """
import pathlib, sys, time
from training.interrupt import StopRequest

stop, out = StopRequest(), pathlib.Path(sys.argv[1])
assert stop.reason is None
(out / "started").touch()
while not (out / "launcher_is_gone").exists():
    time.sleep(0.01)
(out / "reason.tmp").write_text(stop.reason or "none")
(out / "reason.tmp").rename(out / "reason")
"""
    launcher = """
import pathlib, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", sys.argv[1], sys.argv[2]], start_new_session=True)
while not (pathlib.Path(sys.argv[2]) / "started").exists():
    time.sleep(0.01)
"""
    command = [sys.executable, "-c", launcher, rank, str(tmp_path)]
    subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}, check=True, timeout=20)
    (tmp_path / "launcher_is_gone").touch()
    deadline = time.monotonic() + 20
    while not (tmp_path / "reason").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert (tmp_path / "reason").read_text() == reason


def test_each_reason_has_a_number_of_its_own_and_back():
    assert reason_of(0) is None
    assert [reason_of(code) for code in range(1, len(REASONS) + 1)] == list(REASONS)
    for name in SIGNALS:
        stop = StopRequest()
        with stop.listening():
            signal.raise_signal(signal.Signals[name])
        assert reason_of(stop.code) == name


def test_who_wants_the_run_to_end_wins_over_who_wants_it_to_go_on_later():
    going_on = [REASONS.index(r) for r in (MAX_MINUTES, LAUNCHER_GONE, "SIGUSR1")]
    ending = [REASONS.index(r) for r in ("SIGHUP", "SIGTERM", "SIGINT")]
    assert max(going_on) < min(ending)
