"""Validation: the mean loss over one fixed list of windows, shared out among the ranks."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np
import torch

from data.tokens import ValidationWindows
from dist.collectives import all_reduce_sum
from dist.process_group import World
from model.transformer import Transformer
from training.compiling import uncompiled


@torch.no_grad()
def evaluate(
    model: Transformer,
    windows: ValidationWindows,
    batch_size: int,
    world: World,
    autocast: Callable[[], AbstractContextManager[object]],
) -> float:
    """Mean loss in nats over all tokens of all validation windows; every rank must call it.

    Rank r takes the windows r, r + world_size, ...; sums and counts are added over the ranks
    before they are divided, so unequal shares and a last, smaller batch weigh what they should.
    No random generator is touched: validating more often changes nothing in training.

    Args:
        model: unwrapped; its training mode is restored.
        windows: the fixed list.
        batch_size: windows in one forward pass.
        world: the processes.
        autocast: makes the context of the forward pass.
    """
    was_training = model.training
    model.eval()
    # (sum of losses, tokens) in float64: the sum is over millions of tokens.
    total = torch.zeros(2, dtype=torch.float64, device=world.device)
    mine = np.arange(world.rank, windows.num_windows, world.world_size)
    for first in range(0, len(mine), batch_size):
        rows = torch.from_numpy(windows.rows(mine[first : first + batch_size])).to(world.device)
        with uncompiled(model), autocast():
            loss = model(rows[:, :-1], rows[:, 1:])
        tokens = rows.shape[0] * (rows.shape[1] - 1)
        total[0] += loss.double() * tokens
        total[1] += tokens
    model.train(was_training)
    loss_sum, count = all_reduce_sum(total).tolist()
    return loss_sum / count
