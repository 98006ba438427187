"""What a run takes of one process's memory, reckoned before it starts.

Weights, gradients, optimizer state and buckets follow from the layout that DDP and ShardedOptimizer
choose, and are laid out here by the same functions; what a step holds beside them is rehearsed
(live_memory.py). Tensors are counted and nothing else: not the libraries' own memory (on a GPU the
CUDA context and NCCL's channels), not what the allocator holds and cannot use.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dist.bucket import Bucket, make_buckets
from dist.collectives import HALF_PRECISION
from dist.ddp import MB, MOST_UNDER_WAY
from dist.nccl_collectives import NCCLCollectives
from dist.shard_layout import BUCKET_BYTES
from dist.shared_memory_collectives import SharedMemoryCollectives
from model.transformer import Transformer
from training.config import Config
from training.live_memory import fake_tensors, rehearse_step, rehearse_update
from training.parts import adapted, is_sharded, optimizer_recipe

# As DDP's default.
FIRST_BUCKET_MB = 1.0
# As the collectives choose it: between CPU processes of one host, and between GPUs.
BUCKET_CAP_MB = {
    "cpu": SharedMemoryCollectives.bucket_cap_mb,
    "cuda": NCCLCollectives.bucket_cap_mb,
}


@dataclass(frozen=True)
class Memory:
    """Bytes on the device of rank 0, which no other rank's exceed."""

    weights: int
    """With buffers, such as the rotary angles."""
    gradients: int
    """As the optimizer gets them: whole, or this rank's shards in float32."""
    buckets: int
    """Full gradients on their way into shards, and narrower copies that travel for them."""
    optimizer_state: int
    """Moments, momentum, and float32 masters of 16-bit weights."""
    activations: int
    """Held when backward begins, with the 16-bit copies of weights that autocast makes, and the
    gradients that the loss has made already."""
    logits: int
    """Of some tokens at a time, with their gradient."""
    backward_peak: int
    """The most during forward and backward, everything included."""
    update_peak: int
    """The most during the optimizer's step, everything included."""
    save_copy: int
    """What is copied when a checkpoint is written beside the training; in the CPU's memory."""

    @property
    def peak(self) -> int:
        """The most at any time, without the save's copy."""
        return max(self.backward_peak, self.update_peak)


def estimate(config: Config, world_size: int, device_type: str) -> Memory:
    """What each of `world_size` processes will hold.

    Args:
        config: complete, as after `with_dtype` and `ModelConfig.resolve`.
        world_size: processes; between CPUs they are taken to be on one host.
        device_type: cpu or cuda.
    """
    with fake_tensors():
        return _Reckoning(config, world_size, device_type).memory()


@dataclass(frozen=True)
class _Laid:
    """A group's parameters, as the optimizer around or without shards lays them out."""

    buckets: list[Bucket]
    whole_matrices: bool

    def segments(self, world_size: int) -> list[nn.Parameter]:
        """What the wrapped optimizer gets on rank 0, with gradients."""
        made = []
        for bucket in self.buckets:
            pieces = bucket.pieces(0, world_size)
            if not pieces:
                continue
            dtype = torch.float32 if bucket.dtype in HALF_PRECISION else bucket.dtype
            matrix = bucket.parameters[0].shape if self.whole_matrices else ()
            length = sum(last - first for _, first, last in pieces)
            values = torch.empty(length, dtype=dtype)
            made.append(_with_gradient(values.view(-1, *matrix) if matrix else values))
        return made


class _Reckoning:
    """The parts of an estimate."""

    def __init__(self, config: Config, world_size: int, device_type: str) -> None:
        self._config = config
        self._world_size = world_size
        self._device_type = device_type
        self._model = adapted(Transformer(config.model), config)
        self._order = {id(p): place for place, p in enumerate(self._model.parameters())}
        self._is_sharded = is_sharded(config, has_others=world_size > 1)
        self._optimizer_class, self._groups, self._kwargs = optimizer_recipe(config, self._model)
        self._is_half = config.device.param_dtype != "float32"

    def memory(self) -> Memory:
        laid = self._lay_out()
        buckets = [bucket for group in laid for bucket in group.buckets]
        weights = sum(parameter.nbytes for parameter in self._model.parameters())
        buffers = sum(buffer.nbytes for buffer in self._model.buffers())
        state, passing, masters, own_weights = self._optimizer(laid, weights)
        gradients, on_their_way = self._gradients(buckets, weights)
        if self._is_sharded:  # flat buffers, padded
            weights = sum(bucket.nbytes for bucket in buckets)
        step = rehearse_step(
            self._model,
            self._config.micro_batch_size(self._world_size),
            getattr(torch, self._config.device.dtype),
            self._device_type,
            self._config.data.gradient_accumulation_steps,
            keeps_gradients=self._world_size == 1,
        )
        kept = weights + buffers + state + masters
        # Alone, each gradient comes while activations go; with others its place is there before.
        placed = gradients if self._world_size > 1 else gradients - self._whole_gradients()
        return Memory(
            weights=weights + buffers,
            gradients=gradients,
            buckets=on_their_way,
            optimizer_state=state + masters,
            activations=step.held,
            logits=step.logits,
            backward_peak=kept + placed + on_their_way + step.peak,
            update_peak=kept + gradients + on_their_way + passing,
            save_copy=own_weights + state + masters if self._config.run.async_checkpoint else 0,
        )

    def _whole_gradients(self) -> int:
        return sum(parameter.nbytes for parameter in self._model.parameters())

    def _lay_out(self) -> list[_Laid]:
        """Every group's buckets, as `ShardedOptimizer` makes them; DDP's own where it does not."""
        if not self._is_sharded:
            return [_Laid(self._make_buckets(list(self._model.parameters()), False), False)]
        laid = []
        for group in self._groups:
            whole_matrices = bool(group.get("whole_matrices", False))
            laid.append(_Laid(self._make_buckets(group["params"], whole_matrices), whole_matrices))
        return laid

    def _make_buckets(self, parameters: list[nn.Parameter], whole_matrices: bool) -> list[Bucket]:
        in_order = sorted(parameters, key=lambda parameter: self._order[id(parameter)])
        if self._world_size == 1:
            return make_buckets(parameters, BUCKET_BYTES, 1, None, whole_matrices)
        cap = self._config.device.bucket_cap_mb or BUCKET_CAP_MB[self._device_type]
        first = min(FIRST_BUCKET_MB, cap)
        return make_buckets(in_order, cap * MB, self._world_size, first * MB, whole_matrices)

    def _optimizer(self, laid: Sequence[_Laid], weights: int) -> tuple[int, int, int, int]:
        """Bytes of: state, what an update takes for a moment, masters, this rank's weights."""
        if not self._is_sharded:
            groups = [
                {**group, "params": [_with_gradient(p.detach()) for p in group["params"]]}
                for group in self._groups
            ]
            return (*self._update(groups), 0, weights)
        segments = [group.segments(self._world_size) for group in laid]
        groups = [
            {**group, "params": parameters}
            for group, parameters in zip(self._groups, segments, strict=True)
        ]
        state, passing = self._update(groups)
        buckets = [bucket for group in laid for bucket in group.buckets]
        lengths = [bucket.padded_numel // self._world_size for bucket in buckets]
        elements = sum(parameter.numel() for group in segments for parameter in group)
        own_weights = elements * buckets[0].dtype.itemsize
        if not self._is_half:
            return state, passing, 0, own_weights
        # In Shard.take_over_changes: rounded masters, where weights differ, and weights widened.
        comparing = (2 + 1 + 4) * max(lengths)
        return state, max(passing, comparing), 4 * sum(lengths), own_weights

    def _update(self, groups: list[dict[str, Any]]) -> tuple[int, int]:
        return rehearse_update(self._optimizer_class(groups, **self._kwargs))

    def _gradients(self, buckets: Sequence[Bucket], weights: int) -> tuple[int, int]:
        """Bytes of the optimizer's gradients, and of those on their way to it."""
        if self._world_size == 1:
            # Beside the weights' own, ShardedOptimizer widens 16-bit ones into memory it keeps.
            return weights + 4 * sum(b.padded_numel for b in buckets) * self._is_sharded, 0
        wire = getattr(torch, self._config.device.gradient_dtype).itemsize
        narrowed = [b.padded_numel * wire if wire < b.dtype.itemsize else 0 for b in buckets]
        if not self._is_sharded:
            return sum(bucket.nbytes for bucket in buckets), sum(narrowed)
        shards = sum(4 * b.padded_numel // self._world_size for b in buckets)
        return shards, self._most_on_their_way(buckets, narrowed)

    def _most_on_their_way(self, buckets: Sequence[Bucket], narrowed: Sequence[int]) -> int:
        """Bytes of buffers that a step of scattered buckets borrows; what is borrowed is kept.

        The way through a step is that of dist/ddp.py and dist/reducer.py: a buffer is borrowed for
        a bucket's first gradient, buckets are sent in one order, and only so much is under way.
        """
        pool = _Pool()
        places = {id(p): number for number, b in enumerate(buckets) for p in b.parameters}
        first = [min(self._order[id(p)] for p in bucket.parameters) for bucket in buckets]
        queue = sorted(range(len(buckets)), key=lambda number: -first[number])
        received = 0
        for _ in range(2):  # in the second step the pool is as it will stay
            missing = [len(bucket.parameters) for bucket in buckets]
            if self._config.data.gradient_accumulation_steps > 1:
                for number, bucket in enumerate(buckets):
                    pool.lend(number, bucket.nbytes)
            under_way: list[int] = []
            to_send = list(queue)
            for parameter in reversed(list(self._model.parameters())):  # as backward goes, about
                number = places[id(parameter)]
                pool.lend(number, buckets[number].nbytes)
                missing[number] -= 1
                while to_send and not missing[to_send[0]]:
                    sent = to_send.pop(0)
                    if narrowed[sent]:
                        pool.lend(-1 - sent, narrowed[sent])
                        pool.take_back(sent)
                    under_way.append(sent)
                    while len(under_way) > 1 and self._bytes(buckets, under_way) > MOST_UNDER_WAY:
                        self._arrived(pool, under_way.pop(0))
                    received = max(received, self._received(buckets, narrowed, under_way))
            for number in under_way:
                self._arrived(pool, number)
        return pool.nbytes + received

    def _bytes(self, buckets: Sequence[Bucket], under_way: Sequence[int]) -> int:
        return sum(buckets[number].nbytes for number in under_way)

    def _received(
        self, buckets: Sequence[Bucket], narrowed: Sequence[int], under_way: Sequence[int]
    ) -> int:
        """What NCCL's way of adding up 16-bit gradients receives into."""
        if self._device_type == "cpu":
            return 0
        return sum(
            narrowed[n] or buckets[n].nbytes * (buckets[n].dtype in HALF_PRECISION)
            for n in under_way
        )

    def _arrived(self, pool: "_Pool", number: int) -> None:
        pool.take_back(number)
        pool.take_back(-1 - number)


class _Pool:
    """Buffers as `BufferPool` lends them, in sizes alone."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._free: list[int] = []
        self._lent: dict[int, int] = {}

    def lend(self, key: int, nbytes: int) -> None:
        """Lend a buffer, unless `key` has one."""
        if key in self._lent:
            return
        fitting = [size for size in self._free if nbytes <= size <= 2 * nbytes]
        if fitting:
            self._free.remove(fitting[0])
        else:
            self.nbytes += nbytes
        self._lent[key] = fitting[0] if fitting else nbytes

    def take_back(self, key: int) -> None:
        """Take back what `key` has, if anything."""
        if key in self._lent:
            self._free.append(self._lent.pop(key))


def _with_gradient(values: Tensor) -> nn.Parameter:
    parameter = nn.Parameter(values)
    parameter.grad = torch.empty_like(values)
    return parameter
