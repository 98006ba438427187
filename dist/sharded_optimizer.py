"""An optimizer whose state is spread over the ranks: each keeps 1/world_size of it.

Data parallel ranks all hold the same weights and need the same update, so nothing is lost when each
computes only a part of it and the parts are then exchanged (ZeRO stages 1 and 2, Rajbhandari et al.
2020, arXiv:1910.02054). The part is counted in elements, not in tensors: the weights lie in flat
buckets (bucket.py), and each bucket is cut into equal shards, wherever the cuts fall.

Given our DDP, the gradients are cut alike:

    backward     a full bucket of gradients is reduce-scattered: each rank gets its shard of the
                 average, and the memory of the full gradients is free again
    step()       the wrapped optimizer updates this rank's shards, one long tensor each
    forward      every bucket of weights is all-gathered, and awaited by the first module that
                 reads it (parameter_gather.py)

Reduce-scatter and all-gather together move the bytes of the one all-reduce that DDP alone would.
Without our DDP every weight has its own, complete gradient, and step() gathers the weights at once.

The wrapped optimizer must be elementwise: then it computes on a cut what it would on the whole. One
that needs whole matrices says so by `whole_matrices = True`, in a group or for all as a class
attribute, and gets stacks of them, (count, rows, columns), every rank as many.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dist.clip_shards import clip_shards
from dist.collectives import world_size
from dist.ddp import DDP
from dist.local_optimizer import NOT_ELEMENTWISE, LocalOptimizer, check_options
from dist.shard_layout import ShardLayout
from dist.sharded_state import NamedState, StateGather, load_state

# Torch wraps this method to keep it out of compiled graphs, and the wrapper imports the compiler at
# its first call: a second of every start. Called as it was written, it needs none.
_add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)


class ShardedOptimizer(torch.optim.Optimizer):
    """Shard an optimizer over the ranks of the process group.

        ddp = DDP(model)
        optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=3e-4, ddp=ddp)

        loss(ddp(x)).backward()
        ddp.finish_gradient_sync()
        optimizer.clip_grad_norm(1.0)
        optimizer.step()
        optimizer.zero_grad()

    Args:
        params: parameters or groups, as for torch.optim; the same on every rank. Their memory moves
            into flat buffers; the Parameter objects stay.
        optimizer_cls: an optimizer whose update of an element depends on that element's weight,
            gradient and state alone (SGD, Adam, AdamW, ...; not Adafactor), or one that has
            `whole_matrices = True` and takes stacks of them; its state then is tensors with an
            entry for each matrix, and numbers that all share, as `step` is.
        ddp: the wrapper of the module that the parameters are of. Their `grad` is None after
            finish_gradient_sync: the shards are here, and are cleared by this optimizer's zero_grad
            or the wrapper's, not by the module's. Whoever reads weights not by calling the module,
            one of its children, or `state_dict`, calls `finish_gather()` first.
            None: gradients must be complete on all ranks before `step`.
        gather_under_forward: given the DDP, let `step` only start the exchange of weights. False:
            it waits for all of them, and then anybody may read and, on all ranks alike, change
            them: for a forward that uses a child's weight before it calls the child.
        **kwargs: hyperparameters of optimizer_cls.

    Weights of 16 bits have float32 masters, in the shards alone; they are what is updated. Given
    the DDP, loading a state dict into the module sets them too.

    Attributes:
        found_inf: 0-d float32 on the weights' device, alike on all ranks, to be set before `step`:
            1 leaves the step out. The wrapped optimizer is told, where it has such an attribute or
            is one of torch's fused ones; for others the host reads it. None: nothing is left out.

    Raises:
        ValueError: whole matrices are needed, and a parameter is none; ranks list parameters in
            different orders; optimizer_cls is one of torch's that need whole weights.
    """

    found_inf: Tensor | None = None

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_cls: Callable[..., torch.optim.Optimizer],
        *,
        ddp: DDP | None = None,
        gather_under_forward: bool = True,
        **kwargs: Any,
    ) -> None:
        if optimizer_cls in NOT_ELEMENTWISE:
            raise ValueError(
                f"{getattr(optimizer_cls, '__name__', optimizer_cls)} needs whole weights, "
                "and a rank has pieces: use an elementwise optimizer, such as AdamW"
            )
        self._whole_matrices = bool(getattr(optimizer_cls, "whole_matrices", False))
        self._ddp = ddp if world_size() > 1 else None
        self._waits_in_step = self._ddp is None or not gather_under_forward
        self._layout = ShardLayout(self._ddp)
        super().__init__(params, dict(kwargs))
        check_options(optimizer_cls, self.param_groups, kwargs)
        shards = self._layout.add([self._weights_of(group) for group in self.param_groups])
        self._local = LocalOptimizer(optimizer_cls, self.param_groups, shards, kwargs)
        # Where schedulers look for what can be scheduled.
        self.defaults = {**self._local.wrapped.defaults, **self.defaults}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update this rank's shards and exchange them; every rank must call it.

        Args:
            closure: recomputes and returns the loss, as in torch.optim.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._local.takes_found_inf():
            self._local.wrapped.found_inf = self.found_inf  # type: ignore[attr-defined]
        elif self.found_inf is not None and self.found_inf.item():
            return loss
        self._local.set_options(self.param_groups)
        if self._layout.gather is not None:
            self._layout.gather.wait_until_writable()
        for shard in self._layout.shards:
            shard.check_that_weights_are_here()
            shard.take_over_changes()
        self._take_gradients()
        shards = [shard for shard in self._layout.in_reading_order if shard.is_updated()]
        # Nothing is gained by parts where all weights are waited for at once.
        for updated in self._local.step(shards, in_parts=not self._waits_in_step):
            for shard in updated:
                shard.drop_gradients()
                shard.write_back()
                # Written through the buffer: let a backward that saved the old values notice.
                torch.autograd.graph.increment_version(shard.bucket.parameters)
            if self._layout.gather is not None:
                self._layout.gather.start([shard.buffer for shard in updated])
        if self._layout.gather is not None and self._waits_in_step:
            self._layout.gather.wait_until_writable()
        return loss

    def finish_gather(self) -> None:
        """Wait for the exchange that `step` started: then all weights are there to be read.

        To change them by hand, wait for all ranks besides, by a barrier: they may still be reading
        these. With `gather_under_forward=False` neither is needed.
        """
        if self._layout.gather is not None:
            self._layout.gather.wait()

    @torch.no_grad()
    def clip_grad_norm(
        self,
        max_norm: float,
        grad_scale: float | Tensor = 1.0,
        *,
        summed: Tensor | None = None,
    ) -> Tensor:
        """Divide all gradients by grad_scale, then scale them to a global norm of at most max_norm.

        One small reduction makes the norm, and with it the answer to whether any gradient is
        infinite or NaN, the same on all ranks; every rank must call it. A norm that is not finite
        leaves the gradients as they are: the caller skips the step.

        Args:
            max_norm: above 0; infinity: divide and measure alone.
            grad_scale: what the loss was multiplied by; > 0, a number or a 0-d tensor.
            summed: (any,) float32 on the weights' device: what the caller wants to be added over
                the ranks, in place and in the same reduction.

        Returns:
            The norm after the division and before clipping, a 0-d tensor on the weights' device.

        Raises:
            ValueError: max_norm is not above 0.
            RuntimeError: the sync of the gradients has not been finished.
        """
        if self._ddp is not None and self._ddp.is_syncing():
            raise RuntimeError(
                "clip_grad_norm() before finish_gradient_sync(): the gradients are not averaged yet"
            )
        shards = self.gradient_shards()
        # Without our DDP it is the weights' own gradients that `step` will read.
        gradients = shards if self.has_shards else self._own_gradients()
        device = self._layout.device
        return clip_shards(shards, gradients, device, max_norm, grad_scale, summed)

    @property
    def has_shards(self) -> bool:
        """Whether gradients are here as shards, and not in the weights' `grad`."""
        return self._ddp is not None

    def gradient_shards(self) -> list[Tensor]:
        """This rank's shards of all gradients that there are; to be changed in place."""
        self._take_gradients()
        return [
            segment.parameter.grad
            for shard in self._layout.shards
            for segment in shard.segments
            if segment.parameter.grad is not None
        ]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, the shards included, or let them be zeros, as in torch."""
        for shard in self._layout.shards:
            if shard.reducer is not None:
                shard.reducer.clear() if set_to_none else shard.reducer.zero()
        super().zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, sharded like the others."""
        _add_param_group(self, param_group)
        if hasattr(self, "_local"):  # torch's constructor adds the first groups through here
            group = self.param_groups[-1]
            try:
                self._local.check_group(group)  # before any weight's memory moves
                (shards,) = self._layout.add([self._weights_of(group)])
            except Exception:
                self.param_groups.pop()
                raise
            self._local.add_group(group, shards)

    def state_bytes(self) -> int:
        """Bytes of optimizer state that this rank keeps, masters of 16-bit weights included."""
        masters = sum(shard.values.nbytes for shard in self._layout.shards if shard.is_half)
        return masters + sum(
            value.nbytes
            for state in self._local.state.values()
            for value in state.values()
            if isinstance(value, Tensor)
        )

    def state_dict(self) -> dict[str, Any]:
        """Refused: a rank's own state is only a part.

        Raises:
            RuntimeError: always; `gather_state` gives the whole.
        """
        raise RuntimeError("a rank holds only its part of the state: use gather_state(names)")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Refused, like `state_dict`.

        Raises:
            RuntimeError: always; `load_state` takes what `gather_state` gave.
        """
        raise RuntimeError("a rank holds only its part of the state: use load_state(names, state)")

    def gather_state(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> NamedState:
        """Put the full state together on rank 0, bucket by bucket; every rank must call it.

        Args:
            named_parameters: names for all parameters of this optimizer.

        Returns:
            On rank 0: for each name with state, each entry, tensors in the weight's shape on the
            CPU; `master` is a 16-bit weight in float32. On other ranks: empty.

        Raises:
            ValueError: a parameter has no name; on every rank.
        """
        gather = self.begin_gather_state(named_parameters)
        gathered = gather.described
        for name, key, tensor in gather.pieces(gather.tensors):
            gathered[name][key] = tensor.to("cpu", copy=True)
        return gathered

    def begin_gather_state(
        self, named_parameters: Iterable[tuple[str, nn.Parameter]], with_weights: bool = False
    ) -> StateGather:
        """Say what the full state consists of, and let it be moved later; every rank must call it.

        Args:
            named_parameters: as for `gather_state`.
            with_weights: gather the weights too, as entries `weight`: each rank's shard of them is
                up to date right after `step`.

        Raises:
            ValueError: a parameter has no name; on every rank.
        """
        for shard in self._layout.shards:
            shard.take_over_changes()
        named = dict(named_parameters)
        return StateGather(self._layout.shards, self._local.state, named, with_weights)

    def load_state(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        state: Mapping[str, Mapping[str, Any]],
    ) -> None:
        """Take this rank's part of a full state, whatever number of ranks wrote it.

        16-bit weights without a `master` in the state are taken as they are now.

        Args:
            named_parameters: names for all parameters of this optimizer.
            state: what `gather_state` returned on rank 0. Tensors may be memory-mapped: only this
                rank's elements are read.

        Raises:
            ValueError: the state is another model's; names the first parameter that is unknown or
                of another shape. The optimizer keeps the state that it had.
        """
        self.finish_gather()
        counts_on_device = [self._local.counts_on_device(shard) for shard in self._layout.shards]
        named = dict(named_parameters)
        self._local.replace_state(load_state(self._layout.shards, named, state, counts_on_device))

    def _weights_of(self, group: Mapping[str, Any]) -> tuple[list[nn.Parameter], bool]:
        """A group's weights, and whether they are needed as whole matrices."""
        return group["params"], bool(group.get("whole_matrices", self._whole_matrices))

    def _take_gradients(self) -> None:
        for shard in self._layout.shards:
            shard.check_that_gradients_are_averaged()
        was_split = [shard.split(self._local.state) for shard in self._layout.shards]
        if any(was_split):
            self._local.renew_parameters()
        for shard in self._layout.shards:
            shard.take_gradients()

    def _own_gradients(self) -> list[Tensor]:
        return [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
