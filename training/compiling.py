"""Compilation of the model, block by block, before the first step, on all ranks or on none.

One graph for the whole model would hand over all gradients at its end, and no traffic would be
hidden behind backward; a block's graph hands over its own. All blocks are of one shape and share
one compiled graph, so a deep model takes no longer to compile than a flat one.

Compiling means running a forward and backward before there is a step. It is not counted in
tokens/s, a rank that cannot compile is known before anything depends on it, and no rank waits in a
step's collectives for another's compiler.
"""

import contextlib
import time
from contextlib import AbstractContextManager

import torch

from dist.collectives import all_gather_objects
from model.transformer import Transformer
from training.hardware import autocast
from training.job import Job

BACKEND = "inductor"


def compile_blocks(job: Job) -> None:
    """Compile where `--compile` asks for it, and say how long it took or why it was not possible.

    A rank that has no compiler, or meets any other failure, makes all ranks train uncompiled: they
    would differ in rounding else, and wait for the slowest. Every rank must call it.
    """
    wanted = job.config.device.compile
    if wanted == "auto":
        wanted = job.world.device.type == "cuda"
    if not wanted or job.is_last:
        return
    start = time.perf_counter()
    for block in job.model.blocks:
        # The shapes of training never change: each is compiled for itself, the first is the last.
        block.compile(backend=BACKEND, dynamic=False)
    problems = all_gather_objects(_first_pass(job))
    for rank, problem in enumerate(problems):
        if problem is not None:
            for block in job.model.blocks:
                block._compiled_call_impl = None
            where = f" on rank {rank}, so on none" if job.world.world_size > 1 else ""
            job.say(f"compile: not possible{where}, the blocks stay as they are: {problem}")
            return
    seconds = time.perf_counter() - start
    job.say(f"compile: the blocks took {seconds:.1f} s, not counted in tokens/s")


def uncompiled(model: Transformer) -> AbstractContextManager[object]:
    """Context in which the blocks run as they are written.

    For validation: without gradients, and for its last, smaller batch, each block would be compiled
    again, for longer than all its passes of a usual run take.
    """
    if all(block._compiled_call_impl is None for block in model.blocks):
        return contextlib.nullcontext()  # and torch's compiler need not be imported
    return torch.compiler.set_stance("force_eager")


def _first_pass(job: Job) -> str | None:
    """Forward and backward as a step runs them, on no text; returns what went wrong, if it did.

    The gradient of one weight alone is kept. It is none of `backward`, whose hooks would send it.
    No random number is taken: the run is the one that it would have been.
    """
    device, config = job.world.device, job.config
    rows = config.micro_batch_size(job.world.world_size)
    tokens = torch.zeros(rows, config.model.max_seq_len, dtype=torch.int64, device=device)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            with autocast(device, job.dtype):
                loss = job.model(tokens, tokens)
            torch.autograd.grad(loss, job.model.embedding.weight)
        except Exception as error:  # what is wrong with the model itself, the first step will show
            return _cause(error)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return None


def _cause(error: Exception) -> str:
    """The first line of what the compiler's own errors are wrapped around."""
    cause = getattr(error, "inner_exception", error)  # torch._dynamo's way, instead of __cause__
    lines = str(cause).strip().splitlines()
    return lines[0] if lines else type(cause).__name__
