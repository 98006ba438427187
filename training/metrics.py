"""What a run says of itself: metrics.jsonl, TensorBoard, and the lines on the console.

Rank 0 alone writes. A resumed run continues all three: what an earlier process wrote beyond the
resumed step is cut off first, so that no step stands there twice.
"""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch

from data.tokens import EpochWindows, RandomWindows
from training.config import Config
from training.console import say
from training.hardware import measured_peak_flops, peak_flops, peak_memory_gb
from training.job import Job
from training.run_folder import RunFolder
from training.step_clock import StepClock, slowest_rank_share

# A CPU's peak rate is measured in runs that are long enough for it, once they are under way.
STEPS_WORTH_A_MEASUREMENT = 200
STEPS_BEFORE_MEASUREMENT = 20

# From where on the slowest rank is worth a word on the console; the files always have it.
NOTABLY_SLOWER = 1.1


class Metrics:
    """Writer of all measurements, or of nothing on ranks other than 0.

    What cannot be written, on a full disk, is said once and does not stop the training.

    Args:
        folder: of the run.
        last_iteration: steps that are done already; later entries are dropped.
        is_active: False makes every method do nothing.
    """

    def __init__(self, folder: RunFolder, last_iteration: int, is_active: bool) -> None:
        self._file: IO[str] | None = None
        self._board: Any = None
        self._failed = False
        if is_active:
            # Imported here: it takes a second that ranks without a writer need not spend.
            from torch.utils.tensorboard import SummaryWriter

            with self._kept_going():
                # A run that starts at 0 validates at 0: of an earlier start there nothing is kept.
                keep_until(folder.metrics, last_iteration or -1)
                # purge_step makes TensorBoard forget what an earlier process wrote from there on.
                purge = last_iteration + 1 if last_iteration else 0
                self._board = SummaryWriter(str(folder.tensorboard), purge_step=purge)
                self._file = open(folder.metrics, "a", encoding="utf-8")  # noqa: SIM115

    def log(self, iteration: int, **values: float) -> None:
        """Write values of one step to both files, under their names."""
        if self._file is None or self._board is None:
            return
        # JSON has no NaN: a value that is not finite is written as its name.
        plain = {k: v if math.isfinite(v) else str(v) for k, v in values.items()}
        with self._kept_going():
            self._file.write(json.dumps({"iteration": iteration, **plain}) + "\n")
            self._file.flush()
            for name, value in values.items():
                self._board.add_scalar(name, value, iteration)

    def flush(self) -> None:
        """Hand all to the operating system; done before a checkpoint, which must not be ahead."""
        if self._board is not None:
            with self._kept_going():
                self._board.flush()

    def close(self) -> None:
        """Flush and close both files."""
        if self._file is not None and self._board is not None:
            with self._kept_going():
                self._file.close()
                self._board.close()

    @contextmanager
    def _kept_going(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not self._failed:
                say(f"measurements are not written: {error}; the training goes on")
            self._failed = True


def introduce(job: Job) -> None:
    """Say what will be trained, on what, by how many processes, and for how long."""
    config, data, world = job.config, job.data, job.world
    total = job.tokens_per_step * config.schedule.iterations
    for line in config.lines():
        job.say(line)
    job.say(
        f"model: {job.model.num_parameters():,} parameters, "
        f"{job.model.num_flops_per_token() / 1e6:,.1f} MFLOP a token, "
        f"products in {str(job.dtype).removeprefix('torch.')}"
    )
    job.say(
        f"data: {data.data_dir}, {data.train.num_tokens:,} tokens for training, "
        f"{data.val.num_tokens:,} for validation, vocabulary {data.vocab_size}"
    )
    job.say(batch_line(config, world.world_size))
    job.say(
        f"length: {config.schedule.iterations} steps, {total:,} tokens, "
        f"{epochs(config, job.windows, data.train.num_tokens):.2f} epochs, on {world.device.type}, "
        f"CPU threads a process: {torch.get_num_threads()}"
    )
    if job.is_last and job.iteration > 0:
        job.say(f"nothing is left to do: {job.iteration} steps are done")


def batch_line(config: Config, world_size: int) -> str:
    """How the tokens of a step, the same for any number of processes, are shared out."""
    context, steps = config.model.max_seq_len, config.data.gradient_accumulation_steps
    return (
        f"batch: {config.micro_batch_size(world_size)} sequences x {steps} micro-batches x "
        f"{world_size} processes x {context} tokens = "
        f"{config.data.batch_size * context:,} tokens a step"
    )


def show_progress(
    job: Job,
    metrics: Metrics,
    clock: StepClock,
    loss: float,
    grad_norm: float,
    grad_scale: float | None = None,
) -> None:
    """Log and print one step; every rank must call it.

    Args:
        job: the run.
        metrics: where to log.
        clock: of the training steps since the last call.
        loss: mean over the global batch.
        grad_norm: before clipping.
        grad_scale: what the loss was multiplied by, if there is a scaler.
    """
    times = clock.lap()
    tokens_per_second = job.tokens_per_step / times.step
    values = {
        "loss_train": loss,
        "lr": job.lr,
        "grad_norm": grad_norm,
        "tokens_per_second": tokens_per_second,
        "seconds_per_step": times.step,
        "data_wait_share": times.data_wait / times.step,
        "memory_gb": peak_memory_gb(job.world.device),
        "skipped_steps": job.skipped_steps,
        "failed_saves": job.failed_saves,
    }
    if grad_scale is not None:
        values["grad_scale"] = grad_scale
    if job.world.world_size > 1:
        values["comm_wait_share"] = times.comm_wait / times.step
        values["slowest_rank_share"] = slowest_rank_share(times, job.world)
    with clock.paused():
        peak = _peak_flops(job)
    if peak:
        flops = tokens_per_second * job.model.num_flops_per_token()
        values["mfu"] = flops / (peak * job.world.world_size)
    metrics.log(job.iteration, **values)
    job.say(_progress_line(job, values))


def show_validation(job: Job, metrics: Metrics, val_loss: float, is_best: bool) -> None:
    """Log and print a validation loss in nats and its perplexity."""
    perplexity = math.exp(val_loss) if val_loss < 700 else math.inf
    metrics.log(job.iteration, val_loss=val_loss, val_perplexity=perplexity)
    job.say(
        f"step {job.iteration}: validation loss {val_loss:.4f}, perplexity {perplexity:,.2f}"
        f"{'  (best so far)' if is_best else ''}"
    )


def keep_until(jsonl: Path, last_iteration: int) -> None:
    """Drop entries later than `last_iteration`, and lines that a kill or the disk has damaged."""
    if not jsonl.exists():
        return
    kept = []
    for line in jsonl.read_bytes().splitlines():
        try:
            is_kept = json.loads(line.decode())["iteration"] <= last_iteration
        except (ValueError, TypeError, KeyError, RecursionError):  # no JSON, or no entry of ours
            continue
        if is_kept:
            kept.append(line + b"\n")
    temporary = jsonl.with_suffix(".tmp")
    temporary.write_bytes(b"".join(kept))
    temporary.replace(jsonl)


def duration(seconds: float) -> str:
    """Seconds as 1:05 or 2:03:04."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def epochs(config: Config, windows: RandomWindows | EpochWindows, num_tokens: int) -> float:
    """How often a run goes over the training text, counted in what it draws from.

    Args:
        config: of a known length.
        windows: where the global batches come from.
        num_tokens: of the training text.
    """
    sequences = config.schedule.iterations * config.data.batch_size
    if isinstance(windows, EpochWindows):
        return sequences / windows.num_windows
    return sequences * config.model.max_seq_len / num_tokens


def _peak_flops(job: Job) -> float | None:
    """Of this rank's device; a CPU's is measured, by all ranks at once as they compute at once."""
    device, is_long = job.world.device, job.config.schedule.iterations >= STEPS_WORTH_A_MEASUREMENT
    # Products of float16 have a slow form of their own there, which linear layers do not take.
    has_peak = device.type == "cpu" and job.dtype != torch.float16
    if has_peak and is_long and job.iteration >= STEPS_BEFORE_MEASUREMENT:
        return measured_peak_flops(job.dtype)
    return peak_flops(device, job.dtype)


def _progress_line(job: Job, values: dict[str, float]) -> str:
    iterations = job.config.schedule.iterations
    seconds_left = (iterations - job.iteration) * values["seconds_per_step"]
    parts = [
        f"step {job.iteration:>{len(str(iterations))}}/{iterations}",
        f"loss {values['loss_train']:.4f}",
        f"lr {values['lr']:.2e}",
        f"grad_norm {values['grad_norm']:.3f}",
        f"{values['tokens_per_second']:,.0f} tokens/s",
    ]
    if "mfu" in values:
        parts.append(f"MFU {values['mfu']:.1%}")
    elif job.world.device.type != "cpu":
        parts.append("MFU unknown")
    parts.append(_waits(values))
    parts.append(f"{duration(seconds_left)} left")
    return " | ".join(parts)


def _waits(values: dict[str, float]) -> str:
    """What of a step's time was no computation, and how unequal the ranks are."""
    said = f"waits {values['data_wait_share']:.1%} data"
    if "comm_wait_share" in values:
        said += f" {values['comm_wait_share']:.1%} comm"
        if values["slowest_rank_share"] >= NOTABLY_SLOWER:
            said += f", slowest rank x{values['slowest_rank_share']:.2f}"
    return said
