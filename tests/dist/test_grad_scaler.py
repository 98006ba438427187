"""An infinity on one rank makes all ranks skip the step, and the scale fall, as in one process."""

from typing import Any

import pytest
import torch

from dist.collectives import rank, world_size
from dist.ddp import DDP
from dist.grad_scaler import GradScaler
from dist.sharded_optimizer import ShardedOptimizer
from tests.dist.helpers import Branches, assert_close
from tests.harness import run_distributed

ADAMW = torch.optim.AdamW
ALL = range(4)
MAX_NORM = 0.05
SETTINGS: dict[str, Any] = {"init_scale": 1024.0, "growth_interval": 2}


def loss_of(module, step, part):
    """In step 2 one element has an infinite gradient on one rank, and so in the whole batch."""
    x = torch.randn(12, 5, generator=torch.Generator().manual_seed(step))
    loss = module(x.chunk(world_size())[part] if part is not None else x, ALL).square().mean()
    is_infinite = step == 2 and part in (None, world_size() - 1)
    layers = getattr(module, "module", module).layers
    return loss + layers[3].bias[0] * float("inf") if is_infinite else loss


def train(way, paired):
    module, alone = Branches(4), Branches(4)
    ddp = DDP(module, 30 * 4 / 2**20)
    settings: dict[str, Any] = {"ddp": ddp} if paired else {}
    optimizer = ShardedOptimizer(module.parameters(), ADAMW, lr=0.01, **settings)
    plain = ADAMW(alone.parameters(), lr=0.01)
    ours, theirs = GradScaler("cpu", **SETTINGS), torch.amp.GradScaler("cpu", **SETTINGS)
    scales = []
    for step in range(6):
        before = [p.clone() for p in alone.parameters()]
        ours.scale(loss_of(ddp, step, rank())).backward()
        ddp.finish_gradient_sync()
        theirs.scale(loss_of(alone, step, None)).backward()
        theirs.unscale_(plain)
        if way in ("unscale and clip", "on the device"):
            if way == "on the device":
                norm = optimizer.clip_grad_norm(MAX_NORM, ours.divisor)
            else:
                norm = ours.unscale_and_clip_(optimizer, MAX_NORM)
            reference = torch.nn.utils.clip_grad_norm_(alone.parameters(), MAX_NORM)
            assert torch.isfinite(norm) == (step != 2)
            if step != 2:
                torch.testing.assert_close(norm, reference, rtol=1e-5, atol=0)
        elif way == "unscale":
            ours.unscale_(optimizer)
        if way == "on the device":
            optimizer.found_inf = (~torch.isfinite(norm)).float()
            optimizer.step()
            ours.update_after(norm)
        else:
            ours.step(optimizer)
            ours.update()
        theirs.step(plain)
        theirs.update()
        optimizer.zero_grad()
        plain.zero_grad()
        optimizer.finish_gather()
        assert_close(module.parameters(), alone.parameters(), 1e-5)
        is_skipped = all(torch.equal(a, b) for a, b in zip(before, alone.parameters(), strict=True))
        assert is_skipped == (step == 2)
        assert ours.get_scale() == theirs.get_scale()
        scales.append(ours.get_scale())
    return scales


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("paired", [True, False])
@pytest.mark.parametrize("way", ["on the device", "unscale and clip", "unscale", "step alone"])
def test_all_ranks_skip_and_scale_as_one_process_with_torchs_own(way, size, paired):
    for scales in run_distributed(train, size, way, paired):
        assert scales == [1024, 2048, 1024, 1024, 2048, 2048]
