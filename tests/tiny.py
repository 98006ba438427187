"""A corpus and a model so small that a whole training run takes a second."""

import json
import random
from pathlib import Path
from typing import Any

from tests.harness import run_distributed

# Options of a run that is exact enough to compare and logs every step.
TINY = {
    "preset": "tiny",
    "dtype": "float32",
    "device": "cpu",
    "batch_size": 8,
    "iterations": 20,
    "warmup_iters": 4,
    "lr_max": 0.004,
    "log_interval": 1,
    "val_interval": 10,
    "val_windows": 16,
    "checkpoint_interval": 10,
    "timeout_seconds": 30,
}


def write_corpus(folder: Path, documents: int = 60, seed: int = 0) -> Path:
    """Pseudo-text in documents of very unequal length, about 100 KB."""
    draw = random.Random(seed)
    words = ["".join(draw.choices("abcdefghij", k=draw.randint(1, 7))) for _ in range(300)]
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(documents):
        length = int(draw.paretovariate(1.2) * 60)
        lines = [
            " ".join(draw.choices(words, k=draw.randint(3, 12)))
            for _ in range(min(length, 400) // 6)
        ]
        (folder / f"{number:03d}.txt").write_text("\n".join(lines) + "\n")
    return folder


def flags(**options: Any) -> list[str]:
    """Options as the command line has them."""
    return [part for name, value in options.items() for part in (f"--{name}", str(value))]


def train(world_size: int, data_dir: Path, out_dir: Path, **options: Any) -> list[dict[str, Any]]:
    """Run train_ddp.py's main on so many ranks; the lines of its metrics.jsonl."""
    argv = flags(**{**TINY, "data_dir": data_dir, "out_dir": out_dir, **options})
    run_distributed(run_main, world_size, argv, process_group=False)
    return metrics_of(out_dir)


def run_main(argv: list[str], largest_file: int | None = None) -> None:
    """What each rank runs; `largest_file` stands in for a disk that fills up."""
    import resource
    import sys

    import train_ddp

    if largest_file is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
    sys.argv = ["train_ddp.py", *argv]
    train_ddp.main()


def metrics_of(out_dir: Path) -> list[dict[str, Any]]:
    """All entries of a run's metrics.jsonl."""
    lines = (out_dir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def curve(entries: list[dict[str, Any]], name: str = "loss_train") -> list[float]:
    """One measurement over the steps that have it."""
    return [entry[name] for entry in entries if name in entry]
