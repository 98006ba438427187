"""What a checkpoint holds: everything that the next step depends on, and nothing of how many ranks
wrote it.

Weights, optimizer state by parameter name, the iteration, from which learning rate and data follow,
and every rank's random generators. `collect` puts it together and `restore` takes it apart; the
file itself is checkpoint_file.py's.
"""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from data.tokenizer import fingerprint
from dist.collectives import HALF_PRECISION, gather_objects, rank
from dist.process_group import World, set_random_seed
from dist.sharded_optimizer import ShardedOptimizer
from dist.sharded_state import MASTER, NamedState
from training.checkpoint_file import FORMAT_VERSION, CheckpointError

# Options that the shapes of weights need not show, and that change what the weights mean.
READING = ("num_heads", "num_kv_heads", "qk_norm", "tie_weights", "rope_theta", "norm_eps")
# Options that fix which windows a step trains on.
DATA_ORDER = ("seed", "batch_size", "max_seq_len")


def collect(
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    progress: Mapping[str, Any],
    config: Mapping[str, Any],
    tokenizer_json: str,
) -> dict[str, Any]:
    """Put a checkpoint together on rank 0; every rank must call it.

    Args:
        model: unwrapped.
        optimizer: over its parameters, sharded or not.
        progress: iteration, best_val_loss, skipped_steps and skipped_in_a_row.
        config: all options, flat.
        tokenizer_json: of the data.

    Returns:
        On rank 0 a dict that owns its memory (tensors on the CPU); on the others an empty one.
    """
    optimizer_state = _optimizer_state(optimizer, model)
    rng = gather_objects(_rng_state())
    if rank() != 0:
        return {}
    return {
        "format_version": FORMAT_VERSION,
        "model": _copied(model.state_dict()),
        "optimizer": optimizer_state,
        **progress,
        "config": dict(config),
        "tokenizer": tokenizer_json,
        "scaler": None,  # of float16, which is not offered yet
        "rng": rng,
    }


def restore(
    checkpoint: Mapping[str, Any],
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    world: World,
    seed: int,
) -> None:
    """Take weights, optimizer state and random generators from a checkpoint, on every rank.

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
    if len(checkpoint["rng"]) == world.world_size:
        _set_rng_state(checkpoint["rng"][world.rank])
    else:
        set_random_seed(seed + 1_000_003 * checkpoint["iteration"], world.rank)


def check_tokenizer(checkpoint: Mapping[str, Any], tokenizer_json: str) -> None:
    """Refuse to train on with ids that mean other text.

    Raises:
        CheckpointError: the data folder's tokenizer is not the checkpoint's.
    """
    if fingerprint(checkpoint["tokenizer"]) != fingerprint(tokenizer_json):
        raise CheckpointError(
            "the data folder was prepared with another tokenizer than the checkpoint's: "
            "give the data_dir that it was trained on"
        )


def check_architecture(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse a model that would read the checkpoint's weights in another way.

    Raises:
        CheckpointError: names each such option with both values.
    """
    different = [name for name in READING if before.get(name, now[name]) != now[name]]
    if different:
        said = ", ".join(
            f"{name} is {before[name]} there and {now[name]} here" for name in different
        )
        raise CheckpointError(f"the checkpoint is another model's: {said}")


def check_data_order(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse options by which the steps already done would not be the first ones of this run.

    Raises:
        CheckpointError: names each such option with both values.
    """
    different = [name for name in DATA_ORDER if before[name] != now[name]]
    if (before["epochs"] is None) != (now["epochs"] is None):
        different.append("epochs")
    if different:
        said = ", ".join(f"{name} {before[name]} -> {now[name]}" for name in different)
        raise CheckpointError(
            f"{said}: this would change which text each step trains on, and some would be seen "
            "twice and some never; resume with the checkpoint's own values"
        )


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Options that differ from those of the checkpoint, as `name: old -> new`."""
    return [
        f"{name}: {before.get(name)} -> {value}"
        for name, value in now.items()
        if name not in ("resume", "overwrite") and before.get(name) != value
    ]


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


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy to CPU memory of its own, tied tensors once: they stay tied in the file."""
    copies: dict[tuple[Any, ...], Tensor] = {}
    copied = {}
    for name, tensor in tensors.items():
        place = (tensor.data_ptr(), tensor.shape)
        if place not in copies:
            copies[place] = tensor.detach().to("cpu", copy=True)
        copied[name] = copies[place]
    return copied


def _optimizer_state(optimizer: torch.optim.Optimizer, model: nn.Module) -> NamedState:
    if isinstance(optimizer, ShardedOptimizer):
        return optimizer.gather_state(model.named_parameters())
    if rank() != 0:
        return {}
    return {
        name: {
            key: value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
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
