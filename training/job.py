"""A training run under way: what it consists of, and how far it is."""

import math
from dataclasses import dataclass
from typing import Any

import torch

from data.tokens import EpochWindows, PreparedData, RandomWindows, ValidationWindows
from dist.ddp import DDP
from dist.grad_scaler import GradScaler
from dist.process_group import World
from dist.sharded_optimizer import ShardedOptimizer
from model.transformer import Transformer
from optim.adamw import AdamW
from training.bad_steps import BadSteps
from training.batches import Batches
from training.checkpoint_writer import CheckpointWriter
from training.config import Config
from training.console import say
from training.interrupt import StopRequest
from training.run_folder import RunFolder
from training.step_reports import Reports

# What of a job a checkpoint holds.
PROGRESS = (
    "iteration",
    "samples",
    "best_val_loss",
    "skipped_steps",
    "skipped_in_a_row",
    "recent_grad_norms",
    "rollbacks",
)


@dataclass
class Job:
    """The parts of a run; what stands after `reports` changes while it trains.

    Attributes:
        config: complete, nothing left to be filled in.
        world: the processes.
        data: the open token files.
        data_fingerprint: of these.
        windows: where the global batches come from.
        batches: this rank's part of these, read ahead.
        val_windows: the fixed validation windows; None without validation.
        model: on its device, unwrapped.
        ddp: the same model, averaging its gradients over the ranks.
        optimizer: over the model's parameters.
        scaler: of the loss; not enabled, it does nothing.
        folder: of the run.
        writer: of checkpoints.
        dtype: of matrix products.
        stop: what may ask this process to save and leave.
        bad_steps: which steps change no weight.
        reports: what came out of the last steps.
        iteration: optimizer steps done.
        samples: sequences that training has drawn from the data; the next one has this number.
        best_val_loss: lowest validation loss so far, in nats.
        best_saved_before: the same without the checkpoint that is being written.
        skipped_steps: steps without an update so far, see bad_steps.py.
        skipped_in_a_row: how many of them were the last ones.
        rollbacks: how often the run went back to a checkpoint because it diverged.
        failed_saves: checkpoints that could not be written since the process started.
        lr: learning rate of the last step.
    """

    config: Config
    world: World
    data: PreparedData
    data_fingerprint: str
    windows: RandomWindows | EpochWindows
    batches: Batches
    val_windows: ValidationWindows | None
    model: Transformer
    ddp: DDP
    optimizer: AdamW | ShardedOptimizer
    scaler: GradScaler
    folder: RunFolder
    writer: CheckpointWriter
    dtype: torch.dtype
    stop: StopRequest
    bad_steps: BadSteps
    reports: Reports
    iteration: int = 0
    samples: int = 0
    best_val_loss: float = math.inf
    best_saved_before: float = math.inf
    skipped_steps: int = 0
    skipped_in_a_row: int = 0
    rollbacks: int = 0
    failed_saves: int = 0
    lr: float = 0.0

    @property
    def is_rank_zero(self) -> bool:
        """Whether this process speaks and writes for all."""
        return self.world.rank == 0

    def is_due(self, interval: int) -> bool:
        """Whether something done every `interval` steps (0: never) is due after this step."""
        return interval > 0 and self.iteration % interval == 0

    @property
    def is_last(self) -> bool:
        """Whether no step is left."""
        return self.iteration >= self.config.schedule.iterations

    @property
    def has_diverged(self) -> bool:
        """Whether too many steps in a row were left out."""
        return self.skipped_in_a_row >= self.config.optimizer.max_skipped_steps

    @property
    def recent_grad_norms(self) -> list[float]:
        """What the next gradient norm is compared with."""
        return self.bad_steps.recent

    @recent_grad_norms.setter
    def recent_grad_norms(self, norms: list[float]) -> None:
        self.bad_steps.recent = norms

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one optimizer step trains on, over all ranks."""
        return self.config.data.batch_size * self.config.model.max_seq_len

    @property
    def progress(self) -> dict[str, Any]:
        """How far the run is, as a checkpoint holds it."""
        return {name: getattr(self, name) for name in PROGRESS}

    def say(self, line: str) -> None:
        """Print a line, once for all ranks."""
        if self.is_rank_zero:
            say(line)
