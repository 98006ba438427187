"""A training run under way: what it consists of, and how far it is."""

import math
from dataclasses import dataclass

import torch

from data.tokens import EpochWindows, PreparedData, RandomWindows, ValidationWindows
from dist.ddp import DDP
from dist.process_group import World
from model.transformer import Transformer
from training.config import Config
from training.console import say
from training.run_folder import RunFolder


@dataclass
class Job:
    """The parts of a run; only the last four change while it trains.

    Attributes:
        config: complete, nothing left to be filled in.
        world: the processes.
        data: the open token files.
        windows: where the global batches come from.
        val_windows: the fixed validation windows; None without validation.
        model: on its device, unwrapped.
        ddp: the same model, averaging its gradients over the ranks.
        optimizer: over the model's parameters.
        folder: of the run.
        dtype: of matrix products.
        iteration: optimizer steps done.
        best_val_loss: lowest validation loss so far, in nats.
        skipped_steps: steps without an update so far, because their gradient was not finite.
        skipped_in_a_row: how many of them were the last ones.
    """

    config: Config
    world: World
    data: PreparedData
    windows: RandomWindows | EpochWindows
    val_windows: ValidationWindows | None
    model: Transformer
    ddp: DDP
    optimizer: torch.optim.Optimizer
    folder: RunFolder
    dtype: torch.dtype
    iteration: int = 0
    best_val_loss: float = math.inf
    skipped_steps: int = 0
    skipped_in_a_row: int = 0

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
    def tokens_per_step(self) -> int:
        """Tokens that one optimizer step trains on, over all ranks."""
        return self.config.data.batch_size * self.config.model.max_seq_len

    @property
    def progress(self) -> dict[str, int | float]:
        """How far the run is, as a checkpoint holds it."""
        return {
            "iteration": self.iteration,
            "best_val_loss": self.best_val_loss,
            "skipped_steps": self.skipped_steps,
            "skipped_in_a_row": self.skipped_in_a_row,
        }

    def say(self, line: str) -> None:
        """Print a line, once for all ranks."""
        if self.is_rank_zero:
            say(line)
