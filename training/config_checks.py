"""What a configuration must fulfil before anything is computed, and what follows from its length.

Every problem is told at once, each with its values and what would work: a job that has waited in a
queue for hours should be sent back for all of them, not for one after the other.
"""

import math
from dataclasses import fields, replace
from pathlib import Path

from training.command_line import CommandLineError, did_you_mean
from training.config import Config, DataConfig, DryRunConfig, RunConfig
from training.resume import ALLOWABLE

# No device holds what backward needs of so many tokens, and a dry run would count for ever.
MOST_TOKENS_AT_ONCE = 2**24
# No run counts so far, while Python's integers go on to where they are no floats any more.
MOST_STEPS = 2**40
LONGEST_TIMEOUT = 365 * 24 * 3600.0


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
        lr_max=schedule.lr_max or 0.0,
        lr_min=schedule.lr_min or 0.0,
        weight_decay=optimizer.weight_decay,
        muon_lr=optimizer.muon_lr,
        seed=run.seed,
    )
    counts = (world_size, data.batch_size, data.gradient_accumulation_steps)
    if min(counts) > 0 and data.batch_size % (world_size * data.gradient_accumulation_steps):
        problems.append(_indivisible_batch(data, world_size))
    elif min(counts) > 0:
        problems += _too_many_tokens(config, world_size)
    problems += _above(
        MOST_STEPS,
        iterations=schedule.iterations,
        warmup_iters=schedule.warmup_iters or 0,
        cos_cycle_iters=schedule.cos_cycle_iters or 0,
        decay_iters=schedule.decay_iters or 0,
        gradient_accumulation_steps=data.gradient_accumulation_steps,
    )
    if schedule.epochs is not None and not 0 < schedule.epochs < math.inf:
        problems.append(f"epochs is {schedule.epochs}, it must be a number above 0")
    problems += _infinite(
        lr_max=schedule.lr_max,
        lr_min=schedule.lr_min,
        muon_lr=optimizer.muon_lr,
        weight_decay=optimizer.weight_decay,
        eps=optimizer.eps,
    )
    lr_max = config.highest_lr()
    if schedule.lr_min is not None and schedule.lr_min > lr_max:
        problems.append(f"lr_min {schedule.lr_min} is above lr_max {lr_max}")
    if not run.out_dir:
        problems.append("out_dir is empty: name a folder")
    if run.seed >= 2**63:
        problems.append(f"seed is {run.seed}, it must be below 2^63")
    for name in ("max_norm", "eps"):
        if not getattr(optimizer, name) > 0:
            problems.append(f"{name} is {getattr(optimizer, name)}, it must be above 0")
    if not 1 <= optimizer.muon_ns_steps <= 5:
        problems.append(f"muon_ns_steps is {optimizer.muon_ns_steps}, it must be 1 to 5")
    for name in ("beta1", "beta2", "muon_momentum"):
        if not 0.0 <= getattr(optimizer, name) < 1.0:
            problems.append(f"{name} is {getattr(optimizer, name)}, it must be in [0, 1)")
    bucket_cap_mb = config.device.bucket_cap_mb
    if bucket_cap_mb is not None and not bucket_cap_mb > 0:
        problems.append(f"bucket_cap_mb is {bucket_cap_mb}, it must be above 0")
    if config.device.param_dtype == "bfloat16" and not config.device.shard_optimizer:
        problems.append("param_dtype bfloat16 needs shard_optimizer true, which keeps float32 too")
    if config.device.param_dtype == "bfloat16" and config.device.dtype == "float16":
        problems.append("param_dtype bfloat16 goes with dtype bfloat16 or float32, not float16")
    if optimizer.spike_factor and not optimizer.spike_factor > 1:
        problems.append(f"spike_factor is {optimizer.spike_factor}, it must be above 1, or 0: off")
    problems += _timeout_problems(config.device.timeout_seconds)
    if run.max_minutes is not None and not run.max_minutes > 0:
        problems.append(f"max_minutes is {run.max_minutes}, it must be above 0")
    problems += _start_problems(run)
    problems += _dry_run_problems(config.planned)
    if problems:
        raise CommandLineError("; ".join(problems))


def check_timeout(seconds: float) -> None:
    """Refuse a time-out that cannot be waited for; before `check`, as the processes meet with it.

    Raises:
        CommandLineError: it is none, or longer than a year.
    """
    if problems := _timeout_problems(seconds):
        raise CommandLineError(problems[0])


def with_length(config: Config, num_windows: int, iteration: int = 0, samples: int = 0) -> Config:
    """Fill in what follows from the length of the run: iterations and the ends of the schedules.

    Args:
        config: as the user gave it.
        num_windows: training windows in one epoch.
        iteration: steps that are done already.
        samples: windows that they took; epochs end where they would have, whatever batch_size was.

    Raises:
        CommandLineError: a schedule longer than its parts allow.
    """
    schedule = config.schedule
    total = schedule.iterations
    if schedule.epochs is not None:
        # Rounded up, so that no window is missed: the last batch reaches into the next epoch. But
        # 0.1 x 30 is above 3 by rounding alone, and is no reason for another step.
        if not schedule.epochs * num_windows / config.data.batch_size <= MOST_STEPS:
            raise CommandLineError(
                f"epochs is {schedule.epochs}, which is more than {MOST_STEPS:,} steps: use fewer"
            )
        wanted = math.ceil(round(schedule.epochs * num_windows, 6))
        total = iteration + max(0, -(-(wanted - samples) // config.data.batch_size))
    warmup = total // 10 if schedule.warmup_iters is None else schedule.warmup_iters
    cycle = max(total, warmup) if schedule.cos_cycle_iters is None else schedule.cos_cycle_iters
    decay = 4 * total // 10 if schedule.decay_iters is None else schedule.decay_iters
    lr_max = config.highest_lr()
    lr_min = lr_max / 10 if schedule.lr_min is None else schedule.lr_min
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
        lr_max=lr_max,
    )
    return replace(config, schedule=filled)


def _below(least: int, **values: float) -> list[str]:
    return [
        f"{name} is {value}, it must be at least {least}"
        for name, value in values.items()
        if not value >= least
    ]


def _above(most: int, **values: float) -> list[str]:
    return [
        f"{name} is {value}, it must be at most {most:,}"
        for name, value in values.items()
        if value > most
    ]


def _infinite(**values: float | None) -> list[str]:
    return [
        f"{name} is {value}, it must be finite"
        for name, value in values.items()
        if value is not None and math.isinf(value)
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


def _too_many_tokens(config: Config, world_size: int) -> list[str]:
    size, context = config.data.batch_size, config.model.max_seq_len
    tokens = config.micro_batch_size(world_size) * context
    if tokens <= MOST_TOKENS_AT_ONCE:
        return []
    return [
        f"batch_size {size} x max_seq_len {context} are {tokens} tokens that a process computes at "
        f"once, more than {MOST_TOKENS_AT_ONCE:,}: use less, or more gradient_accumulation_steps"
    ]


def _timeout_problems(seconds: float) -> list[str]:
    if 0 < seconds <= LONGEST_TIMEOUT:
        return []
    return [
        f"timeout_seconds is {seconds}, it must be a positive number of seconds, a year at most"
    ]


def _start_problems(run: RunConfig) -> list[str]:
    """What a run cannot be started from."""
    problems = []
    if run.overwrite and run.init_from is not None:
        inside = Path(run.out_dir).resolve()
        if Path(run.init_from).resolve().is_relative_to(inside):
            problems.append(f"overwrite would delete init_from {run.init_from}: copy it first")
    if run.overwrite and run.resume is not None:
        problems.append("resume and overwrite exclude each other: give one of them")
    if run.init_from is not None and run.resume not in (None, "auto"):
        problems.append(
            "init_from starts a new run and resume goes on with one: give one of them, or "
            "init_from with resume auto"
        )
    for name in ("resume", "init_from"):
        if getattr(run, name) == "":
            problems.append(f"{name} is empty: name a checkpoint, or leave it out")
    for name in run.allow_changed:
        if name not in ALLOWABLE:
            problems.append(
                f"allow_changed does not know {name}{did_you_mean(name, ALLOWABLE)} "
                f"(it knows {', '.join(ALLOWABLE)})"
            )
    return problems


def _dry_run_problems(planned: DryRunConfig) -> list[str]:
    """What a dry run cannot be reckoned with, and what a real one would pass over in silence."""
    problems = _below(1, world_size=1 if planned.world_size is None else planned.world_size)
    if planned.peak_tflops is not None and not planned.peak_tflops > 0:
        problems.append(f"peak_tflops is {planned.peak_tflops}, it must be above 0")
    if not 0.0 < planned.assumed_mfu <= 1.0:
        problems.append(f"assumed_mfu is {planned.assumed_mfu}, it must be in (0, 1]")
    if not planned.dry_run:
        given = [
            field.name for field in fields(planned) if getattr(planned, field.name) != field.default
        ]
        problems += [
            f"{name} is for --dry_run alone: a run has the processes and devices it is started on"
            for name in given
        ]
    return problems
