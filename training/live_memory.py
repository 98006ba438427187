"""Bytes of tensors that a training step holds, counted while the model's own code runs.

A formula for what autograd keeps of a block goes stale with the next change of the block. So the
step is rehearsed: the real model and the real optimizer run on *fake* tensors, which have shapes
and types and no content, and a dispatch mode sees every tensor come and go. That takes a second for
any size of model, on any machine, and counts to the byte; memory that a kernel takes for itself
while it runs is not in it.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from model import attention, loss
from model.transformer import Transformer
from training.hardware import autocast

# Fake tensors are the CPU's wherever the run will be: torch's autocast and attention ask what
# hardware there is, and this machine may have no GPU. See `_as_on` for what that changes.
CPU = torch.device("cpu")


class LiveMemory(TorchDispatchMode):
    """Counts the bytes of the tensors that are made under it, a storage once.

    Attributes:
        now: bytes that live.
        peak: the most that ever lived; may be set back.
    """

    def __init__(self, not_counted: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()
        for tensor in not_counted:
            self.ignore(tensor)

    def __torch_dispatch__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._note(leaf.untyped_storage(), leaf.untyped_storage().nbytes())
        return result

    def ignore(self, tensor: Tensor) -> None:
        """Do not count a tensor's memory, whatever is made of it by views."""
        self._note(tensor.untyped_storage(), 0)

    def _note(self, storage: torch.UntypedStorage, size: int) -> None:
        key = storage._cdata
        if key not in self._known:  # else a view, or written in place
            self._known.add(key)
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


@dataclass(frozen=True)
class StepMemory:
    """Bytes of one forward and backward, beyond the model's own."""

    held: int
    """When the last backward begins: what autograd keeps, and gradients that are there and kept."""
    logits: int
    """Taken for a moment by the logits of some tokens and what is made of them."""
    peak: int
    """The most at any time, all of the above included."""


def fake_tensors() -> AbstractContextManager[Any]:
    """Context in which tensors have no content, and take no memory."""
    return FakeTensorMode()


def rehearse_step(
    model: Transformer,
    rows: int,
    dtype: torch.dtype,
    device_type: str,
    micro_steps: int,
    keeps_gradients: bool,
) -> StepMemory:
    """Forward and backward of a model of fake tensors; `fake_tensors` must be entered.

    Args:
        model: on the CPU.
        rows: sequences of max_seq_len in a micro-batch.
        dtype: of matrix products.
        device_type: where the run will be.
        micro_steps: micro-batches.
        keeps_gradients: False: each is taken away when it is complete, as into a bucket.
    """
    model.zero_grad()
    hooks = [] if keeps_gradients else _take_gradients_away(model)
    with _as_on(device_type), LiveMemory([*model.parameters(), *model.buffers()]) as live:
        logits = _LogitsMemory(live, model.output_head)
        total = torch.zeros(())
        held = 0
        for _ in range(min(micro_steps, 2) if keeps_gradients else 1):
            tokens = torch.zeros(rows, model.config.max_seq_len + 1, dtype=torch.int64)
            with autocast(CPU, dtype):
                micro_loss = model(tokens[:, :-1], tokens[:, 1:]) / micro_steps
            held = live.now
            micro_loss.backward()
            total += micro_loss.detach()
    for hook in [*hooks, *logits.hooks]:
        hook.remove()
    model.zero_grad()
    return StepMemory(held, logits.most, live.peak)


def rehearse_update(optimizer: torch.optim.Optimizer) -> tuple[int, int]:
    """An optimizer's step on fake parameters that have gradients; `fake_tensors` must be entered.

    Returns:
        Bytes of the state that it keeps, and what the next step takes for a moment beside.
    """
    state = 0
    passing = 0
    for _ in range(2):  # the first makes the state
        with LiveMemory(
            tensor
            for group in optimizer.param_groups
            for parameter in group["params"]
            for tensor in (parameter, parameter.grad, *_tensors(optimizer.state[parameter]))
        ) as live:
            optimizer.step()
        state += live.now
        passing = live.peak - live.now
    return state, passing


class _LogitsMemory:
    """What the output head takes beyond what it leaves behind."""

    def __init__(self, live: LiveMemory, head: nn.Module) -> None:
        self.most = 0
        self._live = live
        self._peak_before = 0
        self.hooks = [
            head.register_forward_pre_hook(self._before),
            head.register_forward_hook(self._after),
        ]

    def _before(self, *_: Any) -> None:
        self._peak_before, self._live.peak = self._live.peak, self._live.now

    def _after(self, *_: Any) -> None:
        self.most = max(self.most, self._live.peak - self._live.now)
        self._live.peak = max(self._live.peak, self._peak_before)


def _take_gradients_away(model: nn.Module) -> list[Any]:
    def take(parameter: Tensor) -> None:
        parameter.grad = None

    return [p.register_post_accumulate_grad_hook(take) for p in model.parameters()]


def _tensors(state: dict[str, Any]) -> list[Tensor]:
    return [value for value in state.values() if isinstance(value, Tensor)]


@contextlib.contextmanager
def _as_on(device_type: str) -> Iterator[None]:
    """Let the model go the way on the CPU's tensors that it goes on those of a GPU.

    The fused attention keeps the same on both: queries, keys, values, the output and one number a
    row.
    """
    if device_type == "cpu":
        yield
        return
    with (
        mock.patch.object(attention, "is_short", return_value=False),
        mock.patch.dict(loss.CHUNK_ELEMENTS, cpu=loss.CHUNK_ELEMENTS[device_type]),
    ):
        yield
