"""Every option of a training run, grouped as `--help` shows them.

A run's configuration is one flat set of names, in flags, YAML and checkpoint alike. The model's
shape is `model.config.ModelConfig`; the rest stands here, each setting with its reason beside it.
What cannot work together is config_checks.py's.
"""

import contextlib
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import yaml

from dist.process_group import Backend, Device
from model.config import PRESETS, ModelConfig
from training.command_line import CommandLineError, build, parse_options

# Where a run without --data_dir looks, and what it prepares there when nothing is found.
DEFAULT_DATA_DIR = "data/python_stdlib"

# How one start of a run was asked for; not what the run is. These stay out of config.yaml: whoever
# makes a run of that file would, by overwrite, delete what the first one made; by resume or
# init_from, train on other weights than those of the seed, or be refused where both meet; by
# allow_changed, be warned of nothing any more; by max_minutes, stop when the first one's time was
# up; by profile, be slowed down for a trace that nobody looks at; by dry_run, not train at all.
OF_ONE_START = (
    "resume",
    "overwrite",
    "init_from",
    "allow_changed",
    "max_minutes",
    "profile",
    "dry_run",
    "world_size",
    "device_name",
    "peak_tflops",
    "assumed_mfu",
)


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
    lr_max: float | None = None
    """Highest learning rate; none: 1.024 / d_model, thus 4e-3 at 256, and 8e-3 at most."""
    lr_min: float | None = None
    """Learning rate at the end of the decay; none: a tenth of lr_max."""


@dataclass(frozen=True)
class OptimizerConfig:
    """Optimizer"""

    optimizer: Literal["adamw", "muon"] = "adamw"
    """AdamW for all, or Muon for the matrices inside the blocks and AdamW for the rest."""
    muon_lr: float = 0.02
    """Highest learning rate of Muon's matrices; warm-up and decay are those of lr_max."""
    muon_momentum: float = 0.95
    """Muon's share of the old momentum in the new."""
    muon_ns_steps: int = 5
    """Muon's Newton-Schulz iterations, 1 to 5: four are quicker, five nearer to orthogonal."""
    beta1: float = 0.9
    """AdamW's decay of the first moment."""
    beta2: float = 0.95
    """AdamW's decay of the second moment."""
    eps: float = 1e-8
    """Added by AdamW to the root of the second moment."""
    weight_decay: float = 0.1
    """Decoupled decay, on matrices only."""
    max_norm: float = 1.0
    """Gradients with a larger global norm are scaled down to it."""
    spike_factor: float = 0.0
    """Skip a step whose gradient norm is above this many times the running median; 0: never."""
    max_skipped_steps: int = 10
    """So many steps in a row with a gradient that is not finite, or a spike, are divergence;
    those in which grad_scaler finds its scale are left out too, but count only at a scale of 1."""
    on_divergence: Literal["rollback", "stop"] = "rollback"
    """Then go back to the last good checkpoint and pass over the text since, once; or end."""


@dataclass(frozen=True)
class RunConfig:
    """Run"""

    out_dir: str = "runs/default"
    """Folder for checkpoints, metrics and TensorBoard."""
    resume: str | None = None
    """Checkpoint to go on from; auto: the newest in out_dir, if there is one."""
    init_from: str | None = None
    """Checkpoint whose weights a new run starts from; resume auto wins where it finds one."""
    allow_changed: list[str] = field(default_factory=list)
    """Names whose change is accepted on resume: seed, batch_size, epochs, tokenizer, data ..."""
    overwrite: bool = False
    """Start anew in an out_dir that holds a run already, and delete that run."""
    seed: int = 1337
    """Fixes initial weights, data order and dropout."""
    log_interval: int = 10
    """Steps between two progress lines; also the first and the last step are shown."""
    val_interval: int = 100
    """Steps between two validations; also after the last step. 0: never."""
    val_at_start: bool = True
    """Validate before the first step, too: what a model that knows nothing loses."""
    val_windows: int = 256
    """Validation windows, the same at every validation; all there are, if fewer."""
    checkpoint_interval: int = 100
    """Steps between two checkpoints; also after the last step. 0: only then."""
    keep_checkpoints: int = 3
    """Newest checkpoints to keep, beside best.pt."""
    async_checkpoint: bool = True
    """Write checkpoints while the training goes on; off: it waits, and needs no second copy."""
    max_minutes: float | None = None
    """Save and leave after this many minutes, before a queue's time limit ends the job."""
    profile: bool = False
    """Trace steps 5 to 7 of this start into out_dir/profile, for Perfetto or chrome://tracing."""


@dataclass(frozen=True)
class DeviceConfig:
    """Device and processes"""

    device: Device = "auto"
    """Where to compute; auto: the GPU of LOCAL_RANK if there are GPUs, else the CPU."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of matrix products; weights stay float32. auto: bfloat16 where the device multiplies it."""
    grad_scaler: Literal["auto", "on", "off"] = "auto"
    """Multiply the loss so that small gradients survive float16; auto: with dtype float16 alone."""
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    """Of weights and gradients; bfloat16: float32 weights are kept too, each process its share."""
    backend: Backend = "auto"
    """Of the process group; auto: nccl on GPUs, gloo on CPUs."""
    timeout_seconds: float = 600.0
    """After which a collective gives up on a silent process."""
    bucket_cap_mb: float | None = None
    """Megabytes of gradients sent together; null: 25 on GPUs, 50 in a host, 8 or 25 over gloo."""
    gradient_dtype: Literal["float32", "bfloat16"] = "float32"
    """The widest in which gradients travel between processes; added up in float32 either way."""
    shard_optimizer: bool = True
    """Spread gradients and the optimizer's state over the processes, 1/world_size for each."""
    activation_checkpointing: bool = False
    """Keep each block's input alone and run the block again in backward: less memory, more time."""
    compile: bool | Literal["auto"] = "auto"
    """Compile each block of the model before the first step; auto: on GPUs alone."""


@dataclass(frozen=True)
class DryRunConfig:
    """Dry run"""

    dry_run: bool = False
    """Say what the run would take and every problem that it has, and end; writes nothing."""
    world_size: int | None = None
    """Processes of the run that is reckoned; none: as many as this one was started with."""
    device_name: str | None = None
    """GPU of the run that is reckoned, e.g. "NVIDIA H200"; none: what is in this machine."""
    peak_tflops: float | None = None
    """Peak of one device in the dtype of the products, TFLOP/s; none: from its maker, if known."""
    assumed_mfu: float = 0.4
    """Share of the peak that the reckoned run reaches."""


@dataclass(frozen=True)
class Config:
    """The whole configuration of a run."""

    model: ModelConfig
    data: DataConfig
    schedule: ScheduleConfig
    optimizer: OptimizerConfig
    run: RunConfig
    device: DeviceConfig
    planned: DryRunConfig = DryRunConfig()

    def to_dict(self) -> dict[str, Any]:
        """All options as one flat dict of plain values, the form of YAML and checkpoints."""
        sections = (getattr(self, section.name) for section in fields(self))
        return {name: value for section in sections for name, value in asdict(section).items()}

    def lines(self) -> list[str]:
        """All options of a run for people, a paragraph a section."""
        lines = []
        shown = [section.name for section in fields(self) if section.name != "planned"]
        for section in (getattr(self, name) for name in shown):
            values = ", ".join(f"{name} {value}" for name, value in asdict(section).items())
            title = f"{type(section).__doc__}: "
            lines += textwrap.wrap(title + values, width=100, subsequent_indent="    ")
        return lines

    def highest_lr(self) -> float:
        """`lr_max`, or where that is left open the one for the model's width."""
        lr_max = self.schedule.lr_max
        return learning_rate_for(self.model.d_model) if lr_max is None else lr_max

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
    DryRunConfig,
)


def load_config(description: str, argv: Sequence[str] | None = None) -> Config:
    """Read the configuration: flags over file over preset over defaults.

    Raises:
        CommandLineError: see `parse_options`.
    """
    options = parse_options(SECTIONS, description=description, argv=argv, presets=PRESETS)
    names = [section.name for section in fields(Config)]
    return Config(**{n: build(s, options) for n, s in zip(names, SECTIONS, strict=True)})


def learning_rate_for(d_model: int) -> float:
    """A learning rate of AdamW that serves a model of this width.

    Adam moves every weight by about the rate, and an output by as many of these as it has inputs:
    so the best rate falls with the width (Yang et al. 2022, arXiv:2203.03466). 4e-3 at 256 is
    measured (docs/tried.md); it gives 1.3e-3 at GPT-2's 768 and 5e-4 at 2048, two to three times
    GPT-3's rates (table 2.1), which are known to be low. Narrow models get no more than twice it.
    """
    return 4e-3 * 256 / max(d_model, 128)


def default_options() -> dict[str, Any]:
    """What every option is where nothing is said, as one flat dict."""
    return Config(*(section() for section in SECTIONS)).to_dict()


def write_config(config: Config, path: Path) -> None:
    """Save as YAML that `--config` reads back, for another run of the same kind.

    How this one was started is left out, see OF_ONE_START.

    Raises:
        CommandLineError: it cannot be written.
    """
    options = {name: v for name, v in config.to_dict().items() if name not in OF_ONE_START}
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_text(yaml.safe_dump(options, sort_keys=False), encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise CommandLineError(f"cannot write {path}: {error.strerror}") from error
