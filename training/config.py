"""Every option of a training run, grouped as `--help` shows them, and what cannot work together.

A run's configuration is one flat set of names, in flags, YAML and checkpoint alike. The model's
shape is `model.config.ModelConfig`; the rest stands here, each setting with its reason beside it.
"""

import math
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import yaml

from dist.process_group import Backend, Device
from model.config import PRESETS, ModelConfig
from training.command_line import CommandLineError, build, parse_options

# Where a run without --data_dir looks, and what it prepares there when nothing is found.
DEFAULT_DATA_DIR = "data/python_stdlib"


@dataclass(frozen=True)
class DataConfig:
    """Data and batch"""

    data_dir: str = DEFAULT_DATA_DIR
    """Folder of token files, made by prepare.py; the default is prepared by the first run."""
    batch_size: int = 16
    """Sequences in one optimizer step, over all processes and micro-batches together."""
    gradient_accumulation_steps: int = 1
    """Micro-batches that a process computes one after another for one optimizer step."""


@dataclass(frozen=True)
class ScheduleConfig:
    """Length and learning rate"""

    preset: str | None = None
    """Named model shape; single options win over it."""
    iterations: int = 700
    """Optimizer steps, each on windows drawn at random; ignored when epochs is given."""
    epochs: float | None = None
    """Go this often over all windows, each once an epoch in a new order, instead of iterations."""
    schedule: Literal["cosine", "constant", "wsd"] = "cosine"
    """Shape after the warm-up: cosine to lr_min, none, or stable and then linear to lr_min."""
    warmup_iters: int | None = None
    """Steps of linear warm-up from 0 to lr_max; none: a tenth of all steps."""
    cos_cycle_iters: int | None = None
    """Step at which the cosine reaches lr_min; none: the last one."""
    decay_iters: int | None = None
    """Length of the final decay of wsd; none: four tenths of all steps."""
    lr_max: float = 4e-3
    """Highest learning rate."""
    lr_min: float | None = None
    """Learning rate at the end of the decay; none: a tenth of lr_max."""


@dataclass(frozen=True)
class OptimizerConfig:
    """Optimizer (AdamW)"""

    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.95
    """Decay of the second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.1
    """Decoupled decay, on matrices only."""
    max_norm: float = 1.0
    """Gradients with a larger global norm are scaled down to it."""
    max_skipped_steps: int = 10
    """End the run after this many steps in a row whose gradient is not finite."""


@dataclass(frozen=True)
class RunConfig:
    """Run"""

    out_dir: str = "runs/default"
    """Folder for checkpoints, metrics and TensorBoard."""
    resume: str | None = None
    """Checkpoint to go on from; auto: the newest in out_dir, if there is one."""
    overwrite: bool = False
    """Start anew in an out_dir that holds a run already, and delete that run."""
    seed: int = 1337
    """Fixes initial weights, data order and dropout."""
    log_interval: int = 10
    """Steps between two progress lines; also the first and the last step are shown."""
    val_interval: int = 100
    """Steps between two validations; also after the last step. 0: never."""
    val_windows: int = 256
    """Validation windows, the same at every validation; all there are, if fewer."""
    checkpoint_interval: int = 100
    """Steps between two checkpoints; also after the last step. 0: only then."""
    keep_checkpoints: int = 3
    """Newest checkpoints to keep, beside best.pt."""


@dataclass(frozen=True)
class DeviceConfig:
    """Device and processes"""

    device: Device = "auto"
    """Where to compute; auto: the GPU of LOCAL_RANK if there are GPUs, else the CPU."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of matrix products; weights stay float32. auto: bfloat16 where the device multiplies it."""
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    """Of weights and gradients; bfloat16: float32 weights are kept too, each process its share."""
    backend: Backend = "auto"
    """Of the process group; auto: nccl on GPUs, gloo on CPUs."""
    timeout_seconds: float = 600.0
    """After which a collective gives up on a silent process."""
    bucket_cap_mb: float | None = None
    """Megabytes of gradients that are sent together; null: 25, and 8 over gloo."""
    gradient_dtype: Literal["float32", "bfloat16"] = "float32"
    """The widest in which gradients travel between processes; added up in float32 either way."""
    shard_optimizer: bool = True
    """Spread gradients and the optimizer's state over the processes, 1/world_size for each."""
    activation_checkpointing: bool = False
    """Keep each block's input alone and run the block again in backward: less memory, more time."""


@dataclass(frozen=True)
class Config:
    """The whole configuration of a run."""

    model: ModelConfig
    data: DataConfig
    schedule: ScheduleConfig
    optimizer: OptimizerConfig
    run: RunConfig
    device: DeviceConfig

    def to_dict(self) -> dict[str, Any]:
        """All options as one flat dict of plain values, the form of YAML and checkpoints."""
        sections = (getattr(self, field.name) for field in fields(self))
        return {name: value for section in sections for name, value in asdict(section).items()}

    def lines(self) -> list[str]:
        """All options for people, a paragraph a section."""
        lines = []
        for section in (getattr(self, field.name) for field in fields(self)):
            values = ", ".join(f"{name} {value}" for name, value in asdict(section).items())
            title = f"{type(section).__doc__}: "
            lines += textwrap.wrap(title + values, width=100, subsequent_indent="    ")
        return lines

    def micro_batch_size(self, world_size: int) -> int:
        """Sequences in one forward pass of one process."""
        return self.data.batch_size // (world_size * self.data.gradient_accumulation_steps)


SECTIONS: tuple[type, ...] = (
    ModelConfig,
    DataConfig,
    ScheduleConfig,
    OptimizerConfig,
    RunConfig,
    DeviceConfig,
)


def load_config(description: str, argv: Sequence[str] | None = None) -> Config:
    """Read the configuration: flags over file over preset over defaults.

    Raises:
        CommandLineError: see `parse_options`.
    """
    options = parse_options(SECTIONS, description=description, argv=argv, presets=PRESETS)
    names = [field.name for field in fields(Config)]
    return Config(**{n: build(s, options) for n, s in zip(names, SECTIONS, strict=True)})


def check(config: Config, world_size: int) -> None:
    """Refuse what cannot work, all problems in one message.

    Raises:
        CommandLineError: each problem with its values and what to do.
    """
    data, schedule, optimizer, run = config.data, config.schedule, config.optimizer, config.run
    problems = _below(
        1,
        batch_size=data.batch_size,
        gradient_accumulation_steps=data.gradient_accumulation_steps,
        log_interval=run.log_interval,
        val_windows=run.val_windows,
        keep_checkpoints=run.keep_checkpoints,
        max_skipped_steps=optimizer.max_skipped_steps,
    )
    problems += _below(
        0,
        iterations=schedule.iterations,
        warmup_iters=schedule.warmup_iters or 0,
        cos_cycle_iters=schedule.cos_cycle_iters or 0,
        decay_iters=schedule.decay_iters or 0,
        val_interval=run.val_interval,
        checkpoint_interval=run.checkpoint_interval,
        lr_max=schedule.lr_max,
        lr_min=schedule.lr_min or 0.0,
        weight_decay=optimizer.weight_decay,
        seed=run.seed,
    )
    if not problems and data.batch_size % (world_size * data.gradient_accumulation_steps):
        problems.append(_indivisible_batch(data, world_size))
    if schedule.epochs is not None and not schedule.epochs > 0:
        problems.append(f"epochs is {schedule.epochs}, it must be above 0")
    if schedule.lr_min is not None and schedule.lr_min > schedule.lr_max:
        problems.append(f"lr_min {schedule.lr_min} is above lr_max {schedule.lr_max}")
    if not run.out_dir:
        problems.append("out_dir is empty: name a folder")
    if run.seed >= 2**63:
        problems.append(f"seed is {run.seed}, it must be below 2^63")
    for name in ("max_norm", "eps"):
        if not getattr(optimizer, name) > 0:
            problems.append(f"{name} is {getattr(optimizer, name)}, it must be above 0")
    for name in ("beta1", "beta2"):
        if not 0.0 <= getattr(optimizer, name) < 1.0:
            problems.append(f"{name} is {getattr(optimizer, name)}, it must be in [0, 1)")
    bucket_cap_mb = config.device.bucket_cap_mb
    if bucket_cap_mb is not None and not bucket_cap_mb > 0:
        problems.append(f"bucket_cap_mb is {bucket_cap_mb}, it must be above 0")
    if config.device.param_dtype == "bfloat16" and not config.device.shard_optimizer:
        problems.append("param_dtype bfloat16 needs shard_optimizer true, which keeps float32 too")
    if run.overwrite and run.resume is not None:
        problems.append("resume and overwrite exclude each other: give one of them")
    if problems:
        raise CommandLineError("; ".join(problems))


def with_length(config: Config, num_windows: int) -> Config:
    """Fill in what follows from the length of the run: iterations and the ends of the schedules.

    Args:
        config: as the user gave it.
        num_windows: training windows in one epoch.

    Raises:
        CommandLineError: a schedule longer than its parts allow.
    """
    schedule = config.schedule
    total = schedule.iterations
    if schedule.epochs is not None:
        # Rounded up, so that no window is missed: the last batch reaches into the next epoch.
        total = math.ceil(schedule.epochs * num_windows / config.data.batch_size)
    warmup = total // 10 if schedule.warmup_iters is None else schedule.warmup_iters
    cycle = max(total, warmup) if schedule.cos_cycle_iters is None else schedule.cos_cycle_iters
    decay = 4 * total // 10 if schedule.decay_iters is None else schedule.decay_iters
    lr_min = schedule.lr_max / 10 if schedule.lr_min is None else schedule.lr_min
    if schedule.schedule == "cosine" and cycle < warmup:
        raise CommandLineError(f"cos_cycle_iters {cycle} ends within warmup_iters {warmup}")
    if schedule.schedule == "wsd" and warmup + decay > total:
        raise CommandLineError(
            f"warmup_iters {warmup} and decay_iters {decay} do not fit into {total} iterations"
        )
    filled = replace(
        schedule,
        iterations=total,
        warmup_iters=warmup,
        cos_cycle_iters=cycle,
        decay_iters=decay,
        lr_min=lr_min,
    )
    return replace(config, schedule=filled)


def write_config(config: Config, path: Path) -> None:
    """Save as YAML that `--config` reads back, for another run of the same kind.

    How this one was started is left out: read back, `overwrite` would delete what it made.

    Raises:
        CommandLineError: it cannot be written.
    """
    started_by = ("resume", "overwrite")
    options = {name: v for name, v in config.to_dict().items() if name not in started_by}
    try:
        path.write_text(yaml.safe_dump(options, sort_keys=False), encoding="utf-8")
    except OSError as error:
        raise CommandLineError(f"cannot write {path}: {error.strerror}") from error


def _below(least: int, **values: float) -> list[str]:
    return [
        f"{name} is {value}, it must be at least {least}"
        for name, value in values.items()
        if not value >= least
    ]


def _indivisible_batch(data: DataConfig, world_size: int) -> str:
    unit = world_size * data.gradient_accumulation_steps
    lower = data.batch_size // unit * unit
    fitting = f"{lower} or {lower + unit}" if lower else f"{unit}"
    steps = data.gradient_accumulation_steps
    return (
        f"batch_size {data.batch_size} does not divide by {world_size} processes "
        f"x {steps} accumulation steps: use {fitting}"
    )
