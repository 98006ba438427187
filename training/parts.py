"""The parts of a run, made of its configuration: windows, dtype, model, optimizer."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from data.tokens import EpochWindows, PreparedData, RandomWindows, ValidationWindows
from dist.ddp import DDP
from dist.grad_scaler import GradScaler
from dist.process_group import World
from dist.sharded_optimizer import ShardedOptimizer
from model.transformer import Transformer
from optim.adamw import AdamW, decay_groups
from optim.muon import Muon, matrix_groups
from training.batches import Batches
from training.config import Config
from training.config_checks import with_length
from training.hardware import resolve_dtype


def make_windows(
    config: Config, data: PreparedData
) -> tuple[Config, RandomWindows | EpochWindows, ValidationWindows | None]:
    """Training and validation windows, and the configuration with its length filled in."""
    context, seed = config.model.max_seq_len, config.run.seed
    val_windows = None
    if config.run.val_interval:
        val_windows = ValidationWindows(data.val, context, config.run.val_windows, seed)
    epoch_windows = EpochWindows(data.train, context, seed)
    config = with_length(config, epoch_windows.num_windows)
    if config.schedule.epochs is not None:
        return config, epoch_windows, val_windows
    return config, RandomWindows(data.train, context, seed), val_windows


def make_batches(config: Config, windows: RandomWindows | EpochWindows, world: World) -> Batches:
    """This rank's micro-batches of the training windows."""
    size = config.micro_batch_size(world.world_size)
    return Batches(windows, size, size * world.world_size, world.device)


def with_dtype(config: Config, world: World) -> Config:
    """The configuration with the dtype that auto stands for: rank 0's device decides for all."""
    dtype = world.on_rank_zero(partial(resolve_dtype, config.device.dtype, world.device))
    return replace(config, device=replace(config.device, dtype=dtype))


def make_model(config: Config, world: World) -> Transformer:
    """The model of the configuration, with weights from the seed."""
    return adapted(Transformer(config.model).to(world.device), config)


def adapted(model: Transformer, config: Config) -> Transformer:
    """The model with what the options of the device ask of it."""
    model.activation_checkpointing = config.device.activation_checkpointing
    for parameter in model.parameters():  # not buffers: the rotary angles stay float32
        parameter.data = parameter.data.to(getattr(torch, config.device.param_dtype))
    return model


def make_scaler(config: Config, world: World) -> GradScaler:
    """The scaler of the loss; with auto it does something for float16 alone."""
    wanted, dtype = config.device.grad_scaler, config.device.dtype
    is_enabled = wanted == "on" or (wanted == "auto" and dtype == "float16")
    return GradScaler(world.device.type, enabled=is_enabled)


def make_optimizer(config: Config, ddp: DDP) -> AdamW | ShardedOptimizer:
    """AdamW or Muon with decay on matrices alone; state sharded over the ranks if wished."""
    assert isinstance(ddp.module, Transformer)
    optimizer_class, groups, kwargs = optimizer_recipe(config, ddp.module)
    if is_sharded(config, has_others=ddp.collectives is not None):
        return ShardedOptimizer(groups, optimizer_class, ddp=ddp, **kwargs)
    return optimizer_class(groups, **kwargs)


def is_sharded(config: Config, has_others: bool) -> bool:
    """Whether a ShardedOptimizer is around; alone it keeps the masters of 16-bit weights."""
    needs_masters = config.device.param_dtype != "float32"
    return config.device.shard_optimizer and (has_others or needs_masters)


def optimizer_recipe(
    config: Config, model: Transformer
) -> tuple[type[AdamW], list[dict[str, Any]], dict[str, Any]]:
    """The optimizer's class, its groups of the model's parameters, and its other arguments."""
    options = config.optimizer
    named, decay = list(model.named_parameters()), options.weight_decay
    assert config.schedule.lr_max is not None
    kwargs: dict[str, Any] = {
        "lr": config.schedule.lr_max,
        "betas": (options.beta1, options.beta2),
        "eps": options.eps,
    }
    if options.optimizer == "adamw":
        return AdamW, decay_groups(named, decay), kwargs
    groups = matrix_groups(named, decay, model.row_blocks())
    for group in groups:
        if "whole_matrices" in group:
            group["lr_scale"] = options.muon_lr / max(config.schedule.lr_max, 1e-30)
    kwargs |= {
        "momentum": options.muon_momentum,
        "ns_steps": options.muon_ns_steps,
        "dtype": getattr(torch, config.device.dtype),
    }
    return Muon, groups, kwargs
