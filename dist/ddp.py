"""Data parallel training by hand: every rank computes its part of the batch, and while backward is
still running, full buckets of gradients are already being averaged.

How one step goes. Backward finishes the gradients one by one, about last layer first. A hook on
each parameter moves its gradient into the bucket's flat buffer and leaves `grad` as a view of it.
The bucket whose last gradient has come is sent by an asynchronous all-reduce, and backward goes on.
`finish_gradient_sync()` sends what unused parameters held back and waits for all.

Two rules keep the ranks from waiting for ever. Buckets are sent in one fixed order, whatever order
gradients come in: a full bucket waits for those before it. And every sync sends every bucket, also
those whose parameters a rank did not use, as zeros.

A parameter that some ranks use gets the average over all ranks. One that no rank uses keeps `None`,
so that the optimizer leaves it alone, as it would without DDP. To tell the two apart each bucket
carries, behind its gradients, one element a parameter that is 1 where the rank has a gradient; the
average of it is zero only if no rank had one.
"""

import contextlib
import hashlib
from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import Tensor, nn

from dist.bucket import Bucket, make_buckets
from dist.collectives import (
    broadcast_object,
    broadcast_tensors,
    gather_objects,
    start_all_reduce_mean,
    world_size,
)


class DDP(nn.Module):
    """Wrap a module so that its gradients are averaged over all ranks.

        loss(ddp(x)).backward()
        ddp.finish_gradient_sync()
        optimizer.step()

    The module's parameters and buffers become rank 0's. `state_dict` is the module's own, without
    a prefix. Without a process group it is the module and nothing else.

    Args:
        module: on its device already; the same on every rank, but for its values.
        bucket_cap_mb: megabytes of gradients sent together.

    Raises:
        ValueError: ranks hold different models (names the first difference), or the cap is not
            positive.
    """

    def __init__(self, module: nn.Module, bucket_cap_mb: float = 25.0) -> None:
        super().__init__()
        if bucket_cap_mb <= 0:
            raise ValueError(f"bucket_cap_mb is {bucket_cap_mb}, it must be positive")
        self.module = module
        _check_same_model(module, bucket_cap_mb)
        broadcast_tensors([*module.parameters(), *module.buffers()])
        # Frozen parameters have buckets too: they may be thawed later.
        parameters = [p for p in module.parameters() if p.is_floating_point() or p.is_complex()]
        buckets = make_buckets(parameters, bucket_cap_mb * 2**20, world_size(), 1)
        self._reducers = [_Reducer(bucket) for bucket in buckets] if world_size() > 1 else []
        self._syncing = True
        self._next_to_send = 0
        for reducer in self._reducers:
            for index, parameter in enumerate(reducer.bucket.parameters):
                self._hook(parameter, reducer, index)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward."""
        return self.module(*args, **kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Only accumulate: backward inside this context sends nothing.

        For all micro-batches but the last. It is backward that must run inside; an exception
        leaves the context as it was.
        """
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before

    def finish_gradient_sync(self) -> None:
        """Send what has not been sent and wait: then all gradients are complete and alike.

        Every rank must call it once a step, after the last backward; also a rank whose step broke
        off with an exception, for the others wait for its buckets.
        """
        while self._next_to_send < len(self._reducers):
            self._send_next()
        for reducer in self._reducers:
            reducer.finish()
        self._next_to_send = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients; `grad` is None afterwards, whatever `set_to_none` says.

        After an exception in the middle of a backward this also ends the half-done sync. Enough
        where all ranks broke off alike; where some did not, finish_gradient_sync() comes first.
        """
        if any(reducer.started for reducer in self._reducers):
            self.finish_gradient_sync()
        super().zero_grad(set_to_none=True)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's state dict: names carry no prefix."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load into the module; see `nn.Module.load_state_dict`."""
        return self.module.load_state_dict(*args, **kwargs)

    def _hook(self, parameter: nn.Parameter, reducer: "_Reducer", index: int) -> None:
        if not parameter.requires_grad:
            # The hook needs a gradient-requiring leaf; it stays when the flag is taken back.
            parameter.requires_grad_(True)
            self._hook(parameter, reducer, index)
            parameter.requires_grad_(False)
            return

        # After accumulation, not before: `grad` then holds the sum of all micro-batches.
        def gradient_is_complete(_: Tensor) -> None:
            reducer.take(index)
            if self._syncing:
                reducer.mark_ready(index)
                while self._next_to_send < len(self._reducers):
                    if not self._reducers[self._next_to_send].is_ready():
                        break
                    self._send_next()

        parameter.register_post_accumulate_grad_hook(gradient_is_complete)

    def _send_next(self) -> None:
        self._reducers[self._next_to_send].send()
        self._next_to_send += 1


class _Reducer:
    """One bucket's gradient buffer on its way through a sync."""

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self.buffer = bucket.new_buffer()
        self.views = bucket.views(self.buffer)
        # Behind the gradients, one element a parameter: does this rank have a gradient?
        self.used = self.buffer[bucket.numel : bucket.numel + len(bucket.parameters)]
        self.all_used = False
        self.ready: set[int] = set()
        self.sent = False
        self.work: torch_dist.Work | None = None

    @property
    def started(self) -> bool:
        """Whether a sync is under way in this bucket."""
        return self.sent or bool(self.ready)

    def take(self, index: int) -> None:
        """Make a parameter's gradient a view of the buffer, whoever made it."""
        parameter, view = self.bucket.parameters[index], self.views[index]
        if parameter.grad is not None and parameter.grad is not view:
            view.copy_(parameter.grad)
            parameter.grad = view

    def mark_ready(self, index: int) -> None:
        if self.sent or index in self.ready:
            raise RuntimeError(
                "a second backward before finish_gradient_sync(): finish the first, or run all "
                "micro-batches but the last under no_sync()"
            )
        self.ready.add(index)

    def is_ready(self) -> bool:
        """Whether every gradient that can come has come."""
        return all(
            index in self.ready
            for index, parameter in enumerate(self.bucket.parameters)
            if parameter.requires_grad
        )

    def send(self) -> None:
        parameters = self.bucket.parameters
        for index, parameter in enumerate(parameters):
            if parameter.grad is None:
                self.views[index].zero_()
            else:
                self.take(index)
        has_gradient = [parameter.grad is not None for parameter in parameters]
        self.all_used = all(has_gradient)
        if self.all_used:
            self.used.fill_(1)
        else:
            self.used.copy_(torch.tensor(has_gradient, dtype=self.buffer.dtype))
        self.work = start_all_reduce_mean(self.buffer)
        self.sent = True

    def finish(self) -> None:
        if self.work is not None:
            self.work.wait()
        # What this rank has, no rank needs to tell it; to ask would make the CPU wait for the GPU.
        used_by_any = [True] * len(self.views) if self.all_used else self.used.tolist()
        for parameter, view, used in zip(
            self.bucket.parameters, self.views, used_by_any, strict=True
        ):
            # A parameter frozen on this rank alone would break the replicas; take the average.
            parameter.grad = view if used else None
        self.ready.clear()
        self.sent = False
        self.work = None


def _check_same_model(module: nn.Module, bucket_cap_mb: float) -> None:
    """Compare what the ranks hold, by a digest first, and name the first difference."""
    held = [f"buckets of {bucket_cap_mb} MB"]
    held += [
        f"parameter {name} {tuple(p.shape)} {p.dtype} requires_grad={p.requires_grad}"
        for name, p in module.named_parameters()
    ]
    held += [f"buffer {name} {tuple(b.shape)} {b.dtype}" for name, b in module.named_buffers()]
    digest = hashlib.sha256("\n".join(held).encode()).hexdigest()
    digests = broadcast_object(gather_objects(digest))
    if len(set(digests)) > 1:
        raise ValueError(broadcast_object(_first_difference(gather_objects(held) or [])))


def _first_difference(held_by_rank: list[list[str]]) -> str:
    for rank, held in enumerate(held_by_rank):
        for reference, other in zip_longest(held_by_rank[0], held, fillvalue="nothing more"):
            if reference != other:
                return (
                    f"ranks hold different models: where rank 0 has {reference}, "
                    f"rank {rank} has {other}"
                )
    return ""
