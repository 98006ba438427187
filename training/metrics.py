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

from torch import Tensor

from dist.collectives import all_reduce_sum
from training.hardware import peak_flops, peak_memory_gb
from training.job import Job


class Metrics:
    """Writer of all measurements, or of nothing on ranks other than 0.

    Args:
        jsonl: path of metrics.jsonl.
        tensorboard: folder of the event files.
        last_iteration: steps that are done already; later entries are dropped.
        is_active: False makes every method do nothing.
    """

    def __init__(
        self, jsonl: Path, tensorboard: Path, last_iteration: int, is_active: bool
    ) -> None:
        self._file = None
        self._board = None
        if is_active:
            # Imported here: it takes a second that ranks without a writer need not spend.
            from torch.utils.tensorboard import SummaryWriter

            keep_until(jsonl, last_iteration)
            self._file = open(jsonl, "a", encoding="utf-8")  # noqa: SIM115
            # purge_step tells TensorBoard to forget what an earlier process wrote from there on.
            purge = last_iteration + 1 if last_iteration else None
            self._board = SummaryWriter(str(tensorboard), purge_step=purge)

    def log(self, iteration: int, **values: float) -> None:
        """Write values of one step to both files, under their names."""
        if self._file is None or self._board is None:
            return
        # JSON has no NaN: a value that is not finite is written as its name.
        plain = {k: v if math.isfinite(v) else str(v) for k, v in values.items()}
        self._file.write(json.dumps({"iteration": iteration, **plain}) + "\n")
        self._file.flush()
        for name, value in values.items():
            self._board.add_scalar(name, value, iteration)

    def flush(self) -> None:
        """Bring all to the disk; done before a checkpoint, which must not be ahead of it."""
        if self._board is not None:
            self._board.flush()

    def close(self) -> None:
        """Flush and close both files."""
        if self._file is not None and self._board is not None:
            self._file.close()
            self._board.close()


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
        f"{total / data.train.num_tokens:.2f} epochs, on {world.device.type}"
    )


def show_progress(
    job: Job, metrics: Metrics, clock: StepClock, loss: Tensor, grad_norm: float, lr: float
) -> None:
    """Log and print one step; every rank must call it.

    Args:
        job: the run.
        metrics: where to log.
        clock: of the training steps.
        loss: this rank's mean loss; shown is the mean over all ranks.
        grad_norm: before clipping.
        lr: of this step.
    """
    mean_loss = all_reduce_sum(loss / job.world.world_size).item()
    seconds = clock.seconds_per_step()
    tokens_per_second = job.tokens_per_step / seconds
    values = {
        "loss_train": mean_loss,
        "lr": lr,
        "grad_norm": grad_norm,
        "tokens_per_second": tokens_per_second,
        "seconds_per_step": seconds,
        "memory_gb": peak_memory_gb(job.world.device),
        "skipped_steps": job.skipped_steps,
    }
    if peak := peak_flops(job.world.device, job.dtype):
        flops = tokens_per_second * job.model.num_flops_per_token()
        values["mfu"] = flops / (peak * job.world.world_size)
    metrics.log(job.iteration, **values)
    job.say(_progress_line(job, values))


def show_validation(job: Job, metrics: Metrics, val_loss: float) -> None:
    """Log and print a validation loss in nats and its perplexity."""
    perplexity = math.exp(val_loss) if val_loss < 700 else math.inf
    metrics.log(job.iteration, val_loss=val_loss, val_perplexity=perplexity)
    job.say(
        f"step {job.iteration}: validation loss {val_loss:.4f}, perplexity {perplexity:,.2f}"
        f"{'  (best so far)' if val_loss < job.best_val_loss and job.iteration else ''}"
    )


def keep_until(jsonl: Path, last_iteration: int) -> None:
    """Drop entries later than `last_iteration`, and a line that a kill left unfinished."""
    if not jsonl.exists():
        return
    kept = []
    for line in jsonl.read_text(encoding="utf-8").splitlines():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue
        if entry["iteration"] <= last_iteration:
            kept.append(line + "\n")
    temporary = jsonl.with_suffix(".tmp")
    temporary.write_text("".join(kept), encoding="utf-8")
    temporary.replace(jsonl)


def duration(seconds: float) -> str:
    """Seconds as 1:05 or 2:03:04."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


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
