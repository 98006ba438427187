"""`--dry_run`: what a run would take and what would stop it, before it waits in a queue.

No process is started, no GPU needed, nothing read but the data and the run's folder, and nothing
written. What cannot be known here is said to be assumed.
"""

import contextlib
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from data.errors import CorpusError
from data.meta import FILE_NAME as META
from data.tokens import PreparedData, open_tokens
from dist.process_group import ProcessGroupError, check_backend
from model.config import ModelConfig, ModelConfigError
from model.transformer import Transformer
from training.checkpoint_file import CheckpointError, verify
from training.command_line import CommandLineError
from training.config import DEFAULT_DATA_DIR, Config
from training.config_checks import check, with_length
from training.console import say
from training.hardware import PEAK_16_BIT_FLOPS, devices_called, resolve_dtype
from training.memory import Memory, estimate
from training.metrics import batch_line, duration, epochs
from training.parts import make_windows
from training.run_folder import RunFolder

MISTAKES = (
    CheckpointError,
    CommandLineError,
    CorpusError,
    ModelConfigError,
    ProcessGroupError,
)
GB = 2**30
# prepare.py's default, for data that has not been prepared.
ASSUMED_VOCAB_SIZE = 4096

T = TypeVar("T")


@dataclass(frozen=True)
class Device:
    """What the run is reckoned for."""

    type: str
    """cpu or cuda."""
    name: str | None
    """As CUDA tells it; None: not known."""


def dry_run(config: Config) -> None:
    """Print what the run would take; on rank 0, should there be others.

    Raises:
        CommandLineError: the run could not start; names every problem.
    """
    if os.environ.get("RANK", "0") != "0":
        return
    problems: list[str] = []
    world_size = _tried(problems, partial(_world_size, config)) or 1
    _tried(problems, partial(check, config, world_size))
    device = _tried(problems, partial(_device, config)) or Device("cpu", None)
    _tried(problems, partial(check_backend, config.device.backend, device.type))
    data = _tried(problems, partial(_open_data, config.data.data_dir))
    shape = _tried(problems, partial(_resolved, config.model, data))
    _tried(problems, partial(_look_at_checkpoints, config))
    passes = None
    if _has_a_length(config):
        config, passes = _tried(problems, partial(_with_length, config, data)) or (config, None)
    if shape is not None:
        config = replace(config, model=shape)
    if problems:
        raise CommandLineError("; ".join(problems))
    dtype: Any = _dtype(config, device)
    config = replace(config, device=replace(config.device, dtype=dtype))
    say("dry run: nothing is started, computed or written")
    for line in config.lines():
        say(line)
    _say_what_it_computes(config, world_size, device, data, passes)
    _say_what_it_holds(config, world_size, device)
    if config.run.resume is not None or config.run.init_from is not None:
        say("whether the checkpoint is of this model is looked at when the run starts")


def _tried(problems: list[str], work: Callable[[], T]) -> T | None:
    """The result; None after a mistake, which joins the problems."""
    try:
        return work()
    except MISTAKES as mistake:
        problems.append(" ".join(str(mistake).split()))
        return None


def _world_size(config: Config) -> int:
    if config.planned.world_size is not None:
        return config.planned.world_size
    found = os.environ.get("WORLD_SIZE", "1")
    if not found.isdecimal() or int(found) < 1:
        raise CommandLineError(f"environment variable WORLD_SIZE is {found!r}: give --world_size")
    return int(found)


def _device(config: Config) -> Device:
    """The device that is named, or the one that is here.

    Raises:
        CommandLineError: a name that could be of several, or of none while the run is on CPUs.
    """
    wanted, planned = config.device.device, config.planned
    if planned.device_name is not None:
        if wanted == "cpu":
            raise CommandLineError("device cpu and device_name exclude each other: give one")
        called = devices_called(planned.device_name)
        if planned.peak_tflops is None and len({PEAK_16_BIT_FLOPS[name] for name in called}) > 1:
            raise CommandLineError(
                f"device_name {planned.device_name} may be {' or '.join(called)}: "
                "give one of them, or --peak_tflops"
            )
        return Device("cuda", called[0] if called else planned.device_name)
    if wanted == "cpu":
        return Device("cpu", None)
    if torch.cuda.is_available():
        return Device("cuda", torch.cuda.get_device_name())
    return Device("cuda" if wanted == "cuda" else "cpu", None)


def _dtype(config: Config, device: Device) -> str:
    if config.device.dtype == "auto" and device.type == "cuda" and not torch.cuda.is_available():
        return "bfloat16"  # as every GPU of these years multiplies it
    return resolve_dtype(config.device.dtype, torch.device(device.type))


def _open_data(folder: str) -> PreparedData | None:
    """The data; None where none has been prepared yet."""
    needed = Path(folder, META) if folder == DEFAULT_DATA_DIR else Path(folder)
    with contextlib.suppress(OSError):  # it cannot be looked at: opening it says why
        if not needed.exists():
            return None
    return open_tokens(folder)


def _resolved(model: ModelConfig, data: PreparedData | None) -> ModelConfig:
    if data is not None:
        return model.resolve(data.vocab_size)
    return model.resolve(ASSUMED_VOCAB_SIZE if model.vocab_size is None else 1)


def _look_at_checkpoints(config: Config) -> None:
    run = config.run
    if run.init_from:
        verify(Path(run.init_from))
    if run.out_dir and run.resume != "":
        RunFolder(run.out_dir, run.keep_checkpoints).look(run.resume, run.overwrite)


def _has_a_length(config: Config) -> bool:
    """Whether the options that the length follows from are sound by themselves."""
    epochs, sizes = config.schedule.epochs, (config.model.max_seq_len, config.data.batch_size)
    return min(sizes) > 0 and (epochs is None or 0 < epochs < math.inf)


def _with_length(config: Config, data: PreparedData | None) -> tuple[Config, float | None]:
    """The configuration with its length, and how often it goes over the text, if that is here."""
    if data is not None:
        config, windows, _ = make_windows(config, data)
        return config, epochs(config, windows, data.train.num_tokens)
    if config.schedule.epochs is not None:  # of an unknown number of steps
        schedule = replace(config.schedule, lr_max=config.highest_lr())
        return replace(config, schedule=schedule), schedule.epochs
    return with_length(config, num_windows=1), None


def _say_what_it_computes(
    config: Config,
    world_size: int,
    device: Device,
    data: PreparedData | None,
    passes: float | None,
) -> None:
    with torch.device("meta"):
        model = Transformer(config.model)
    matrices = sum(p.numel() for p in model.blocks.parameters() if p.dim() == 2)
    embedding = {id(p): p.numel() for p in (model.embedding.weight, model.output_head.weight)}
    tables = sum(embedding.values())
    total = model.num_parameters()
    say(
        f"model: {total:,} parameters: {matrices:,} in the blocks' matrices, {tables:,} in "
        f"embedding and head, {total - matrices - tables:,} in gains; "
        f"{model.num_flops_per_token() / 1e6:,.1f} MFLOP a token, "
        f"products in {config.device.dtype}"
    )
    folder, size = config.data.data_dir, config.model.vocab_size
    if data is None:
        say(f"data: {folder} is not prepared yet; vocab_size {size:,} is assumed, see --vocab_size")
    else:
        say(
            f"data: {folder}, {data.train.num_tokens:,} tokens for training, vocabulary "
            f"{data.vocab_size:,} in {size:,} rows"
        )
    say(batch_line(config, world_size))
    if data is None and config.schedule.epochs is not None:
        say(f"length: {passes:g} epochs of a text that is not here: its steps are not known")
        return
    tokens = config.schedule.iterations * config.data.batch_size * config.model.max_seq_len
    length = f"length: {config.schedule.iterations:,} steps, {tokens:,} tokens"
    length += f", {tokens / total:,.1f} a parameter"
    say(length + (f", {passes:.2f} epochs" if passes is not None else ""))
    flops = tokens * model.num_flops_per_token()
    say(f"compute: {flops:.3g} FLOP, {_time(config, flops, world_size, device)}")


def _time(config: Config, flops: float, world_size: int, device: Device) -> str:
    """How long the whole run computes, without validation and saves, or why that is unknown."""
    planned, dtype = config.planned, config.device.dtype
    name = device.name or ("a GPU without a name" if device.type == "cuda" else "a CPU")
    peak = (planned.peak_tflops or 0.0) * 1e12
    if not peak and device.name is not None and dtype in ("bfloat16", "float16"):
        peak = PEAK_16_BIT_FLOPS.get(device.name, 0.0)
    if not peak:
        return (
            f"in a time that is not known, as the peak of {name} in {dtype} is not: "
            "give --peak_tflops, or --device_name of a GPU whose data sheet is known "
            f"({', '.join(PEAK_16_BIT_FLOPS)})"
        )
    seconds = flops / (peak * planned.assumed_mfu * world_size)
    return (
        f"{duration(seconds)} at {planned.assumed_mfu:.0%} of the peak of {world_size} x "
        f"{name}, {peak / 1e12:g} TFLOP/s in {dtype}"
    )


def _say_what_it_holds(config: Config, world_size: int, device: Device) -> None:
    memory = estimate(config, world_size, device.type)
    is_saving = config.device.activation_checkpointing
    other_device = replace(config.device, activation_checkpointing=not is_saving)
    other = estimate(replace(config, device=other_device), world_size, device.type)
    say(f"memory of each of {world_size} processes on its {device.type}, GB of 2^30 bytes:")
    for what, size in _lines(memory):
        say(f"  {size / GB:9.3f}  {what}")
    say(
        f"  {other.peak / GB:9.3f}  at most with --activation_checkpointing "
        f"{str(not is_saving).lower()}; activations then {other.activations / GB:.3f}"
    )
    say(
        f"  {memory.save_copy / GB:9.3f}  in the CPU's memory, beside: the copy that a save in the "
        "background holds"
    )
    beside = (
        "the CUDA context and what NCCL and the allocator take"
        if device.type == "cuda"
        else ("Python and the libraries, about 0.3 a process")
    )
    say(f"  tensors are counted; beside them come {beside}")


def _lines(memory: Memory) -> list[tuple[str, int]]:
    return [
        ("weights", memory.weights),
        ("gradients, as the optimizer gets them", memory.gradients),
        ("buckets: gradients on their way to other processes", memory.buckets),
        ("optimizer state: moments, and float32 masters of 16-bit weights", memory.optimizer_state),
        ("activations that backward needs, with 16-bit copies of weights", memory.activations),
        ("logits of some tokens at a time", memory.logits),
        ("at most in forward and backward, all in all", memory.backward_peak),
        ("at most in the optimizer's step", memory.update_peak),
    ]
