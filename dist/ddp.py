"""Data parallel training by hand: every rank computes its part of the batch, and while backward is
still running, full buckets of gradients are already being averaged.

How one step goes. Backward finishes the gradients one by one, about last layer first. A hook on
each parameter sees to it that its gradient is a view of the bucket's flat buffer (those of small
vectors move there together when it is sent). The bucket whose last gradient has come is sent, and
backward goes on. `finish_gradient_sync()` sends what unused parameters held back and waits for all.

Two rules keep the ranks from waiting for ever. Buckets are sent in one fixed order, whatever order
gradients come in: a full bucket waits for those before it. And every sync sends every bucket, also
those whose parameters a rank did not use, as zeros.

A parameter that some ranks use gets the average over all ranks. One that no rank uses keeps `None`,
so that the optimizer leaves it alone, as it would without DDP. To tell the two apart the ranks
exchange, after the last bucket, one byte a parameter that is 1 where a rank has a gradient.
"""

import contextlib
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dist.bucket import Bucket, make_buckets, unique
from dist.collectives import (
    BucketCollectives,
    broadcast_tensors,
    open_collectives,
    world_size,
)
from dist.grad_memory import GradMemory
from dist.misuse import check_that_gradients_are_dense, forbid_steps_during_a_sync
from dist.reducer import Reducer
from dist.same_model import check_same_model
from dist.use_flags import UseFlags

MB = 2**20

# Bytes of scattered buckets that travel at a time. With more, backward waits for the oldest, and
# its memory is filled next: so full gradients never need a whole model's memory.
MOST_UNDER_WAY = 100 * MB


class DDP(nn.Module):
    """Wrap a module so that its gradients are averaged over all ranks.

        loss(ddp(x)).backward()
        ddp.finish_gradient_sync()
        optimizer.step()

    The module's parameters and buffers become rank 0's; buffers are each rank's own afterwards.
    `state_dict` is the module's own, without a prefix. Without a process group it is the module and
    nothing else.

    Args:
        module: on its device already; the same on every rank, but for its values.
        bucket_cap_mb: megabytes of gradients sent together; None: what the collectives do best.
        first_bucket_mb: of the first bucket, so that traffic starts early.
        wire_dtype: gradients travel in this type, if it is smaller than their own, and are added
            up in float32: torch.bfloat16 halves the traffic and rounds every rank's gradient to 8
            bits. None: in their own.
        collectives: how buckets travel; None: chosen for these processes.

    Attributes:
        collectives: None in a world of one.

    Raises:
        ValueError: ranks hold different models (names the first difference), a size is not
            positive, or a layer's gradients are sparse, or of a shape that is not known yet.
    """

    def __init__(
        self,
        module: nn.Module,
        bucket_cap_mb: float | None = None,
        first_bucket_mb: float = 1.0,
        wire_dtype: torch.dtype | None = None,
        collectives: BucketCollectives | None = None,
    ) -> None:
        super().__init__()
        for name, size in (("bucket_cap_mb", bucket_cap_mb), ("first_bucket_mb", first_bucket_mb)):
            if size is not None and not size > 0:
                raise ValueError(f"{name} is {size}, it must be positive")
        self.module = module
        self.collectives = collectives
        self._wire_dtype = wire_dtype
        self._reducers: list[Reducer] = []
        self._syncing = True
        self._next_to_send = 0
        self._under_way: deque[Reducer] = deque()
        self._flags: UseFlags | None = None
        sizes = f"buckets of {bucket_cap_mb} MB, the first of {first_bucket_mb} MB"
        if world_size() > 1:
            check_that_gradients_are_dense(module)
        check_same_model(module, f"{sizes}, {wire_dtype} on the wire")
        broadcast_tensors([*module.parameters(), *module.buffers()])
        if world_size() == 1:
            return
        parameters = unique(
            p for p in module.parameters() if p.is_floating_point() or p.is_complex()
        )
        self._order = {id(parameter): place for place, parameter in enumerate(parameters)}
        # Where each parameter's gradient goes, by its identity: (reducer, index in its bucket).
        self._places: dict[int, tuple[Reducer, int]] = {}
        if self.collectives is None:
            device = parameters[0].device if parameters else torch.device("cpu")
            self.collectives = open_collectives(device)
        self.bucket_cap_mb = bucket_cap_mb or self.collectives.bucket_cap_mb
        self.first_bucket_mb = min(first_bucket_mb, self.bucket_cap_mb)
        # Frozen parameters lie apart: while they stay frozen, nothing is sent for them.
        trained = [p for p in parameters if p.requires_grad]
        frozen = [p for p in parameters if not p.requires_grad]
        cap_mb = bucket_cap_mb or self.collectives.all_reduce_cap_mb
        self._add_reducers([*self._deal(trained, cap_mb), *self._deal(frozen, cap_mb)])
        # The parameters outlive their wrapper.
        hooks = [self._hook(parameter) for parameter in parameters]
        weakref.finalize(self, _remove_all, hooks)
        forbid_steps_during_a_sync(self)

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
        if not self._reducers:
            return
        self._send_while(lambda reducer: True)
        sent = [reducer for reducer in self._reducers if reducer.sent]
        for reducer in sent:
            reducer.wait()
        self._under_way.clear()
        assert self._flags is not None
        used = self._flags.used_by_any()
        for reducer in sent:
            first = self._first_flag[reducer]
            reducer.finish(used[first : first + len(reducer.bucket.parameters)])
        self._next_to_send = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients; `grad` is None afterwards, whatever `set_to_none` says.

        After an exception in the middle of a backward this also ends the half-done sync. Enough
        where all ranks broke off alike; where some did not, finish_gradient_sync() comes first.
        """
        if self.is_syncing():
            self.finish_gradient_sync()
        for reducer in self._reducers:
            reducer.clear()
        super().zero_grad(set_to_none=True)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's state dict: names carry no prefix."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load into the module; see `nn.Module.load_state_dict`.

        Raises:
            ValueError: `assign=True`, which would put other parameters in the place of those whose
                gradients are averaged.
        """
        if self._reducers and (kwargs.get("assign") or args[2:3] == (True,)):
            raise ValueError("assign=True gives the module parameters that DDP does not know")
        return self.module.load_state_dict(*args, **kwargs)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        """Part of loading a module that contains this one: there are no prefixes there either."""
        for name in [name for name in state_dict if name.startswith(prefix)]:
            state_dict[f"{prefix}module.{name.removeprefix(prefix)}"] = state_dict.pop(name)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def make_buckets(
        self, parameters: Sequence[nn.Parameter], whole_matrices: bool = False
    ) -> list[Bucket]:
        """Deal some of the module's parameters into buckets of the size to be scattered.

        Raises:
            ValueError: a parameter is none of this module's, or is no floating-point number.
        """
        for parameter in parameters:
            if id(parameter) not in self._order:
                raise ValueError(
                    f"a parameter of shape {tuple(parameter.shape)} is none of the wrapped module's"
                )
        return self._deal(parameters, self.bucket_cap_mb, whole_matrices)

    def place_of(self, parameter: nn.Parameter) -> int | None:
        """Its place among the module's parameters; None: it is none of them."""
        return self._order.get(id(parameter))

    def has_place_for(self, parameter: Tensor) -> bool:
        """Whether this parameter's gradients are averaged here."""
        return id(parameter) in self._places

    def scatter_gradients(self, buckets: Sequence[Bucket]) -> list[Reducer]:
        """From now on give each rank only its shard of these parameters' gradients.

        For an optimizer that updates only that; their `grad` is None after a sync.

        Args:
            buckets: of `make_buckets`, the same on every rank.

        Returns:
            Their reducers, in the order of the buckets; they hold the shards.

        Raises:
            ValueError: a parameter is scattered already.
            RuntimeError: in the middle of a sync.
        """
        if self.is_syncing():
            raise RuntimeError("a sync is under way: call finish_gradient_sync() first")
        taken = set()
        for parameter in (p for bucket in buckets for p in bucket.parameters):
            if self._places[id(parameter)][0].scatter:
                raise ValueError("a parameter's gradient is scattered to another optimizer already")
            taken.add(id(parameter))
        left = [reducer for reducer in self._reducers if reducer.scatter]
        rest = []
        for reducer in self._reducers:
            if not reducer.scatter:
                rest.append([p for p in reducer.bucket.parameters if id(p) not in taken])
                reducer.retire()
        assert self.collectives is not None
        added = [Reducer(bucket, self.collectives, True, self._wire_dtype) for bucket in buckets]
        self._reducers = left + added
        self._add_reducers([Bucket(members, world_size()) for members in rest if members])
        return added

    def _deal(
        self, parameters: Sequence[nn.Parameter], cap_mb: float, whole_matrices: bool = False
    ) -> list[Bucket]:
        return make_buckets(
            sorted(parameters, key=lambda parameter: self._order[id(parameter)]),
            cap_mb * MB,
            world_size(),
            self.first_bucket_mb * MB,
            whole_matrices,
        )

    def _add_reducers(self, buckets: Sequence[Bucket]) -> None:
        """Take over these buckets, and fix the order of sending and the places of all flags."""
        assert self.collectives is not None
        self._reducers += [
            Reducer(bucket, self.collectives, False, self._wire_dtype) for bucket in buckets
        ]
        # A bucket is full when the gradient of its first registered parameter has come.
        self._reducers.sort(
            key=lambda reducer: -min(self._order[id(p)] for p in reducer.bucket.parameters)
        )
        self._first_flag: dict[Reducer, int] = {}
        count = 0
        for reducer in self._reducers:
            self._first_flag[reducer] = count
            count += len(reducer.bucket.parameters)
            for index, parameter in enumerate(reducer.bucket.parameters):
                self._places[id(parameter)] = (reducer, index)
        device = self._reducers[0].bucket.device if self._reducers else torch.device("cpu")
        if self._flags is not None:
            self._flags.recycle()
        self._flags = UseFlags(count, self.collectives, device)

    def _hook(self, parameter: nn.Parameter) -> RemovableHandle:
        if not parameter.requires_grad:
            # The hook needs a gradient-requiring leaf; it stays when the flag is taken back.
            parameter.requires_grad_(True)
            hook = self._hook(parameter)
            parameter.requires_grad_(False)
            return hook
        # By a weak reference: torch never frees a parameter that its own hook leads back to.
        key, this = id(parameter), weakref.ref(self)

        # After accumulation, not before: `grad` then holds the sum of all micro-batches.
        def gradient_is_complete(_: Tensor) -> None:
            ddp = this()
            if ddp is None:
                return
            reducer, index = ddp._places[key]
            if reducer.take(index, is_complete=ddp._syncing):
                ddp._send_while(Reducer.is_complete)

        parameter.grad_memory = GradMemory(self.memory_for)  # type: ignore[attr-defined]
        return parameter.register_post_accumulate_grad_hook(gradient_is_complete)

    def memory_for(self, parameter: Tensor) -> Tensor | None:
        """Where a backward may write this parameter's gradient now; None: nowhere."""
        reducer, index = self._places.get(id(parameter), (None, 0))
        # A copy has the original's `grad_memory`, and may have the identity of one that is gone.
        if reducer is None or reducer.bucket.parameters[index] is not parameter:
            return None
        return reducer.memory_for(index)

    def _send_while(self, may_be_sent: Any) -> None:
        """Send buckets in their order, as long as the next one may be sent."""
        flags = self._flags
        assert flags is not None
        while self._next_to_send < len(self._reducers):
            reducer = self._reducers[self._next_to_send]
            if not reducer.is_dormant():
                if not may_be_sent(reducer):
                    return
                flags.note(self._first_flag[reducer], reducer.send())
                if reducer.scatter:
                    self._under_way.append(reducer)
                    # Not for the one that was sent just now, however large: it is to overlap.
                    while len(self._under_way) > 1 and self._bytes_under_way() > MOST_UNDER_WAY:
                        self._under_way.popleft().wait()
            self._next_to_send += 1
            if self._next_to_send == len(self._reducers):
                flags.send()

    def _bytes_under_way(self) -> int:
        return sum(reducer.bucket.nbytes for reducer in self._under_way)

    def is_syncing(self) -> bool:
        """Whether a backward has begun to send gradients, and nobody has waited for them yet."""
        return any(reducer.started for reducer in self._reducers)


def _remove_all(hooks: Sequence[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()
