"""A console that has gone, or knows ASCII alone, ends no run."""

import io
import os
import sys

from training.console import say


def test_a_line_that_nobody_reads_is_lost_without_an_error(monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    stream = io.TextIOWrapper(io.FileIO(writer, "w"), encoding="utf-8", write_through=True)
    monkeypatch.setattr(sys, "stdout", stream)
    say("one")
    say("two")


def test_a_line_on_a_full_disk_is_lost_without_an_error(monkeypatch):
    full = io.TextIOWrapper(io.FileIO("/dev/full", "w"), write_through=True)
    monkeypatch.setattr(sys, "stdout", full)
    say("one")


def test_without_a_stdout_nothing_is_said(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    say("one")


def test_what_an_ascii_console_cannot_show_is_escaped(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    say("data/d\u00e4")
    assert raw.getvalue() == b"data/d\\xe4\n"
