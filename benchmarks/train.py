"""Is our training step as fast as a plain PyTorch loop, and does it wait for its data?

    python benchmarks/train.py [--compile] [--json FILE]

One process, a language model of 30 M parameters, 8 x 128 tokens a step. Ours is
`train_ddp.training_step` as a run calls it, with AdamW and with Muon, products in float32 and in
bfloat16; the plain loop (benchmarks/plain.py) is torch's own parts with fused AdamW, the same
weights, text, learning rate and clipping. All variants run in turn; a ratio is the median over the
rounds of both times of a round. `--compile` adds ours with compiled blocks, which takes half a
minute and more before the first round.

`--parts` also takes memory, the peak of head and loss (benchmarks/loss_memory.py), and data, the
share of a run's time in which it waits for its data.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script

from benchmarks.loss_memory import loss_memory_ratio
from benchmarks.plain import PlainTransformer, plain_step
from benchmarks.side_by_side import Times, interleave, median, show_table, write_figures
from dist.ddp import DDP
from dist.process_group import World, init_process_group, set_random_seed
from optim.adamw import decay_groups
from train_ddp import lr_at, training_step
from training.allocator import keep_freed_memory
from training.bad_steps import BadSteps
from training.compiling import compile_blocks
from training.config import Config, load_config
from training.config_checks import with_length
from training.interrupt import StopRequest
from training.job import Job
from training.outcome import take_in
from training.parts import make_batches, make_model, make_optimizer, make_scaler, with_dtype
from training.step_reports import Reports

ROOT = Path(__file__).resolve().parent.parent
BATCHES = 8  # of random tokens, used again and again
DTYPES = ("float32", "bfloat16")
# A run of 60 steps that does nothing but train, its time seen every five steps.
SHORT_RUN = ["--iterations=60", "--batch_size=8", "--log_interval=5", "--val_interval=0"]
OURS, PLAIN = "ours {dtype} {optimizer}{compiled}", "plain {dtype}"

Step = Callable[[], float]


def main() -> None:
    """All parts that are asked for, one after the other."""
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = ["steps", "memory", "data"]
    flags.add_argument("--parts", nargs="+", choices=parts, default=parts)
    flags.add_argument("--threads", type=int, default=2, help="(default 2)")
    flags.add_argument("--rounds", type=int, default=9, help="counted (default 9)")
    flags.add_argument("--compile", action="store_true", help="ours with compiled blocks, too")
    flags.add_argument("--optimizers", nargs="+", default=["adamw", "muon"])
    flags.add_argument("--vocab_size", type=int, default=4096)
    flags.add_argument("--num_layers", type=int, default=8)
    flags.add_argument("--d_model", type=int, default=512)
    flags.add_argument("--num_heads", type=int, default=8)
    flags.add_argument("--max_seq_len", type=int, default=128, help="tokens of a sequence")
    flags.add_argument("--batch_size", type=int, default=8, help="sequences of a step")
    flags.add_argument("--json", help="file for the figures")
    options = flags.parse_args()
    torch.set_num_threads(options.threads)
    keep_freed_memory()  # as a run does; the plain loop has the good of it, too
    figures: dict[str, float] = {}
    if "steps" in options.parts:
        figures |= measure_steps(options, init_process_group())
    if "memory" in options.parts:
        figures["loss_memory_ratio"] = loss_memory_ratio([f"--threads={options.threads}"])
    if "data" in options.parts and (share := data_wait_share(options.threads)) is not None:
        figures["data_wait_share"] = share
    print()
    write_figures(options.json, figures)


# Steps.


def measure_steps(options: argparse.Namespace, world: World) -> dict[str, float]:
    """Tokens/s of every variant over those of the plain loop in float32."""
    variants: dict[str, Step] = {}
    first_loss: dict[str, float] = {}
    for dtype in DTYPES:
        name = PLAIN.format(dtype=dtype)
        variants[name] = plain_variant(options, dtype, world)
    for compiled in (False, True) if options.compile else (False,):
        for dtype in DTYPES:
            for optimizer in options.optimizers:
                suffix = " compiled" if compiled else ""
                name = OURS.format(dtype=dtype, optimizer=optimizer, compiled=suffix)
                variants[name] = our_variant(options, dtype, optimizer, compiled, world)
    for name, step in variants.items():
        first_loss[name] = step()
        tolerance = 1e-5 if "float32" in name else 1e-2
        expected = first_loss[PLAIN.format(dtype="float32")]
        assert abs(first_loss[name] / expected - 1) < tolerance, first_loss  # the same model
    times = interleave(variants, options.rounds, world)
    plain = PLAIN.format(dtype="float32")
    print(f"one step, {options.threads} threads, {options.rounds} rounds, on {world.device.type}")
    show_table(times, [PLAIN.format(dtype=dtype) for dtype in DTYPES])
    tokens = options.batch_size * options.max_seq_len
    for name in times:
        print(f"{name}: {tokens / median(times, name):,.0f} tokens/s")
    figures = {}
    for name in times:
        if name != plain:
            figures[key_of(name)] = ratio(times, plain, name)
    if "adamw" in options.optimizers:
        for short, dtype in (("fp32", "float32"), ("bf16", "bfloat16")):
            ours = OURS.format(dtype=dtype, optimizer="adamw", compiled="")
            figures[f"tokens_ratio_{short}"] = figures[key_of(ours)]
    return figures


def key_of(name: str) -> str:
    """Of a variant's figure."""
    return "tokens_ratio_" + name.replace(" ", "_")


def ratio(times: Times, of: str, over: str) -> float:
    """Median over the rounds of one variant's time over another's."""
    return statistics.median(a / b for a, b in zip(times[of], times[over], strict=True))


def make_config(
    options: argparse.Namespace, dtype: str, optimizer: str, compiled: bool, world: World
) -> Config:
    """What `train_ddp.main` makes of the command line."""
    shape = ("num_layers", "d_model", "num_heads", "max_seq_len", "batch_size")
    argv = [f"--{name}={getattr(options, name)}" for name in shape]
    argv += [f"--dtype={dtype}", f"--optimizer={optimizer}", f"--compile={compiled}".lower()]
    config = load_config("", argv)
    config = replace(config, model=config.model.resolve(options.vocab_size))
    return with_length(with_dtype(config, world), num_windows=1)


class RandomTokens:
    """The text: windows of random tokens, by number of the sample."""

    def __init__(self, options: argparse.Namespace) -> None:
        draw = np.random.default_rng(0)
        shape = (BATCHES * options.batch_size, options.max_seq_len + 1)
        self.tokens = draw.integers(options.vocab_size, size=shape, dtype=np.int64)
        self.batch_size = options.batch_size

    def rows(self, samples: np.ndarray) -> np.ndarray:
        """Tokens (samples, max_seq_len + 1) int64."""
        return self.tokens[samples % len(self.tokens)]

    def batch(self, step: int) -> Tensor:
        """The same as a tensor, of step 0, 1, 2, ..."""
        return torch.from_numpy(self.rows(np.arange(self.batch_size) + step * self.batch_size))


def make_job(config: Config, windows: Any, world: World) -> Job:
    """A run as `train_ddp.main` makes it, which neither reads nor writes a file."""
    set_random_seed(config.run.seed)
    model = make_model(config, world)
    ddp = DDP(model, config.device.bucket_cap_mb)
    nowhere: Any = None
    return Job(
        config=config,
        world=world,
        data=nowhere,
        data_fingerprint="",
        windows=windows,
        batches=make_batches(config, windows, world),
        val_windows=None,
        model=model,
        ddp=ddp,
        optimizer=make_optimizer(config, ddp),
        scaler=make_scaler(config, world),
        folder=nowhere,
        writer=nowhere,
        dtype=getattr(torch, config.device.dtype),
        stop=StopRequest(None),
        bad_steps=BadSteps(config.optimizer.spike_factor, world.device),
        reports=Reports(world.device),
    )


def our_variant(
    options: argparse.Namespace, dtype: str, optimizer: str, compiled: bool, world: World
) -> Step:
    """The job's step."""
    config = make_config(options, dtype, optimizer, compiled, world)
    job = make_job(config, RandomTokens(options), world)
    compile_blocks(job)
    if compiled and job.model.blocks[0]._compiled_call_impl is None:
        raise SystemExit("nothing is compiled here: leave out --compile")

    def step() -> float:
        job.iteration += 1
        training_step(job)
        report, _ = take_in(job, is_awaited=True)
        assert report is not None
        return report.loss

    return step


def plain_variant(options: argparse.Namespace, dtype: str, world: World) -> Step:
    """The plain loop, with the job's weights, text, learning rate, decay and clipping."""
    config = make_config(options, dtype, "adamw", False, world)
    job = make_job(config, RandomTokens(options), world)
    model = PlainTransformer(config.model).to(world.device)
    model.load_state_dict(job.model.state_dict())
    assert config.schedule.lr_max is not None
    optimizer = torch.optim.AdamW(
        decay_groups(list(model.named_parameters()), config.optimizer.weight_decay),
        lr=config.schedule.lr_max,
        betas=(config.optimizer.beta1, config.optimizer.beta2),
        eps=config.optimizer.eps,
        fused=True,
    )

    def learning_rate_at(step: int) -> float:
        job.iteration = step + 1
        return lr_at(job)

    return plain_step(
        model,
        optimizer,
        RandomTokens(options).batch,
        learning_rate_at,
        getattr(torch, dtype),
        config.optimizer.max_norm,
    )


# Data.


def data_wait_share(threads: int) -> float | None:
    """Median share of a run's time in which it waits for its next batch; None: it says none."""
    with tempfile.TemporaryDirectory() as folder:
        text, data, run = (str(Path(folder, name)) for name in ("text", "data", "run"))
        Path(text).mkdir()
        for number, source in enumerate(sorted(Path(json.__file__).parent.parent.glob("a*.py"))):
            Path(text, f"{number}.py").write_bytes(source.read_bytes())
        commands = (
            ["prepare.py", f"--input={text}", f"--out_dir={data}", "--vocab_size=1024"],
            ["train_ddp.py", f"--data_dir={data}", f"--out_dir={run}", *SHORT_RUN],
        )
        for script, *arguments in commands:
            subprocess.run(
                [sys.executable, str(ROOT / script), *arguments],
                check=True,
                stdout=subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": str(threads)},
            )
        lines = Path(run, "metrics.jsonl").read_text().splitlines()
    entries = [entry for entry in map(json.loads, lines) if "data_wait_share" in entry]
    return statistics.median(e["data_wait_share"] for e in entries) if entries else None


if __name__ == "__main__":
    main()
