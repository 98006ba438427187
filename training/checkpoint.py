"""What a checkpoint holds: everything that the next step depends on, and nothing of how many ranks
wrote it.

Weights, optimizer state by parameter name, the iteration, from which learning rate and data follow,
and every rank's random generators. `collect` puts it together and `restore` takes it apart; the
file itself is checkpoint_file.py's.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as torch_dist
from torch import Tensor, nn

from dist.collectives import HALF_PRECISION, gather_objects, rank
from dist.grad_scaler import GradScaler
from dist.process_group import World, set_random_seed
from dist.sharded_optimizer import ShardedOptimizer
from dist.sharded_state import MASTER, WEIGHT, NamedState, StateGather, TensorKind
from training.archive import Record
from training.checkpoint_file import FORMAT_VERSION, CheckpointError


class Collected:
    """A checkpoint as of one step, not yet written: its content, and this rank's part of it.

    Attributes:
        content: on rank 0 the checkpoint, with a `Record` for each tensor of weights and optimizer
            state; on other ranks empty.
        tensors: this rank's part of those tensors; they are in use and change with the next step.
    """

    def __init__(
        self,
        content: Mapping[str, Any],
        gather: StateGather | None,
        records: Mapping[tuple[str, str], Record],
        own: Sequence[tuple[Record, Tensor]],
    ) -> None:
        self.content = content
        self._gather = gather
        self._records = records
        self._own = [record for record, _ in own]
        self.tensors = [*(gather.tensors if gather is not None else ()), *(t for _, t in own)]

    def pieces(
        self, tensors: Sequence[Tensor], group: torch_dist.ProcessGroup | None
    ) -> Iterator[tuple[Record, Tensor]]:
        """Bring all tensors to rank 0, one at a time; every rank must run it to its end.

        Args:
            tensors: `self.tensors`, or copies of them.
            group: over which they go; None: the default one.
        """
        count = len(tensors) - len(self._own)
        if self._gather is not None:
            for name, key, tensor in self._gather.pieces(tensors[:count], group):
                yield self._records[name, key], tensor
        yield from zip(self._own, tensors[count:], strict=True)


def collect(
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: GradScaler | None = None,
    progress: Mapping[str, Any],
    config: Mapping[str, Any],
    tokenizer_json: str,
    data_fingerprint: str,
    in_shards: bool = False,
) -> Collected:
    """Say what a checkpoint of this step consists of; every rank must call it.

    Args:
        model: unwrapped.
        optimizer: over its parameters, sharded or not.
        scaler: of the loss; one that is not enabled is none.
        progress: what says how far the run is: iteration, samples, best_val_loss, ...
        config: all options, flat.
        tokenizer_json: of the data.
        data_fingerprint: of the data.
        in_shards: of weights, too, each rank gives its shard, as far as the optimizer has shards:
            less to be copied than rank 0's whole ones.
    """
    gather = None
    if isinstance(optimizer, ShardedOptimizer):
        gather = optimizer.begin_gather_state(model.named_parameters(), with_weights=in_shards)
    rng = gather_objects(_rng_state())
    if rank() != 0:
        return Collected({}, gather, {}, ())
    records: dict[tuple[str, str], Record] = {}
    own: list[tuple[Record, Tensor]] = []
    if gather is not None:
        state = gather.described
        for name, entries in state.items():
            for key, value in entries.items():
                if isinstance(value, TensorKind):
                    entries[key] = records[name, key] = Record(value.shape, value.dtype)
    else:
        state = _own_state(optimizer, model, own)
    return Collected(
        {
            "format_version": FORMAT_VERSION,
            "model": _weights(model, records, own),
            "optimizer": {
                name: {key: value for key, value in entries.items() if key != WEIGHT}
                for name, entries in state.items()
                if entries.keys() - {WEIGHT}
            },
            **progress,
            "config": dict(config),
            "tokenizer": tokenizer_json,
            "data_fingerprint": data_fingerprint,
            "scaler": scaler.state_dict() or None if scaler is not None else None,
            "rng": rng,
        },
        gather,
        records,
        own,
    )


def restore(
    checkpoint: Mapping[str, Any],
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: GradScaler | None = None,
    world: World,
    seed: int,
) -> None:
    """Take weights, optimizer state, scale and random generators from a checkpoint, on every rank.

    At the world size that wrote it, each rank's generators go on where they were. At another
    there is no such place, and they start from a seed that this iteration alone has.

    Raises:
        CheckpointError: the checkpoint is another model's; names the first difference.
    """
    load_weights(checkpoint, model)
    named = list(model.named_parameters())
    state = checkpoint["optimizer"]
    if unknown := sorted(state.keys() - dict(named).keys()):
        raise CheckpointError(f"the checkpoint has optimizer state for {unknown[0]}, not here")
    if isinstance(optimizer, ShardedOptimizer):
        optimizer.load_state(named, _with_masters(state, checkpoint["model"], model))
    else:
        for name, parameter in named:
            if name in state:
                optimizer.state[parameter] = {
                    key: _placed(key, value, parameter)
                    for key, value in state[name].items()
                    if key != MASTER
                }
    with torch.no_grad():
        for name, parameter in named:  # a weight that was of 16 bits, and is not any more
            if MASTER in state.get(name, {}) and parameter.dtype == torch.float32:
                parameter.copy_(state[name][MASTER])
    if scaler is not None and checkpoint.get("scaler") is not None:
        scaler.load_state_dict(checkpoint["scaler"])
    if len(checkpoint["rng"]) == world.world_size:
        _set_rng_state(checkpoint["rng"][world.rank])
    else:
        set_random_seed(seed + 1_000_003 * checkpoint["iteration"], world.rank)


def load_weights(checkpoint: Mapping[str, Any], model: nn.Module) -> None:
    """Copy a checkpoint's weights into a model of the same shape.

    Raises:
        CheckpointError: names the first parameter that differs.
    """
    held, wanted = checkpoint["model"], model.state_dict()
    for name in [*wanted, *held]:
        ours, theirs = (
            tuple(tensors[name].shape) if name in tensors else "nothing"
            for tensors in (wanted, held)
        )
        if ours != theirs:
            raise CheckpointError(
                f"the checkpoint is another model's: {name} is {theirs} there and {ours} here"
            )
    model.load_state_dict(held)


def _weights(
    model: nn.Module,
    gathered: Mapping[tuple[str, str], Record],
    own: list[tuple[Record, Tensor]],
) -> dict[str, Record]:
    """A record for each entry of the model's state; tied ones have one, and stay tied in the file.

    Args:
        model: unwrapped.
        gathered: records of the weights that the optimizer gathers.
        own: records with their tensors; those of all other entries are added.
    """
    by_place: dict[tuple[Any, ...], Record] = {
        _place(parameter): gathered[name, WEIGHT]
        for name, parameter in model.named_parameters()
        if (name, WEIGHT) in gathered
    }
    records = {}
    for name, tensor in model.state_dict().items():
        record = by_place.get(_place(tensor)) if tensor.numel() else None
        if record is None:
            record = by_place[_place(tensor)] = _own_record(tensor, own)
        records[name] = record
    return records


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.dtype


def _own_record(tensor: Tensor, own: list[tuple[Record, Tensor]]) -> Record:
    record = Record(tensor.shape, tensor.dtype)
    own.append((record, tensor.detach()))
    return record


def _own_state(
    optimizer: torch.optim.Optimizer, model: nn.Module, own: list[tuple[Record, Tensor]]
) -> NamedState:
    """State of an optimizer that is whole on every rank, by name, a record for each tensor."""
    return {
        name: {
            key: _own_record(value, own) if isinstance(value, Tensor) else value
            for key, value in optimizer.state[parameter].items()
        }
        for name, parameter in model.named_parameters()
        if parameter in optimizer.state
    }


def _with_masters(
    state: NamedState, weights: Mapping[str, Tensor], model: nn.Module
) -> Mapping[str, Mapping[str, Any]]:
    """The state, with a master for each 16-bit weight, and none for others.

    Where a weight was float32 in the checkpoint, that is its master.
    """
    changed: NamedState = {}
    for name, parameter in model.named_parameters():
        entries = {key: value for key, value in state.get(name, {}).items() if key != MASTER}
        if parameter.dtype in HALF_PRECISION:
            entries[MASTER] = state.get(name, {}).get(MASTER, weights[name])
        if entries:
            changed[name] = entries
    return changed


def _placed(key: str, value: Any, parameter: nn.Parameter) -> Any:
    """A state entry beside its parameter; counters stay on the CPU, as torch.optim keeps them."""
    if not isinstance(value, Tensor):
        return value
    return value.clone() if key == "step" else value.to(parameter.device, copy=True)


def _rng_state() -> dict[str, Any]:
    _, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    version, internal, gauss_next = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
        "numpy": [torch.from_numpy(np.array(keys, dtype=np.int64)), position, has_gauss, cached],
        "python": [version, list(internal), gauss_next],
    }


def _set_rng_state(state: Mapping[str, Any]) -> None:
    torch.set_rng_state(state["torch"].clone())
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].clone())
    keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state(("MT19937", keys.numpy().astype(np.uint32), position, has_gauss, cached))
    version, internal, gauss_next = state["python"]
    random.setstate((version, tuple(internal), gauss_next))
