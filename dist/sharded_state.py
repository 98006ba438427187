"""The state of a sharded optimizer as a checkpoint knows it: by weight, whole, without ranks.

`StateGather` brings it to rank 0 and `load_state` cuts it anew for any number of ranks. Both go
bucket by bucket and entry by entry: a rank never holds more of the whole than one bucket's entry,
and of a memory-mapped file each rank reads its part alone.
"""

from collections.abc import Iterator, Mapping, Sequence
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
# The weight itself, where it is gathered too.
WEIGHT = "weight"


@dataclass(frozen=True)
class TensorKind:
    """Stands for a tensor whose values come later."""

    shape: torch.Size
    dtype: torch.dtype


@dataclass
class _Described:
    """A segment's state without its tensors.

    Attributes:
        num_pieces: of the segment.
        entries: by key a `TensorKind`, or a value that all its pieces share.
    """

    num_pieces: int
    entries: State


class StateGather:
    """The full state on its way to rank 0: described at once, moved when `pieces` is run through.

    What is moved may be a copy that was made in between: then training goes on meanwhile, and
    `pieces` runs in a thread of every rank, over a process group that nothing else uses.

    Args:
        shards: of this rank.
        state: of the wrapped optimizer.
        named: names of all weights.
        with_weights: gather these too, as entries `weight`.

    Attributes:
        tensors: what this rank gives, in the order in which it goes; views of what is in use.
        described: on rank 0, by name and key, a `TensorKind` or the value itself; else empty.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        state: Mapping[Tensor, State],
        named: Mapping[str, nn.Parameter],
        with_weights: bool = False,
    ) -> None:
        self._shards = shards
        self._names = _names(shards, named)
        segments: list[list[_Described]] = []
        self.tensors: list[Tensor] = []
        for shard in shards:
            entries = [_tensors(shard, segment, state, with_weights) for segment in shard.segments]
            segments.append(
                [
                    _describe(segment, state, of_segment)
                    for segment, of_segment in zip(shard.segments, entries, strict=True)
                ]
            )
            for key in sorted({key for of_segment in entries for key in of_segment}):
                self.tensors += [of_segment[key] for of_segment in entries if key in of_segment]
        self._by_rank: list[list[list[_Described]]] | None = gather_objects(segments)
        self.described = self._describe_whole()

    def pieces(
        self, tensors: Sequence[Tensor], group: torch_dist.ProcessGroup | None = None
    ) -> Iterator[tuple[str, str, Tensor]]:
        """Move everything to rank 0, where it comes out weight by weight; every rank must run it.

        Rank 0 has at any moment two ranks' parts of one bucket's entry and one weight.

        Args:
            tensors: `self.tensors`, or copies of them.
            group: over which it goes; None: the default one.

        Yields:
            On rank 0 name, key, and the whole tensor in the weight's shape, on the device that
            tensors are on or the CPU; its memory is not used again, unless it is of `tensors`.
        """
        if self._by_rank is None:
            for tensor in tensors:
                _send(tensor, group)
            return
        parts = self._in_order()
        mine = iter(tensors)
        arriving = [p.receive(group) if p.owner else None for p in parts[:1]]
        unfinished: State = {}
        for number, part in enumerate(parts):
            if number + 1 < len(parts):  # one ahead, so that the next comes while this is used
                following = parts[number + 1]
                arriving.append(following.receive(group) if following.owner else None)
            came = arriving.pop(0)
            tensor = came.wait() if came is not None else next(mine)
            for piece in part.pieces:
                whole = part.shard.whole_of(unfinished, part.key, tensor, part.pieces, piece)
                if whole is not None:
                    yield self._name(part, piece), part.key, whole

    def _in_order(self) -> list["_Part"]:
        """Tensors as all ranks give them: bucket by bucket, entry by entry, rank by rank."""
        assert self._by_rank is not None
        place = {id(shard): number for number, shard in enumerate(self._shards)}
        parts = [part for part in self._parts() if isinstance(part.value, TensorKind)]
        return sorted(parts, key=lambda part: (place[id(part.shard)], part.key, part.owner))

    def _parts(self) -> Iterator["_Part"]:
        for place, shard in enumerate(self._shards):
            for owner, of_rank in enumerate(self._by_rank or ()):
                left = shard.pieces_of(owner)
                for segment in of_rank[place]:
                    pieces, left = left[: segment.num_pieces], left[segment.num_pieces :]
                    for key, value in segment.entries.items():
                        yield _Part(shard, owner, key, value, pieces)

    def _describe_whole(self) -> NamedState:
        whole: NamedState = {}
        for part in self._parts():
            for piece in part.pieces:
                value = part.value
                if isinstance(value, TensorKind):
                    value = TensorKind(part.shard.shape_of_whole(value.shape, piece), value.dtype)
                whole.setdefault(self._name(part, piece), {})[part.key] = value
        return whole

    def _name(self, part: "_Part", piece: Piece) -> str:
        return self._names[id(part.shard.bucket.parameters[piece.index])]


@dataclass
class _Part:
    """One rank's part of one entry of neighbouring weights."""

    shard: Shard
    owner: int
    key: str
    value: Any
    pieces: list[Piece]

    def receive(self, group: torch_dist.ProcessGroup | None) -> "_Arriving":
        """Begin to receive it from its owner; gloo receives into the CPU's memory only."""
        on_cpu = torch_dist.get_backend(group) == "gloo"
        device = torch.device("cpu") if on_cpu else self.shard.bucket.device
        tensor = torch.empty(self.value.shape, dtype=self.value.dtype, device=device)
        # As bytes: gloo refuses some types.
        work = torch_dist.irecv(_bytes(tensor), src=self.owner, group=group)
        assert work is not None
        return _Arriving(tensor, work)


@dataclass
class _Arriving:
    """A tensor that is being received."""

    tensor: Tensor
    work: torch_dist.Work

    def wait(self) -> Tensor:
        """The tensor, when it is there."""
        self.work.wait()
        return self.tensor


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


def _tensors(
    shard: Shard, segment: Segment, state: Mapping[Tensor, State], with_weights: bool
) -> dict[str, Tensor]:
    """The entries of a segment's state that have a part for each piece."""
    entries = {
        key: value
        for key, value in state.get(segment.parameter, {}).items()
        if shard.is_elementwise(value, segment)
    }
    if shard.is_half:
        entries[MASTER] = segment.parameter.detach()
    if with_weights:
        entries[WEIGHT] = shard.weights_of(segment)
    return entries


def _describe(
    segment: Segment, state: Mapping[Tensor, State], tensors: Mapping[str, Tensor]
) -> _Described:
    entries: State = {}
    for key, value in {**state.get(segment.parameter, {}), **tensors}.items():
        if key in tensors:
            entries[key] = TensorKind(value.shape, value.dtype)
        else:
            # A copy, and not a GPU's: it would be unpickled on the same GPU number.
            entries[key] = value.to("cpu", copy=True) if isinstance(value, Tensor) else value
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


def _send(tensor: Tensor, group: torch_dist.ProcessGroup | None) -> None:
    """Send to rank 0; gloo sends from the CPU's memory only."""
    staged = tensor.cpu() if torch_dist.get_backend(group) == "gloo" else tensor
    torch_dist.send(_bytes(staged.contiguous()), dst=0, group=group)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
