"""The optimizer that a ShardedOptimizer wraps: it updates this rank's shards, and knows no others.

A step can be made in parts, some shards after others, so that the first are on their way to the
other ranks while the rest is computed. What comes of it is the same, as the wrapped optimizer
updates each of its parameters by itself (but for rounding, where matrices are multiplied in stacks
and one goes with the first part).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dist.shard import Segment, Shard

# Of torch's; on pieces they would compute something else, without a word.
NOT_ELEMENTWISE = tuple(
    getattr(torch.optim, name)
    for name in ("Adafactor", "LBFGS", "Muon", "SparseAdam")
    if hasattr(torch.optim, name)
)


def check_options(
    optimizer_cls: Callable[..., torch.optim.Optimizer],
    groups: Iterable[Mapping[str, Any]],
    options: Mapping[str, Any],
) -> None:
    """Let an optimizer raise what it has against groups, before any weight of theirs has moved."""
    optimizer_cls([{**group, "params": _nothing()} for group in groups], **options)


class LocalOptimizer:
    """An optimizer over the segments of shards, group by group.

    Args:
        optimizer_cls: see `dist.sharded_optimizer.ShardedOptimizer`.
        groups: options of each group; gain those that optimizer_cls adds.
        shards: of each group.
        options: for all groups.

    Attributes:
        wrapped: the optimizer itself.
    """

    def __init__(
        self,
        optimizer_cls: Callable[..., torch.optim.Optimizer],
        groups: Sequence[dict[str, Any]],
        shards: Sequence[list[Shard]],
        options: Mapping[str, Any],
    ) -> None:
        self._shards = list(shards)
        members = [
            {**group, "params": _parameters(own)} for group, own in zip(groups, shards, strict=True)
        ]
        self.wrapped = optimizer_cls(members, **options)
        for group, local in zip(groups, self.wrapped.param_groups, strict=True):
            _add_missing(group, local)

    @property
    def state(self) -> dict[Tensor, dict[str, Any]]:
        """By segment's parameter."""
        return self.wrapped.state

    def check_group(self, group: Mapping[str, Any]) -> None:
        """Let the wrapped optimizer raise what it has against a group; nothing is left of it."""
        groups = len(self.wrapped.param_groups)
        try:
            self.wrapped.add_param_group({**group, "params": _nothing()})
        finally:
            del self.wrapped.param_groups[groups:]

    def add_group(self, group: dict[str, Any], shards: list[Shard]) -> None:
        """Take on one more group; it gains the options that the wrapped optimizer adds."""
        self.wrapped.add_param_group({**group, "params": _parameters(shards)})
        self._shards.append(shards)
        _add_missing(group, self.wrapped.param_groups[-1])

    def set_options(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Take over learning rates and all other options of the groups."""
        for group, local in zip(groups, self.wrapped.param_groups, strict=True):
            local.update({key: value for key, value in group.items() if key != "params"})

    def renew_parameters(self) -> None:
        """Let the wrapped optimizer have the segments as they are now."""
        for shards, local in zip(self._shards, self.wrapped.param_groups, strict=True):
            local["params"] = _parameters(shards)

    def replace_state(self, state: Mapping[Tensor, dict[str, Any]]) -> None:
        """Have this state and no other; it is of the segments as they are now."""
        self.wrapped.state.clear()
        self.wrapped.state.update(state)
        self.renew_parameters()

    def takes_found_inf(self) -> bool:
        """Whether `found_inf` can be set on it; torch's fused ones say so like this."""
        is_fused = getattr(self.wrapped, "_step_supports_amp_scaling", False)
        return bool(is_fused) or hasattr(self.wrapped, "found_inf")

    def counts_on_device(self, shard: Shard) -> bool:
        """Whether the count of steps of these segments is a tensor beside them."""
        return any(
            parameter is segment.parameter
            for group in self.wrapped.param_groups
            if group.get("fused") or group.get("capturable")
            for parameter in group["params"]
            for segment in shard.segments
        )

    def step(self, shards: Sequence[Shard], in_parts: bool) -> Iterator[Sequence[Shard]]:
        """Update shards by their gradients, and yield those that are done.

        Args:
            shards: all that have gradients.
            in_parts: the first of them, then all others at once, if the wrapped optimizer is known
                to allow it.
        """
        if not (in_parts and shards and self._steps_in_parts()):
            self.wrapped.step()
            yield shards
            return
        for part in filter(None, (shards[:1], shards[1:])):
            self._step_part(part)
            yield part

    def _steps_in_parts(self) -> bool:
        """Of torch's own classes it is known; an heir of one may count its calls."""
        is_torchs = type(self.wrapped) in vars(torch.optim).values()
        return is_torchs or getattr(self.wrapped, "steps_in_parts", False)

    def _step_part(self, shards: Sequence[Shard]) -> None:
        part = {id(segment.parameter) for segment in _segments(shards)}
        groups = self.wrapped.param_groups
        everything = [group["params"] for group in groups]
        for group, params in zip(groups, everything, strict=True):
            group["params"] = [parameter for parameter in params if id(parameter) in part]
        try:
            self.wrapped.step()
        finally:
            for group, params in zip(groups, everything, strict=True):
                group["params"] = params


def _nothing() -> list[nn.Parameter]:
    """A parameter without elements, and for who needs matrices a stack of none."""
    return [nn.Parameter(torch.empty(0, 1, 1))]


def _segments(shards: Iterable[Shard]) -> list[Segment]:
    return [segment for shard in shards for segment in shard.segments]


def _parameters(shards: Iterable[Shard]) -> list[nn.Parameter]:
    return [segment.parameter for segment in _segments(shards)]


def _add_missing(group: dict[str, Any], local: Mapping[str, Any]) -> None:
    for key, value in local.items():
        group.setdefault(key, value)
