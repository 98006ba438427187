"""DDP averages the gradients of blocks that are run again in backward, bit for bit as of others."""

import pytest
import torch
from torch.nn import functional

from dist.collectives import rank, world_size
from dist.ddp import DDP
from tests.dist.helpers import fingerprint, gradients
from tests.harness import run_distributed
from tests.model.small_models import lively_model, random_ids


def train_a_model(activation_checkpointing, bucket_cap_mb, backend):
    """Fingerprints of this rank's losses and of its averaged gradients, step by step."""
    model = lively_model(tie_weights=True, dropout=0.1).train()
    model.activation_checkpointing = activation_checkpointing
    if backend is not None:
        for block in model.blocks:
            block.compile(backend=backend)
    ddp = DDP(model, bucket_cap_mb)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(rank())
    losses, averaged = [], []
    for step, micro_steps in enumerate([1, 2, 1]):
        rows = random_ids(2 * micro_steps * world_size(), 17, seed=step)
        micro_batches = rows.chunk(world_size())[rank()].chunk(micro_steps)
        for micro_batch in micro_batches[:-1]:
            with ddp.no_sync():
                losses.append(backward(ddp, micro_batch))
        losses.append(backward(ddp, micro_batches[-1]))
        ddp.finish_gradient_sync()
        averaged.append(fingerprint(gradients(model)))
        optimizer.step()
        ddp.zero_grad()
    return fingerprint(losses), averaged


def backward(ddp, tokens):
    logits = ddp(tokens[:, :-1])
    loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    return loss


def train_with_and_without(bucket_cap_mb, backend):
    plain, saving = (train_a_model(on, bucket_cap_mb, backend) for on in (False, True))
    assert saving == plain
    return saving


@pytest.mark.parametrize(
    ("bucket_cap_mb", "backend"), [(0.005, None), (25.0, None), (0.005, "aot_eager")]
)
def test_gradients_are_those_without_it_to_the_bit(bucket_cap_mb, backend):
    results = run_distributed(train_with_and_without, 2, bucket_cap_mb, backend)
    (losses, averaged), (other_losses, other_averaged) = results
    assert losses != other_losses
    assert averaged == other_averaged
    assert len(set(averaged)) == 3
