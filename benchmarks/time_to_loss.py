"""How long from the command to a model of a given validation loss?

    python benchmarks/time_to_loss.py --input tinyshakespeare.txt [--json FILE]

What is timed is the whole process of `python train_ddp.py --config configs/shakespeare-char.yaml`:
imports, data, training, the loss over the whole validation split in windows of 64, the checkpoint,
exit. Every run has a seed of its own. Cutting the text into characters comes before and is not
timed. `--long` times a larger model, too, and says what loss it ends with.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script

from benchmarks.side_by_side import write_figures
from training.checkpoint_file import load_checkpoint

ROOT = Path(__file__).resolve().parent.parent
TARGET = 1.90
# What a minute and nine seconds on 2 cores of the reference machine are well spent on.
LONG = ["--num_layers=4", "--batch_size=48", "--iterations=640", "--decay_iters=575"]
LONG += ["--muon_lr=0.04", "--muon_momentum=0.85", "--lr_max=0.02"]


def main() -> None:
    """Prepare once, then a run for each seed."""
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument("--input", required=True, help="the text")
    flags.add_argument("--config", default=str(ROOT / "configs" / "shakespeare-char.yaml"))
    flags.add_argument("--seeds", type=int, default=5, help="runs (default 5)")
    flags.add_argument("--first_seed", type=int, default=1, help="of the first run (default 1)")
    flags.add_argument("--threads", type=int, default=2, help="(default 2)")
    flags.add_argument("--long", action="store_true", help="time the larger model as well")
    flags.add_argument("--json", help="file for the figures")
    options = flags.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        data = str(Path(folder, "data"))
        prepare = [sys.executable, str(ROOT / "prepare.py"), "--input", options.input]
        prepare += ["--out_dir", data, "--tokenizer", "char"]
        subprocess.run(prepare, check=True, capture_output=True)
        runs = []
        for seed in range(options.first_seed, options.first_seed + options.seeds):
            runs.append(timed(options, data, f"{folder}/{seed}", seed, []))
            show(f"seed {seed}", *runs[-1])
        reached = [loss <= TARGET for _, loss, _ in runs]
        print(f"{sum(reached)} of {len(reached)} runs reached {TARGET}")
        figures = {
            "seconds_to_loss": statistics.median(seconds for seconds, _, _ in runs),
            "reached_share": sum(reached) / len(reached),
            "highest_loss": max(loss for _, loss, _ in runs),
            "parameters": float(runs[0][2]),
        }
        if options.long:
            seconds, loss, parameters = timed(options, data, f"{folder}/long", 1, LONG)
            show("the larger model", seconds, loss, parameters)
            figures |= {"seconds_long": seconds, "loss_at_69s": loss}
    write_figures(options.json, figures)


def timed(
    options: argparse.Namespace, data: str, out_dir: str, seed: int, more: list[str]
) -> tuple[float, float, int]:
    """Wall seconds of a run, its last validation loss, and its parameters."""
    command = [sys.executable, str(ROOT / "train_ddp.py"), "--config", options.config]
    command += ["--data_dir", data, "--out_dir", out_dir, "--seed", str(seed), *more]
    environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads)}
    start = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True, env=environment)
    seconds = time.perf_counter() - start
    lines = Path(out_dir, "metrics.jsonl").read_text().splitlines()
    losses = [entry["val_loss"] for entry in map(json.loads, lines) if "val_loss" in entry]
    newest = max(Path(out_dir, "checkpoints").glob("ckpt_*.pt"))
    weights = load_checkpoint(newest)["model"].values()
    return seconds, losses[-1], sum(weight.numel() for weight in weights)


def show(name: str, seconds: float, loss: float, parameters: int) -> None:
    """Print one run."""
    print(f"{name}: {seconds:.2f} s, validation loss {loss:.4f}, {parameters:,} parameters")


if __name__ == "__main__":
    main()
