"""This rank's part of one bucket of weights, as the wrapped optimizer sees it.

The part is one flat tensor. The optimizer gets it as one long parameter, whatever number of weights
lie in it, and one kernel updates them all. That is right as long as all of them have the same
history: a weight that had no gradient in some step was left alone then, and its count of steps is
another's from there on. So the part is cut into *segments*, runs of weights with one history:
one at first, more from the moment on when some weights have a gradient and others have none.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dist.bucket import Bucket
from dist.collectives import HALF_PRECISION, rank, world_size
from dist.reducer import Reducer

State = dict[str, Any]

# Entries of torch's optimizers that a weight has one of, whatever its shape. (In the state of a
# weight without dimensions they cannot be told by it.)
COUNTERS = ("step", "mu_product", "eta", "mu")


@dataclass
class Piece:
    """Elements first..last of one weight; they lie at start..end of this rank's shard."""

    index: int  # of the weight in its bucket
    first: int
    last: int
    start: int
    end: int


@dataclass
class Segment:
    """Pieces with one history, and what the wrapped optimizer takes for its parameter."""

    pieces: list[Piece]
    parameter: nn.Parameter

    @property
    def start(self) -> int:
        """First element in the shard."""
        return self.pieces[0].start

    @property
    def end(self) -> int:
        """One past the last element in the shard."""
        return self.pieces[-1].end


class Shard:
    """One bucket's weights in a flat buffer, and this rank's share of them.

    Args:
        bucket: the layout; its parameters' memory moves into `buffer`.
        buffer: (padded_numel,).
        whole_matrices: segments have the shape (count, rows, columns) instead of (numel,).
        reducer: hands over this rank's shard of the gradients; None: each weight has its own.

    Attributes:
        values: what the optimizer updates: this rank's shard of the buffer; where weights have 16
            bits, a float32 copy of it, in which small updates are not lost.
    """

    def __init__(
        self, bucket: Bucket, buffer: Tensor, whole_matrices: bool, reducer: Reducer | None
    ) -> None:
        self.bucket = bucket
        self.buffer = buffer
        self.reducer = reducer
        self._matrix = tuple(bucket.parameters[0].shape) if whole_matrices else None
        buffer[bucket.numel :].zero_()
        with torch.no_grad():
            for weight, view in zip(bucket.parameters, bucket.views(buffer), strict=True):
                view.copy_(weight)
                weight.data = view
        self._addresses = [weight.data_ptr() for weight in bucket.parameters]
        start, end = bucket.shard(rank(), world_size())
        self._weights = buffer[start:end]
        self.is_half = bucket.dtype in HALF_PRECISION
        self.values = self._weights.float() if self.is_half else self._weights
        self._gradient: Tensor | None = None
        self.pieces = self.pieces_of(rank())
        self.segments = [self.new_segment(self.pieces)] if self.pieces else []

    def pieces_of(self, owner: int) -> list[Piece]:
        """The pieces of some rank's shard of this bucket."""
        pieces: list[Piece] = []
        for index, first, last in self.bucket.pieces(owner, world_size()):
            start = pieces[-1].end if pieces else 0
            pieces.append(Piece(index, first, last, start, start + last - first))
        return pieces

    def new_segment(self, pieces: list[Piece]) -> Segment:
        """A segment of neighbouring pieces."""
        values = self.values[pieces[0].start : pieces[-1].end]
        return Segment(pieces, nn.Parameter(self._shaped(values)))

    def is_updated(self) -> bool:
        """Whether the next step may change a weight here; alike on all ranks."""
        if self.reducer is not None:
            return any(self.reducer.used)
        return any(w.requires_grad or w.grad is not None for w in self.bucket.parameters)

    def take_gradients(self) -> None:
        """Let every segment's `grad` be its part of the gradients, or None."""
        gradient = self._flat_gradient()
        for segment in self.segments:
            if gradient is None or not self._has_gradient(segment.pieces[0]):
                segment.parameter.grad = None
            else:
                part = gradient[segment.start : segment.end]
                segment.parameter.grad = self._shaped(part)

    def drop_gradients(self) -> None:
        """Let go of the gradients."""
        for segment in self.segments:
            segment.parameter.grad = None

    def split(self, state: dict[Tensor, State]) -> bool:
        """Part segments some of whose pieces have a gradient and others have none.

        Args:
            state: of the wrapped optimizer; is split along.

        Returns:
            Whether there was such a segment.
        """
        parted = [part for segment in self.segments for part in self._split(segment, state)]
        if len(parted) == len(self.segments):
            return False
        self.segments = parted
        return True

    def write_back(self) -> None:
        """Round what the optimizer updated to the weights' type, if that is another."""
        if self.is_half:
            self._weights.copy_(self.values)

    def take_over_changes(self) -> None:
        """Let masters follow 16-bit weights that were set from outside: loaded, say, or clamped."""
        if self.is_half:
            rounded = self.values.to(self.bucket.dtype)
            is_changed = (rounded != self._weights) & ~(rounded.isnan() & self._weights.isnan())
            torch.where(is_changed, self._weights.float(), self.values, out=self.values)

    def check_that_weights_are_here(self) -> None:
        """What is updated is the buffer; a weight that lies elsewhere would never change again.

        Raises:
            RuntimeError: a weight has been given other memory.
        """
        for weight, address in zip(self.bucket.parameters, self._addresses, strict=True):
            if weight.data_ptr() != address:
                raise RuntimeError(
                    f"a parameter of shape {tuple(weight.shape)} has other memory than the "
                    "ShardedOptimizer gave it (by .data =, .to() or load_state_dict(assign=True)): "
                    "do that before building the optimizer, or change values in place"
                )

    def check_that_gradients_are_averaged(self) -> None:
        """With our DDP they are shards after a sync; what is in `grad` was never part of one.

        Raises:
            RuntimeError: a weight has a gradient of its own.
        """
        if self.reducer is not None and any(w.grad is not None for w in self.bucket.parameters):
            raise RuntimeError(
                "gradients that were never averaged, of a backward under no_sync() or set by hand: "
                "call finish_gradient_sync() before clipping and before step()"
            )

    def is_elementwise(self, value: Any, segment: Segment) -> bool:
        """Whether an entry of a segment's state has a part for each of its pieces."""
        if not isinstance(value, Tensor) or value.dim() == 0:
            return False
        if self._matrix is not None:
            return value.shape[0] == len(segment.pieces)
        return value.shape == segment.parameter.shape

    def part_of(self, value: Tensor, pieces: Sequence[Piece], part: Sequence[Piece]) -> Tensor:
        """What belongs to some neighbours among the pieces that an elementwise entry is of."""
        if self._matrix is not None:
            first = pieces.index(part[0])
            return value[first : first + len(part)]
        return value[part[0].start - pieces[0].start : part[-1].end - pieces[0].start]

    def weights_of(self, segment: Segment) -> Tensor:
        """This rank's weights of a segment, of the weights' own type."""
        return self._shaped(self._weights[segment.start : segment.end])

    def shape_of_whole(self, shape: torch.Size, piece: Piece) -> torch.Size:
        """Shape of a weight's entry, of which segments have one of this shape."""
        return shape[1:] if self._matrix is not None else self.bucket.parameters[piece.index].shape

    def whole_of(
        self, unfinished: State, key: str, value: Tensor, pieces: Sequence[Piece], piece: Piece
    ) -> Tensor | None:
        """One weight's whole entry, once its last piece is there.

        Args:
            unfinished: by key, of the weight whose pieces came so far; kept up to date.
            key: of the entry.
            value: the elementwise entry of `pieces`.
            pieces: neighbours on one rank; ranks follow each other in order.
            piece: one of them.
        """
        part = self.part_of(value, pieces, [piece])
        if self._matrix is not None:
            return part[0]
        weight = self.bucket.parameters[piece.index]
        if len(part) == weight.numel():
            return part.view(weight.shape)
        if piece.first == 0:
            unfinished[key] = torch.empty(weight.shape, dtype=value.dtype, device=value.device)
        unfinished[key].view(-1)[piece.first : piece.last] = part
        return unfinished.pop(key) if piece.last == weight.numel() else None

    def take_from(self, whole: Sequence[Tensor], pieces: Sequence[Piece]) -> Tensor:
        """The elementwise entry of some neighbouring pieces, out of those of whole weights."""
        if self._matrix is not None:
            return torch.stack([tensor.to(self.bucket.device) for tensor in whole])
        length = pieces[-1].end - pieces[0].start
        entry = torch.empty(length, dtype=whole[0].dtype, device=self.bucket.device)
        for tensor, piece in zip(whole, pieces, strict=True):
            start = piece.start - pieces[0].start
            part = tensor.reshape(-1)[piece.first : piece.last]
            entry[start : start + len(part)].copy_(part)
        return entry

    def has_part_for_each(self, key: str, whole: Any, piece: Piece) -> bool:
        """Whether a whole weight's entry is elementwise; a counter is not, whatever its shape."""
        if not isinstance(whole, Tensor) or key in COUNTERS:
            return False
        if self._matrix is not None:
            return True  # one number a matrix has no dimensions, and is of the matrix nevertheless
        return whole.shape == self.bucket.parameters[piece.index].shape

    def _split(self, segment: Segment, state: dict[Tensor, State]) -> list[Segment]:
        runs = runs_of(segment.pieces, self._has_gradient)
        if len(runs) == 1:
            return [segment]
        whole = state.pop(segment.parameter, None)
        parts = []
        for run in runs:
            part = self.new_segment(run)
            parts.append(part)
            if whole is not None:
                state[part.parameter] = {
                    key: self.part_of(value, segment.pieces, run)
                    if self.is_elementwise(value, segment)
                    else copy.deepcopy(value)
                    for key, value in whole.items()
                }
        return parts

    def _has_gradient(self, piece: Piece) -> bool:
        if self.reducer is not None:
            return self.reducer.used[piece.index]
        return self.bucket.parameters[piece.index].grad is not None

    def _flat_gradient(self) -> Tensor | None:
        if self.reducer is not None:
            return self.reducer.shard
        if not any(self._has_gradient(piece) for piece in self.pieces):
            return None
        if self._gradient is None:
            self._gradient = torch.empty_like(self.values)
        for piece in self.pieces:
            gradient = self.bucket.parameters[piece.index].grad
            if gradient is not None:
                part = gradient.reshape(-1)[piece.first : piece.last]
                self._gradient[piece.start : piece.end].copy_(part)
        return self._gradient

    def _shaped(self, values: Tensor) -> Tensor:
        return values if self._matrix is None else values.view(-1, *self._matrix)


def runs_of(pieces: Sequence[Piece], key: Callable[[Piece], Any]) -> list[list[Piece]]:
    """Cut a list of pieces where `key` changes."""
    runs: list[list[Piece]] = []
    last: Any = None
    for piece in pieces:
        value = key(piece)
        if not runs or value != last:
            runs.append([])
        runs[-1].append(piece)
        last = value
    return runs
