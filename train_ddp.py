"""Pretrain a Transformer language model from scratch.

    torchrun --nproc_per_node=2 train_ddp.py              # 2 processes, no argument needed
    python train_ddp.py                                   # the same job in 1 process
    torchrun --nproc_per_node=8 train_ddp.py --config configs/gpt2-124m.yaml --data_dir data/mine
    torchrun --nproc_per_node=8 train_ddp.py --config configs/gpt2-124m.yaml --resume auto
    python train_ddp.py --config configs/gpt2-124m.yaml --dry_run --world_size 8   # what it takes

Without --data_dir it trains on the source of the Python standard library of this machine. The loss
curve depends on configuration and seed alone, not on how many processes compute it.
"""

import contextlib
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from data.errors import CorpusError
from data.fingerprint import data_fingerprint
from data.tokens import PreparedData, open_tokens
from dist.collectives import all_reduce_sum
from dist.ddp import DDP
from dist.process_group import (
    ProcessGroupError,
    RankZeroError,
    World,
    init_process_group,
    set_random_seed,
    shut_down,
)
from dist.sharded_optimizer import ShardedOptimizer
from model.config import ModelConfigError
from optim.clip import clip_grad_norm
from optim.schedule import learning_rate, set_learning_rate
from prepare import prepare_default_corpus
from training.allocator import keep_freed_memory
from training.bad_steps import BadSteps, DivergedError
from training.checkpoint_file import CheckpointError
from training.checkpoint_writer import CheckpointWriter
from training.command_line import run
from training.compiling import compile_blocks
from training.config import DEFAULT_DATA_DIR, Config, ScheduleConfig, load_config
from training.config_checks import check, check_timeout
from training.dry_run import dry_run
from training.evaluate import evaluate
from training.garbage import collect_when_due, collected_by_hand, set_start_apart
from training.hardware import allow_tf32, autocast
from training.interrupt import REASONS, StopRequest
from training.job import Job
from training.metrics import Metrics, introduce, show_progress, show_validation
from training.outcome import take_in
from training.parts import (
    make_batches,
    make_model,
    make_optimizer,
    make_scaler,
    make_windows,
    with_dtype,
)
from training.profiler import StepProfiler
from training.run_folder import RunFolder
from training.run_status import FINISHED, to_be_continued
from training.saving import await_checkpoint, save_checkpoint
from training.start import go_back, resume_or_start
from training.step_clock import StepClock
from training.step_reports import Reports
from training.threads import share_cores


@collected_by_hand()
def main() -> None:
    """Configuration, processes, data, model, optimizer, resume, loop, leave."""
    config = load_config(__doc__ or "")
    if config.planned.dry_run:
        return dry_run(config)
    check_timeout(config.device.timeout_seconds)
    keep_freed_memory()  # before there are threads with heaps of their own
    world = init_process_group(
        config.device.backend, config.device.device, config.device.timeout_seconds
    )
    check(config, world.world_size)
    share_cores()
    allow_tf32(world.device)

    data = open_data(config, world)
    config = replace(config, model=config.model.resolve(data.vocab_size))
    config = with_dtype(config, world)
    schedule = config.schedule
    config, windows, val_windows = make_windows(config, data)

    set_random_seed(config.run.seed, world.rank)
    model = make_model(config, world)
    ddp = DDP(
        model,
        config.device.bucket_cap_mb,
        wire_dtype=getattr(torch, config.device.gradient_dtype),
    )
    folder = RunFolder(config.run.out_dir, config.run.keep_checkpoints)
    job = Job(
        config=config,
        world=world,
        data=data,
        data_fingerprint=data_fingerprint(data),
        windows=windows,
        batches=make_batches(config, windows, world),
        val_windows=val_windows,
        model=model,
        ddp=ddp,
        optimizer=make_optimizer(config, ddp),
        scaler=make_scaler(config, world),
        folder=folder,
        writer=CheckpointWriter(world, folder, config.run.async_checkpoint),
        dtype=getattr(torch, config.device.dtype),
        stop=StopRequest(config.run.max_minutes),
        bad_steps=BadSteps(config.optimizer.spike_factor, world.device),
        reports=Reports(world.device),
    )
    # From here to the very end: a second signal must not cut the last save short.
    with job.stop.listening(), job.batches:
        resume_or_start(job, schedule)
        introduce(job)
        compile_blocks(job)
        train(job, schedule)
        shut_down(world)


def train(job: Job, schedule: ScheduleConfig) -> None:
    """Step, show, validate and save until the last iteration, or until something asks to stop.

    Args:
        job: the run, where it begins or goes on.
        schedule: as the user gave it.

    Raises:
        CheckpointError: the last save failed.
        DivergedError: too many steps in a row were left out.
    """
    options = job.config.run
    metrics = Metrics(job.folder, job.iteration, job.is_rank_zero)
    leaves = None
    if job.iteration == 0:
        if options.val_at_start:
            validate(job, metrics)
        if job.is_last:  # a run of no steps at all still leaves what it is: the initial weights
            save_checkpoint(job, None, is_due=True)
    set_start_apart(job)
    clock, profiler = StepClock(job), StepProfiler(job)
    while not job.is_last and leaves is None:
        job.iteration += 1
        profiler.begin_step()
        training_step(job)
        is_shown = job.is_due(options.log_interval) or job.iteration == 1 or job.is_last
        is_validated = job.is_due(options.val_interval) or job.is_last
        is_due = job.is_due(options.checkpoint_interval) or job.is_last
        report, leaves = take_in(job, is_awaited=is_shown or is_validated or is_due)
        if report is not None and job.has_diverged:
            metrics.close()
            await_checkpoint(job)
            go_back(job, schedule)
            metrics = Metrics(job.folder, job.iteration, job.is_rank_zero)
            save_checkpoint(job, None, is_due=True)  # that it went back must not be forgotten
            clock = StepClock(job)
            continue
        clock.count_step()
        if is_shown and report is not None:
            show_progress(job, metrics, clock, report.loss, report.grad_norm, report.grad_scale)
        with clock.paused():
            profiler.end_step()
            new_best = None
            if is_validated:
                await_checkpoint(job)
                new_best = validate(job, metrics)
            if new_best is not None or is_due or leaves is not None:
                metrics.flush()
                save_checkpoint(job, new_best, is_due or leaves is not None)
            collect_when_due(job)
    profiler.close()
    metrics.close()
    end(job, leaves)


def end(job: Job, leaves: str | None) -> None:
    """Wait for the last save, and say how the run stands.

    Raises:
        CheckpointError: it failed.
    """
    problem = await_checkpoint(job)
    if job.is_last and problem is None:
        status = FINISHED
    else:
        status = to_be_continued(leaves or "the last save failed")
        job.say(f"{status}, after {job.iteration} steps; go on with --resume auto")
    if job.is_rank_zero:
        job.folder.write_status(status)
    if problem is not None:
        raise CheckpointError(problem)


def training_step(job: Job) -> None:
    """One optimizer step on one global batch; a bad one (bad_steps.py) changes no weight.

    Whatever came out of it is told to `job.reports`: a GPU is not waited for in here.
    """
    world = job.world
    micro_steps = job.config.data.gradient_accumulation_steps
    job.lr = lr_at(job)
    set_learning_rate(job.optimizer, job.lr)
    loss = torch.zeros((), device=world.device)
    for micro_step in range(micro_steps):
        inputs, targets = micro_batch(job, micro_step)
        is_last = micro_step == micro_steps - 1
        with contextlib.nullcontext() if is_last else job.ddp.no_sync():
            with autocast(world.device, job.dtype):
                # All micro-batches hold equally many tokens: the mean of their means is the mean.
                micro_loss = job.ddp(inputs, targets) / micro_steps
            job.scaler.scale(micro_loss).backward()
        loss += micro_loss.detach()
    job.ddp.finish_gradient_sync()
    # Only now is the gradient complete, and the same on every rank: clip after sync. What else the
    # ranks must agree on goes along with the norm: the loss, and who was asked to stop for what.
    ballot = torch.zeros(1 + len(REASONS), device=world.device)
    ballot[0] = loss / world.world_size
    if job.stop.code:
        ballot[job.stop.code] = 1.0
    grad_norm = unscale_and_clip(job, ballot)
    is_bad, median = job.bad_steps.judge(ballot[0], grad_norm)
    job.optimizer.found_inf = is_bad  # 1.0 leaves the step out, on the device
    job.optimizer.step()
    job.ddp.zero_grad()
    job.samples += job.config.data.batch_size
    scale = job.scaler.divisor
    job.reports.tell(job.iteration, job.samples, ballot, grad_norm, is_bad, median, scale)
    job.scaler.update_after(grad_norm)
    job.bad_steps.remember(grad_norm)


def micro_batch(job: Job, micro_step: int) -> tuple[Tensor, Tensor]:
    """This rank's inputs and targets, each (micro_batch_size, max_seq_len) int64.

    The global batch follows from the seed and the count of samples alone. Micro-steps and ranks cut
    it in rows.
    """
    size = job.config.micro_batch_size(job.world.world_size)
    first = job.samples + (micro_step * job.world.world_size + job.world.rank) * size
    tokens = job.batches.take(first)
    return tokens[:, :-1], tokens[:, 1:]


def unscale_and_clip(job: Job, ballot: Tensor) -> Tensor:
    """Clip by the global norm, and return it; each rank has the gradients whole, or its shards.

    What the loss was multiplied by is divided out first: clipped are the true gradients.

    Args:
        job: the run.
        ballot: is added over the ranks, with shards in the reduction that the norm needs anyway.
    """
    max_norm, scale = job.config.optimizer.max_norm, job.scaler.divisor
    if isinstance(job.optimizer, ShardedOptimizer):
        return job.optimizer.clip_grad_norm(max_norm, scale, summed=ballot)
    all_reduce_sum(ballot)
    return clip_grad_norm(job.model.parameters(), max_norm, scale)


def lr_at(job: Job) -> float:
    """Learning rate of the current step, counted from 1."""
    schedule = job.config.schedule
    assert schedule.warmup_iters is not None
    assert schedule.cos_cycle_iters is not None
    assert schedule.decay_iters is not None
    assert schedule.lr_min is not None
    assert schedule.lr_max is not None
    return learning_rate(
        job.iteration,
        schedule=schedule.schedule,
        warmup_iters=schedule.warmup_iters,
        cos_cycle_iters=schedule.cos_cycle_iters,
        decay_iters=schedule.decay_iters,
        iterations=schedule.iterations,
        lr_min=schedule.lr_min,
        lr_max=schedule.lr_max,
    )


def validate(job: Job, metrics: Metrics) -> float | None:
    """Measure, show and log the validation loss; returns it if no trained model had a lower one."""
    if job.val_windows is None:
        return None
    batch_size = job.config.micro_batch_size(job.world.world_size)
    context = partial(autocast, job.world.device, job.dtype)
    val_loss = evaluate(job.model, job.val_windows, batch_size, job.world, context)
    is_best = job.iteration > 0 and val_loss < job.best_val_loss
    show_validation(job, metrics, val_loss, is_best)
    return val_loss if is_best else None


def open_data(config: Config, world: World) -> PreparedData:
    """Open the token files; the default corpus is prepared first where it is missing."""
    if config.data.data_dir == DEFAULT_DATA_DIR:
        world.on_rank_zero(partial(prepare_default_corpus, DEFAULT_DATA_DIR))
    return open_tokens(config.data.data_dir)


if __name__ == "__main__":
    run(
        main,
        mistakes=(
            CheckpointError,
            CorpusError,
            DivergedError,
            ModelConfigError,
            ProcessGroupError,
            RankZeroError,
        ),
    )
