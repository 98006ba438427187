"""The state of a sharded optimizer as a checkpoint knows it: by weight, whole, without ranks.

`gather_state` puts it together on rank 0 and `load_state` cuts it anew for any number of ranks.
Both go bucket by bucket and entry by entry: beside the whole state that rank 0 is asked for, no
rank holds more than one shard's entry, and of a memory-mapped file each rank reads its part alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import Tensor, nn

from dist.collectives import gather_objects
from dist.shard import Piece, Segment, Shard, State, runs_of

# State by parameter name: what a checkpoint stores.
NamedState = dict[str, dict[str, Any]]

# The float32 of a 16-bit weight, which lies beside the optimizer's own state.
MASTER = "master"


@dataclass
class _Tensor:
    """Stands for a tensor that has a part for each piece of a segment."""

    shape: torch.Size
    dtype: torch.dtype


@dataclass
class _Described:
    """A segment's state without its tensors.

    Attributes:
        num_pieces: of the segment.
        entries: by key a `_Tensor`, or a value that all its pieces share.
    """

    num_pieces: int
    entries: State


def gather_state(
    shards: Sequence[Shard], state: Mapping[Tensor, State], named: Mapping[str, nn.Parameter]
) -> NamedState:
    """Put the full state together on rank 0; every rank must call it.

    Args:
        shards: of this rank.
        state: of the wrapped optimizer.
        named: names of all weights.

    Returns:
        See `ShardedOptimizer.gather_state`.
    """
    names = _names(shards, named)
    described = [
        [_describe(shard, segment, state) for segment in shard.segments] for shard in shards
    ]
    by_rank = gather_objects(described)
    if by_rank is None:
        for shard in shards:
            for segment in shard.segments:
                for tensor in _tensors(shard, segment, state).values():
                    _send(tensor)
        return {}
    gathered: NamedState = {}
    for place, shard in enumerate(shards):
        for owner, of_owner in enumerate(by_rank):
            left = shard.pieces_of(owner)
            for number, description in enumerate(of_owner[place]):
                pieces, left = left[: description.num_pieces], left[description.num_pieces :]
                for key, value in description.entries.items():
                    if isinstance(value, _Tensor) and owner == 0:
                        tensor = _tensors(shard, shard.segments[number], state)[key]
                    elif isinstance(value, _Tensor):
                        tensor = _receive(value, owner, shard.bucket.device)
                    for piece in pieces:
                        name = names[id(shard.bucket.parameters[piece.index])]
                        entries = gathered.setdefault(name, {})
                        if isinstance(value, _Tensor):
                            shard.put_into(entries, key, tensor, pieces, piece)
                        else:
                            entries[key] = value
    return gathered


def load_state(
    shards: Sequence[Shard],
    named: Mapping[str, nn.Parameter],
    state: Mapping[str, Mapping[str, Any]],
    counts_on_device: Sequence[bool],
) -> dict[Tensor, State]:
    """Cut every shard into segments of one history, and take their state.

    Args:
        shards: of this rank.
        named: names of all weights.
        state: whole, by name.
        counts_on_device: by shard, whether counters lie on its device, not on the CPU.

    Returns:
        State of the wrapped optimizer, by the new segments' parameters.

    Raises:
        ValueError: see `ShardedOptimizer.load_state`; nothing has been changed then.
    """
    names = _names(shards, named)
    _check_state(shards, names, state)
    loaded: dict[Tensor, State] = {}
    for shard, on_device in zip(shards, counts_on_device, strict=True):
        shard.take_over_changes()

        def entries_of(piece: Piece, shard: Shard = shard) -> Mapping[str, Any]:
            return state.get(names[id(shard.bucket.parameters[piece.index])], {})

        def history(piece: Piece, shard: Shard = shard) -> list[tuple[str, Any]]:
            return sorted(
                (key, None if shard.has_part_for_each(key, value, piece) else _plain(value))
                for key, value in entries_of(piece, shard).items()
            )

        shard.segments = []
        for run in runs_of(shard.pieces, history):
            segment = shard.new_segment(run)
            shard.segments.append(segment)
            entries: State = {}
            for key, value in entries_of(run[0]).items():
                if shard.has_part_for_each(key, value, run[0]):
                    entries[key] = shard.take_from([entries_of(piece)[key] for piece in run], run)
                elif isinstance(value, Tensor):
                    entries[key] = value.to(shard.bucket.device if on_device else "cpu", copy=True)
                else:
                    entries[key] = value
            master = entries.pop(MASTER, None)
            if master is not None:
                shard.values[segment.start : segment.end].copy_(master.reshape(-1))
            if entries:
                loaded[segment.parameter] = entries
    return loaded


def _names(shards: Sequence[Shard], named: Mapping[str, nn.Parameter]) -> dict[int, str]:
    """Names by the parameters' identity; the same error on every rank where one is missing."""
    names = {id(parameter): name for name, parameter in named.items()}
    for parameter in (p for shard in shards for p in shard.bucket.parameters):
        if id(parameter) not in names:
            raise ValueError(
                f"a parameter of shape {tuple(parameter.shape)} of this optimizer has no name "
                "among those given"
            )
    return names


def _tensors(shard: Shard, segment: Segment, state: Mapping[Tensor, State]) -> dict[str, Tensor]:
    """The entries of a segment's state that have a part for each piece."""
    entries = {
        key: value
        for key, value in state.get(segment.parameter, {}).items()
        if shard.is_elementwise(value, segment)
    }
    if shard.is_half:
        entries[MASTER] = segment.parameter.detach()
    return entries


def _describe(shard: Shard, segment: Segment, state: Mapping[Tensor, State]) -> _Described:
    tensors = _tensors(shard, segment, state)
    entries: State = {}
    for key, value in {**state.get(segment.parameter, {}), **tensors}.items():
        if key in tensors:
            entries[key] = _Tensor(value.shape, value.dtype)
        else:
            # A GPU's tensor would be unpickled on the same GPU number.
            entries[key] = value.cpu() if isinstance(value, Tensor) else value
    return _Described(len(segment.pieces), entries)


def _check_state(
    shards: Sequence[Shard], names: Mapping[int, str], state: Mapping[str, Mapping[str, Any]]
) -> None:
    shapes = {names[id(p)]: p.shape for shard in shards for p in shard.bucket.parameters}
    for name, entries in state.items():
        if name not in shapes:
            raise ValueError(f"state for {name}, which is no parameter of this optimizer")
        for key, value in entries.items():
            # An entry has the weight's shape, or, one a row or a matrix, the beginning of it.
            fits = not isinstance(value, Tensor) or value.shape == shapes[name][: value.dim()]
            if not fits or (isinstance(value, Tensor) and value.dim() > len(shapes[name])):
                raise ValueError(
                    f"{key} of {name} has shape {tuple(value.shape)}, "
                    f"the parameter has {tuple(shapes[name])}"
                )


def _plain(value: Any) -> Any:
    """A value that can be compared."""
    return value.tolist() if isinstance(value, Tensor) else value


def _send(tensor: Tensor) -> None:
    """Send to rank 0; gloo sends from the CPU's memory only."""
    staged = tensor.cpu() if torch_dist.get_backend() == "gloo" else tensor
    torch_dist.send(staged.contiguous(), dst=0)


def _receive(described: _Tensor, owner: int, device: torch.device) -> Tensor:
    where = torch.device("cpu") if torch_dist.get_backend() == "gloo" else device
    tensor = torch.empty(described.shape, dtype=described.dtype, device=where)
    torch_dist.recv(tensor, src=owner)
    return tensor
