"""An optimizer whose state is spread over the ranks: each keeps 1/world_size of it.

Data parallel ranks all hold the same weights and, after the sync, the same gradients, so nothing
is lost when each updates only a part of the weights and the parts are then exchanged (ZeRO stage 1,
Rajbhandari et al. 2020). The part is counted in elements, not in tensors: the weights of a group
are laid end to end in one flat buffer, cut into equal shards (see bucket.py). Where a cut goes
through a weight, each side gets a piece of it. The wrapped optimizer must be elementwise; it sees
pieces as it would see weights, and computes the numbers of the unsharded optimizer.

    step()    copy what was written into param_groups     (so a schedule's learning rate counts)
              point every piece's grad at its part of the full gradient
              let the wrapped optimizer update the pieces (1/world_size of the work)
              all-gather the flat buffers                 (the weights are views into them)

Checkpoints know nothing of shards: `gather_state` puts the pieces of each weight's state together
on rank 0, one weight at a time, and `load_state` cuts them anew for any number of ranks.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import Tensor, nn

from dist.bucket import Bucket, make_buckets
from dist.collectives import all_gather_shards, broadcast_object, gather_objects, rank, world_size

# State by parameter name: what a checkpoint stores.
NamedState = dict[str, dict[str, Any]]


@dataclass
class _Piece:
    """The elements first..last of one weight that this rank updates."""

    weight: nn.Parameter
    first: int
    last: int
    # Shares its memory with the weight; what the wrapped optimizer takes for its parameter.
    parameter: nn.Parameter


class ShardedOptimizer(torch.optim.Optimizer):
    """Shard any elementwise optimizer over the ranks of the process group.

        optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=3e-4)

    Args:
        params: parameters or groups, as for torch.optim; the same on every rank.
        optimizer_cls: an optimizer whose update of an element depends on that element's weight,
            gradient and state alone (SGD, Adam, AdamW, ...; not Adafactor, not Muon).
        **kwargs: its hyperparameters.

    The weights' memory moves into flat buffers; the Parameter objects stay. Gradients must be
    complete before `step`, on all ranks. Zero-size weights and ranks without a piece are fine.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_cls: Callable[..., torch.optim.Optimizer],
        **kwargs: Any,
    ) -> None:
        super().__init__(params, dict(kwargs))
        self._flats: list[Tensor] = []
        self._pieces: list[_Piece] = []
        groups = [
            {**group, "params": [piece.parameter for piece in self._cut(group["params"])]}
            for group in self.param_groups
        ]
        self._local = optimizer_cls(groups, **kwargs)
        for group, local in zip(self.param_groups, self._local.param_groups, strict=True):
            for key, value in local.items():
                group.setdefault(key, value)

    def _cut(self, weights: list[nn.Parameter]) -> list[_Piece]:
        """Lay weights into flat buffers, one a dtype and device, and take this rank's pieces.

        Frozen weights lie apart: they have no state, and would leave some rank less than its share.
        """
        trained = [weight for weight in weights if weight.requires_grad]
        frozen = [weight for weight in weights if not weight.requires_grad]
        pieces = []
        for bucket in (
            *make_buckets(trained, math.inf, world_size()),
            *make_buckets(frozen, math.inf, world_size()),
        ):
            flat = bucket.new_buffer()
            views = bucket.views(flat)
            with torch.no_grad():
                for weight, view in zip(bucket.parameters, views, strict=True):
                    view.copy_(weight)
                    weight.data = view
            pieces.extend(self._pieces_of(bucket, views))
            self._flats.append(flat)
        self._pieces.extend(pieces)
        return pieces

    def _pieces_of(self, bucket: Bucket, views: list[Tensor]) -> list[_Piece]:
        return [
            _Piece(
                weight=bucket.parameters[index],
                first=first,
                last=last,
                parameter=nn.Parameter(views[index].view(-1)[first:last]),
            )
            for index, first, last in bucket.pieces(rank(), world_size())
        ]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update this rank's pieces and exchange them; every rank must call it.

        Args:
            closure: recomputes and returns the loss, as in torch.optim.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group, local in zip(self.param_groups, self._local.param_groups, strict=True):
            local.update({key: value for key, value in group.items() if key != "params"})
        for piece in self._pieces:
            grad = piece.weight.grad
            piece.parameter.grad = (
                None if grad is None else grad.reshape(-1)[piece.first : piece.last]
            )
        self._local.step()
        for piece in self._pieces:
            piece.parameter.grad = None
        for flat in self._flats:
            all_gather_shards(flat)
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, sharded like the others."""
        super().add_param_group(param_group)
        if hasattr(self, "_local"):  # torch's constructor adds the first groups through here
            group = self.param_groups[-1]
            pieces = [piece.parameter for piece in self._cut(group["params"])]
            self._local.add_param_group({**group, "params": pieces})
            for key, value in self._local.param_groups[-1].items():
                group.setdefault(key, value)

    def state_bytes(self) -> int:
        """Bytes of optimizer state that this rank keeps."""
        return sum(
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

    @torch.no_grad()
    def gather_state(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> NamedState:
        """Put the full state together on rank 0, one weight at a time; every rank must call it.

        Args:
            named_parameters: names for all parameters of this optimizer.

        Returns:
            On rank 0: for each name with state, each entry, tensors in the weight's shape on the
            CPU. On other ranks: empty.
        """
        names = {id(parameter): name for name, parameter in named_parameters}
        described = {
            (names[id(piece.weight)], piece.first, piece.last): {
                key: value.dtype if _is_elementwise(value, piece) else _on_cpu(value)
                for key, value in self._local.state[piece.parameter].items()
            }
            for piece in self._pieces
            if piece.parameter in self._local.state
        }
        by_rank = broadcast_object(gather_objects(described))
        gathered: NamedState = {}
        weights = {names[id(w)]: w for group in self.param_groups for w in group["params"]}
        pieces = {(names[id(piece.weight)], piece.first): piece for piece in self._pieces}
        for owner, described in enumerate(by_rank):
            for (name, first, last), entries in described.items():
                state = gathered.setdefault(name, {}) if rank() == 0 else {}
                for key, value in entries.items():
                    if not isinstance(value, torch.dtype):
                        state.setdefault(key, value)
                    elif rank() in (0, owner):
                        part = torch.empty(last - first, dtype=value, device=weights[name].device)
                        if rank() == owner:
                            part = self._local.state[pieces[name, first].parameter][key]
                        _move_to_rank_zero(part, owner)
                        if rank() == 0:
                            if key not in state:
                                state[key] = torch.empty(weights[name].shape, dtype=value)
                            state[key].view(-1)[first:last] = part.cpu()
        return gathered

    @torch.no_grad()
    def load_state(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        state: Mapping[str, Mapping[str, Any]],
    ) -> None:
        """Take this rank's part of a full state, whatever number of ranks wrote it.

        Args:
            named_parameters: names for all parameters of this optimizer.
            state: what `gather_state` returned on rank 0. Tensors may be memory-mapped: only this
                rank's elements are read.

        Raises:
            ValueError: the state is another model's; names the first parameter that is unknown or
                of another shape. The optimizer keeps the state that it had.
        """
        names = {id(parameter): name for name, parameter in named_parameters}
        weights = {names[id(w)]: w for group in self.param_groups for w in group["params"]}
        _check_state(state, weights)
        # An update that is one GPU kernel wants its step counter on the GPU too.
        counted_on_device = {
            id(parameter)
            for group in self._local.param_groups
            if group.get("fused") or group.get("capturable")
            for parameter in group["params"]
        }
        self._local.state.clear()
        for piece in self._pieces:
            on_device = id(piece.parameter) in counted_on_device
            counter_device = piece.weight.device if on_device else torch.device("cpu")
            for key, value in state.get(names[id(piece.weight)], {}).items():
                entry = _cut_entry(key, value, piece, counter_device)
                self._local.state[piece.parameter][key] = entry


def _is_elementwise(value: Any, piece: _Piece) -> bool:
    return isinstance(value, Tensor) and value.shape == piece.parameter.shape


def _check_state(
    state: Mapping[str, Mapping[str, Any]], weights: Mapping[str, nn.Parameter]
) -> None:
    for name, entries in state.items():
        if name not in weights:
            raise ValueError(f"state for {name}, which is no parameter of this optimizer")
        for key, value in entries.items():
            shape = tuple(weights[name].shape)
            if isinstance(value, Tensor) and value.dim() > 0 and value.shape != shape:
                raise ValueError(
                    f"{key} of {name} has shape {tuple(value.shape)}, the parameter has {shape}"
                )


def _on_cpu(value: Any) -> Any:
    """What may be unpickled on any rank: a GPU's tensor would come back on the same GPU number."""
    return value.cpu() if isinstance(value, Tensor) else value


def _cut_entry(key: str, value: Any, piece: _Piece, counter_device: torch.device) -> Any:
    """A piece's part of one entry; counters such as `step` are the same for every piece."""
    if not isinstance(value, Tensor):
        return value
    if key == "step" or value.shape != piece.weight.shape:
        return value.to(counter_device, copy=True)
    part = value.reshape(-1)[piece.first : piece.last]
    return part.to(piece.weight.device, copy=True)


def _move_to_rank_zero(part: Tensor, owner: int) -> None:
    """Send `part` from its owner; rank 0 receives into its own `part`."""
    if owner == 0:
        return
    # gloo sends from the CPU's memory only.
    staged = part.cpu() if torch_dist.get_backend() == "gloo" else part
    if rank() == 0:
        torch_dist.recv(staged, src=owner)
        part.copy_(staged)
    else:
        torch_dist.send(staged.contiguous(), dst=0)
