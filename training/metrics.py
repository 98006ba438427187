"""What a run says of itself: metrics.jsonl, TensorBoard, and the lines on the console.

Rank 0 alone writes. A resumed run continues all three: what an earlier process wrote beyond the
resumed step is cut off first, so that no step stands there twice.
"""

import json
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from data.tokens import EpochWindows
from training.console import say
from training.hardware import peak_flops, peak_memory_gb
from training.job import Job
from training.run_folder import RunFolder


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


class StepClock:
    """Time spent in training steps, without validation and saving."""

    def __init__(self) -> None:
        self._since = time.perf_counter()
        self._steps = 0

    def count_step(self) -> None:
        """Note that one more step is done."""
        self._steps += 1

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out what is done inside."""
        before = time.perf_counter()
        yield
        self._since += time.perf_counter() - before

    def seconds_per_step(self) -> float:
        """Mean since the last call."""
        now = time.perf_counter()
        seconds = (now - self._since) / max(1, self._steps)
        self._since, self._steps = now, 0
        return seconds


def introduce(job: Job) -> None:
    """Say what will be trained, on what, by how many processes, and for how long."""
    config, data, world = job.config, job.data, job.world
    context = config.model.max_seq_len
    steps = config.data.gradient_accumulation_steps
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
    job.say(
        f"batch: {config.micro_batch_size(world.world_size)} sequences x {steps} micro-batches x "
        f"{world.world_size} processes x {context} tokens = {job.tokens_per_step:,} tokens a step"
    )
    job.say(
        f"length: {config.schedule.iterations} steps, {total:,} tokens, "
        f"{_epochs(job):.2f} epochs, on {world.device.type}"
    )
    if job.is_last and job.iteration > 0:
        job.say(f"nothing is left to do: {job.iteration} steps are done")


def show_progress(
    job: Job,
    metrics: Metrics,
    clock: StepClock,
    loss: float,
    grad_norm: float,
    grad_scale: float | None = None,
) -> None:
    """Log and print one step.

    Args:
        job: the run.
        metrics: where to log.
        clock: of the training steps.
        loss: mean over the global batch.
        grad_norm: before clipping.
        grad_scale: what the loss was multiplied by, if there is a scaler.
    """
    seconds = clock.seconds_per_step()
    tokens_per_second = job.tokens_per_step / seconds
    values = {
        "loss_train": loss,
        "lr": job.lr,
        "grad_norm": grad_norm,
        "tokens_per_second": tokens_per_second,
        "seconds_per_step": seconds,
        "memory_gb": peak_memory_gb(job.world.device),
        "skipped_steps": job.skipped_steps,
        "failed_saves": job.failed_saves,
    }
    if grad_scale is not None:
        values["grad_scale"] = grad_scale
    if peak := peak_flops(job.world.device, job.dtype):
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
    """Drop entries later than `last_iteration`, and a line that a kill left unfinished."""
    if not jsonl.exists():
        return
    kept = []
    for line in jsonl.read_text(encoding="utf-8").splitlines():
        try:
            is_kept = json.loads(line)["iteration"] <= last_iteration
        except (ValueError, TypeError, KeyError):  # no JSON, or no entry of ours
            continue
        if is_kept:
            kept.append(line + "\n")
    temporary = jsonl.with_suffix(".tmp")
    temporary.write_text("".join(kept), encoding="utf-8")
    temporary.replace(jsonl)


def duration(seconds: float) -> str:
    """Seconds as 1:05 or 2:03:04."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _epochs(job: Job) -> float:
    """How often the run goes over the training text, counted in what it draws from."""
    sequences = job.config.schedule.iterations * job.config.data.batch_size
    if isinstance(job.windows, EpochWindows):
        return sequences / job.windows.num_windows
    return sequences * job.config.model.max_seq_len / job.data.train.num_tokens


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
    if job.world.device.type != "cpu":
        parts.append(f"MFU {values['mfu']:.1%}" if "mfu" in values else "MFU unknown")
    parts.append(f"{duration(seconds_left)} left")
    return " | ".join(parts)
