"""What the benchmarks of dist/ time: data parallel training steps of a language model.

Every variant has a model, an optimizer and a batch of its own, and is one function: a whole
step, from the forward to the cleared gradients.
"""

import argparse
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from dist.ddp import DDP
from dist.process_group import World
from dist.sharded_optimizer import ShardedOptimizer
from model.config import ModelConfig
from model.transformer import Transformer
from optim.adamw import AdamW
from training.allocator import keep_freed_memory

LEARNING_RATE = 1e-4
NO_COMMUNICATION = "no communication"
OURS = "our DDP + ShardedOptimizer"

# What torch's documentation recommends, and what was seen to be faster in one place or another.
# The model's buffers are tables that never change: torch need not broadcast them.
COMMON = {"gradient_as_bucket_view": True, "broadcast_buffers": False}
TORCH_DDP_SETTINGS: dict[str, dict[str, Any]] = {
    "torch DDP, 25 MB": COMMON,
    "torch DDP, 25 MB, static graph": {**COMMON, "static_graph": True},
    "torch DDP, 100 MB": {**COMMON, "bucket_cap_mb": 100},
}

Step = Callable[[], Tensor]


def parser(description: str | None) -> argparse.ArgumentParser:
    """Flags for size, ranks, dtype and rounds."""
    flags = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument("--ranks", type=int, default=2, help="processes (default 2)")
    flags.add_argument("--threads", type=int, default=1, help="of each process (default 1)")
    flags.add_argument("--rounds", type=int, default=25, help="counted (default 25)")
    flags.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    flags.add_argument("--vocab_size", type=int, default=4096)
    flags.add_argument("--num_layers", type=int, default=8)
    flags.add_argument("--d_model", type=int, default=512)
    flags.add_argument("--num_heads", type=int, default=8)
    flags.add_argument("--max_seq_len", type=int, default=128, help="tokens of a sequence")
    flags.add_argument("--sequences", type=int, default=4, help="of each rank")
    flags.add_argument("--bucket_cap_mb", type=float, help="of our DDP")
    flags.add_argument("--json", help="file for the figures")
    return flags


def make_model(options: argparse.Namespace, world: World) -> Transformer:
    """A model of the size asked for, the same on every rank and in every variant."""
    keep_freed_memory()  # as a run does; every variant has the good of it
    torch.manual_seed(0)
    config = ModelConfig(
        vocab_size=options.vocab_size,
        num_layers=options.num_layers,
        d_model=options.d_model,
        num_heads=options.num_heads,
        max_seq_len=options.max_seq_len,
    )
    return Transformer(config.resolve(options.vocab_size)).to(world.device)


def make_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    options: argparse.Namespace,
    world: World,
    finish: Callable[[], None] = lambda: None,
) -> Step:
    """One training step.

    Args:
        model: wrapped or not.
        optimizer: over its parameters.
        options: see `parser`.
        world: this process.
        finish: called after backward.
    """
    generator = torch.Generator().manual_seed(world.rank)
    shape = (options.sequences, options.max_seq_len + 1)
    tokens = torch.randint(options.vocab_size, shape, generator=generator).to(world.device)
    dtype = getattr(torch, options.dtype)

    def step() -> Tensor:
        with torch.autocast(world.device.type, dtype, enabled=dtype != torch.float32):
            logits = model(tokens[:, :-1])
        loss = cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        finish()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def without_communication(options: argparse.Namespace, world: World) -> dict[str, Step]:
    """The floor: every rank trains for itself."""
    model = make_model(options, world)
    return {NO_COMMUNICATION: make_step(model, torch_adamw(model), options, world)}


def torch_ddp(options: argparse.Namespace, world: World) -> dict[str, Step]:
    """torch's DDP with its fused AdamW, at several settings."""
    variants = {}
    for name, settings in TORCH_DDP_SETTINGS.items():
        model = make_model(options, world)
        wrapped = wrapped_by_torch(model, settings)
        variants[name] = make_step(wrapped, torch_adamw(model), options, world)
    return variants


def wrapped_by_torch(model: nn.Module, settings: dict[str, Any]) -> TorchDDP:
    """The model in torch's DDP, without a word on a setting whose name torch is about to change."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return TorchDDP(model, **settings)


def our_ddp(options: argparse.Namespace, world: World) -> dict[str, Step]:
    """Our DDP with our AdamW, unsharded."""
    model = make_model(options, world)
    ddp = DDP(model, options.bucket_cap_mb)
    optimizer = AdamW(model.parameters(), lr=LEARNING_RATE)
    return {"our DDP": make_step(ddp, optimizer, options, world, ddp.finish_gradient_sync)}


def our_sharded(
    options: argparse.Namespace, world: World
) -> tuple[dict[str, Step], DDP, ShardedOptimizer]:
    """Our DDP with our AdamW, sharded."""
    model = make_model(options, world)
    ddp = DDP(model, options.bucket_cap_mb)
    optimizer = ShardedOptimizer(model.parameters(), AdamW, ddp=ddp, lr=LEARNING_RATE)
    step = make_step(ddp, optimizer, options, world, ddp.finish_gradient_sync)
    return {OURS: step}, ddp, optimizer


def torch_adamw(model: nn.Module) -> torch.optim.Optimizer:
    """torch's fastest."""
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
