"""What would train something else without a word, if nobody refused it."""

import weakref
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import register_optimizer_step_pre_hook


class Syncing(Protocol):
    """What averages gradients."""

    def is_syncing(self) -> bool:
        """Whether it is on its way to do so."""

    def has_place_for(self, parameter: Tensor) -> bool:
        """Whether it is this parameter's that it averages."""


def forbid_steps_during_a_sync(ddp: Syncing) -> None:
    """Let every optimizer that is asked to step with half-averaged gradients say so."""
    this = weakref.ref(ddp)

    def check(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        ddp = this()
        if ddp is not None and ddp.is_syncing():
            for group in optimizer.param_groups:
                if any(ddp.has_place_for(parameter) for parameter in group["params"]):
                    raise RuntimeError(
                        "optimizer.step() before finish_gradient_sync(): "
                        "the gradients are not averaged yet"
                    )

    weakref.finalize(ddp, register_optimizer_step_pre_hook(check).remove)


def check_that_gradients_are_dense(module: nn.Module) -> None:
    """Refuse layers whose gradients have no place in a flat buffer.

    Raises:
        ValueError: they are sparse, or of a shape that is not known yet; names the layer.
    """
    for name, layer in module.named_modules():
        if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.sparse:
            raise ValueError(f"{name or 'the module'} has sparse gradients: use sparse=False")
    for name, parameter in module.named_parameters():
        if is_lazy(parameter):
            raise ValueError(f"parameter {name} has no shape yet: run a forward before wrapping")
