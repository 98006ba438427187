"""A machine of stand-ins: programs on PATH that write down how they were called.

PATH holds nothing else but the few tools that the launchers may use, so that what this machine has
(GPUs, cores, Slurm) cannot leak in. No torch is started.
"""

import shutil
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
TOOLS = ("bash", "cat", "dirname", "env", "sed")

# Writes down its own arguments and environment; then does the rest of its script.
RECORD = """#!/usr/bin/env bash
printf '%s\\0' "$@" >"$RECORDS/${0##*/}.arguments"
{ printf 'PWD=%s\\0PID=%s\\0' "$PWD" "$$"; env -0; } >"$RECORDS/${0##*/}.environment"
"""


@dataclass
class Records:
    """With what a launcher has called whom."""

    records: Path

    @property
    def events(self) -> list[str]:
        """Lines that programs have appended to $RECORDS/events."""
        path = self.records / "events"
        return path.read_text().splitlines() if path.exists() else []

    def called(self, program: str) -> bool:
        return (self.records / f"{program}.arguments").exists()

    def arguments(self, program: str = "torchrun") -> list[str]:
        return (self.records / f"{program}.arguments").read_text().split("\0")[:-1]

    def environment(self, program: str = "torchrun") -> dict[str, str]:
        text = (self.records / f"{program}.environment").read_text()
        return dict(entry.split("=", 1) for entry in text.split("\0")[:-1])

    def option(self, name: str) -> str:
        (value,) = [a.split("=", 1)[1] for a in self.arguments() if a.startswith(f"--{name}=")]
        return value

    def options_of_the_training(self) -> list[str]:
        arguments = self.arguments()
        (script,) = [i for i, a in enumerate(arguments) if a.endswith("/train_ddp.py")]
        return arguments[script + 1 :]


@dataclass
class Launch(Records):
    """What a launcher did, and how it ended."""

    status: int
    stdout: str
    stderr: str
    pid: int


@dataclass
class Started(Records):
    """A launcher that runs."""

    process: subprocess.Popen[str]

    def wait_until(self, event: str) -> None:
        """Wait until a program that it has started notes the event."""
        deadline = time.monotonic() + 20
        while event not in self.events:
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline, self.events
            time.sleep(0.01)

    def end(self) -> Launch:
        process = self.process
        try:
            stdout, stderr = process.communicate(timeout=20)
        finally:
            process.kill()
        return Launch(self.records, process.returncode, stdout, stderr, process.pid)


@dataclass
class Machine:
    """A machine of 8 cores that has only the programs put on it."""

    folder: Path
    environment: dict[str, str] = field(default_factory=dict)

    def __post_init__(self):
        self.bin = self.folder / "bin"
        self.bin.mkdir()
        for tool in TOOLS:
            path = shutil.which(tool)
            assert path is not None
            (self.bin / tool).symlink_to(path)
        self.add("torchrun")
        self.add("nproc", "echo 8")

    def add(self, program: str, then: str = "") -> None:
        path = self.bin / program
        path.write_text(RECORD + then + "\n")
        path.chmod(0o755)

    def remove(self, program: str) -> None:
        (self.bin / program).unlink()

    def run(self, script: str, *arguments: str, folder: Path = ROOT, **environment: str) -> Launch:
        return self.start(script, *arguments, folder=folder, **environment).end()

    def start(
        self, script: str, *arguments: str, folder: Path = ROOT, **environment: str
    ) -> Started:
        records = self.folder / f"records-{len(list(self.folder.iterdir()))}"
        records.mkdir()
        process = subprocess.Popen(
            [ROOT / "launch" / script, *arguments],
            cwd=folder,
            env={
                "PATH": str(self.bin),
                "RECORDS": str(records),
                **self.environment,
                **environment,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # Where pytest itself runs in the background it is ignored, and bash would keep it so.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        return Started(records, process)
