"""Muon: momentum whose every matrix is made orthogonal before it moves the weights.

A gradient of a weight matrix is dominated by few directions, and a step along it hardly moves the
rest. Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/) replaces the momentum by
the nearest matrix with all singular values about 1, so that each direction learns equally fast.
Newton-Schulz iterations do that with matrix products alone, which hardware likes best.

It is for the matrices inside a network. Embeddings, the head and gains are AdamW's, and groups of
both kinds stand in one optimizer.

The step of a (rows, columns) matrix is scaled by sqrt(max(1, rows / columns)): then the change of a
layer's output keeps its size whatever the width is, and with it the best learning rate (Bernstein &
Newhouse 2024, arXiv:2409.20325; about 0.02 from GPT-2 124M to 1.5B in Jordan's runs).
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from optim.adamw import HALF_PRECISION, AdamW

# Of the polynomials a x + b x^3 + c x^5 that one after the other take singular values to 1: each is
# the best for what the one before it leaves of [0.001, 1] (Amsel et al. 2025, arXiv:2505.16932).
# After four of them a value is within 0.44 and 1.56, after five within 0.88 and 1.12; Jordan's one
# polynomial, five times, leaves 0.47 to 1.20.
BEST_POLYNOMIALS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845749493, 0.4188073119525673),
)
# Each is made for values a little larger than there should be. Beyond its interval a polynomial
# rises steeply: without the margin the rounding of bfloat16 ended with values of 2.2.
MARGIN = 1.01
COEFFICIENTS = tuple((a / MARGIN, b / MARGIN**3, c / MARGIN**5) for a, b, c in BEST_POLYNOMIALS)
EPS = 1e-7


class Muon(AdamW):
    """Muon for groups with `whole_matrices`, AdamW for the others.

    With gradient g, for each matrix p of rows x columns, and Nesterov's momentum:

        b <- momentum b + (1 - momentum) g
        p <- p (1 - lr weight_decay)
        p <- p - lr sqrt(max(1, rows / columns)) orthogonal((1 - momentum) g + momentum b)

    The state of such a parameter is `momentum_buffer` (b), float32 for 16-bit parameters. A
    parameter is one matrix, or a stack of them, (count, rows, columns), as ShardedOptimizer gives
    them; matrices of one shape go through each product together.

    Args:
        params: dicts of `params` with options of their own, as in torch. `whole_matrices: True`
            makes a group Muon's; it may have a `momentum` of its own, and `row_blocks`, where a
            matrix is several maps one below the other: their numbers of rows. Each then is made
            orthogonal by itself.
        lr: learning rate; the groups differ by `lr_scale` (see optim/schedule.py) or their own lr.
        momentum: share of the old momentum, in [0, 1).
        ns_steps: Newton-Schulz iterations, 1 to 5. Four cost a fifth less; on a model of half a
            million parameters they learn as fast (docs/tried.md).
        dtype: of the Newton-Schulz products; float32 where the processor has no fast bfloat16, or
            results must not depend on how many matrices are multiplied at once.
        **adamw: options of AdamW.

    Raises:
        ValueError: a matrix group with something else than matrices, or an option out of range.
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        lr: float = 0.02,
        momentum: float = 0.95,
        ns_steps: int = len(COEFFICIENTS),
        dtype: torch.dtype = torch.bfloat16,
        **adamw: Any,
    ) -> None:
        if not 1 <= ns_steps <= len(COEFFICIENTS):
            raise ValueError(f"ns_steps {ns_steps} must be 1 to {len(COEFFICIENTS)}")
        self._momentum, self._ns_steps, self._dtype = momentum, ns_steps, dtype
        super().__init__(params, lr=lr, **adamw)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of either kind.

        Raises:
            ValueError: see the class.
        """
        if param_group.get("whole_matrices", False):
            param_group = {"momentum": self._momentum, **param_group}
            if not 0 <= param_group["momentum"] < 1:
                raise ValueError(f"momentum {param_group['momentum']} must be in [0, 1)")
            param_group["params"] = list(param_group["params"])
            for param in param_group["params"]:
                if param.dim() not in (2, 3):
                    raise ValueError(f"Muon is for matrices, not for shape {tuple(param.shape)}")
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(  # type: ignore[override]  # torch overloads it, to the same effect
        self, closure: Callable[[], float] | None = None
    ) -> float | None:
        """Update every parameter that has a gradient; see `AdamW.step`."""
        loss = super().step(closure)
        updated = [
            (param, group)
            for group in self.param_groups
            if group.get("whole_matrices", False)
            for param in group["params"]
            if param.grad is not None
        ]
        directions = [self._direction(param, group["momentum"]) for param, group in updated]
        maps = [
            direction.split(list(group.get("row_blocks", direction.shape[-2:-1])), dim=-2)
            for direction, (_, group) in zip(directions, updated, strict=True)
        ]
        every = [block for blocks in maps for block in blocks]
        steps = iter(orthogonal_each(every, self._dtype, self._ns_steps))
        for (param, group), blocks in zip(updated, maps, strict=True):
            update = torch.cat([_scaled(next(steps)) for _ in blocks], dim=-2)
            moved = param * (1 - group["lr"] * group["weight_decay"])
            moved.sub_(group["lr"] * update.to(param.dtype).view_as(param))
            self._write(param, moved)
        return loss

    def _update_group(self, group: dict[str, Any]) -> None:
        if not group.get("whole_matrices", False):
            super()._update_group(group)

    def _direction(self, param: Tensor, momentum: float) -> Tensor:
        """Nesterov's momentum after one more gradient, (count, rows, columns)."""
        assert param.grad is not None
        state = self.state[param]
        wide = torch.float32 if param.dtype in HALF_PRECISION else param.dtype
        if not state:
            state["momentum_buffer"] = torch.zeros_like(param, dtype=wide)
        gradient = param.grad.to(wide)
        buffer = state["momentum_buffer"].lerp(gradient, 1 - momentum)
        self._write(state["momentum_buffer"], buffer)
        return gradient.lerp(buffer, momentum).view(-1, *param.shape[-2:])

    def _write(self, target: Tensor, value: Tensor) -> None:
        """Overwrite, unless the step is left out: then every bit stays, whatever `value` is."""
        if self.found_inf is None:
            target.copy_(value)
        else:
            is_left_out = self.found_inf.to(target.device) > 0
            torch.where(is_left_out, target, value, out=target)


def orthogonal_each(stacks: Sequence[Tensor], dtype: torch.dtype, ns_steps: int) -> list[Tensor]:
    """`orthogonal` of several stacks; all matrices of one size go through each product together.

    A matrix and a transposed one are of one size. A product of many small matrices takes little
    longer than that of a few.
    """
    results: list[Tensor] = list(stacks)
    by_size: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for place, stack in enumerate(stacks):
        by_size[tuple(sorted(stack.shape[-2:])), stack.device].append(place)
    for places in by_size.values():
        wide = [_wide(stacks[place]) for place in places]
        parts = orthogonal(torch.cat(wide), dtype, ns_steps).split([len(stack) for stack in wide])
        for place, part in zip(places, parts, strict=True):
            is_tall = stacks[place].shape[-2] > stacks[place].shape[-1]
            results[place] = part.mT if is_tall else part
    return results


def orthogonal(
    stack: Tensor, dtype: torch.dtype = torch.bfloat16, ns_steps: int = len(COEFFICIENTS)
) -> Tensor:
    """The nearest matrices with orthogonal rows (columns, if they are fewer), roughly.

    Args:
        stack: (count, rows, columns).
        dtype: of the products.
        ns_steps: iterations, at most as many as there are COEFFICIENTS.

    Returns:
        (count, rows, columns) of `dtype`, singular values near 1; 0 stays 0.
    """
    is_tall = stack.shape[-2] > stack.shape[-1]
    x = _wide(stack)
    # The Frobenius norm is at least the spectral one, and below 1 the polynomial converges.
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    x = (x / norm.clamp(min=EPS)).to(dtype)
    for a, b, c in COEFFICIENTS[:ns_steps]:
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x.mT if is_tall else x


def _wide(stack: Tensor) -> Tensor:
    return stack.mT if stack.shape[-2] > stack.shape[-1] else stack


def _scaled(steps: Tensor) -> Tensor:
    rows, columns = steps.shape[-2:]
    return steps * math.sqrt(max(1.0, rows / columns))


def matrix_groups(
    named_parameters: Iterable[tuple[str, Tensor]],
    weight_decay: float,
    row_blocks: Mapping[str, tuple[int, ...]],
) -> list[dict[str, Any]]:
    """Sort parameters into Muon's and AdamW's, and these into decayed and undecayed.

    Args:
        named_parameters: `model.named_parameters()`. Frozen parameters are left out.
        weight_decay: of all matrices and embeddings.
        row_blocks: by name the matrices inside the network, not its embedding or head, with the
            rows of each map that they hold one below the other.

    Returns:
        Groups for `Muon`, those without parameters omitted.
    """
    trainable = [(name, p) for name, p in named_parameters if p.requires_grad]
    inside: dict[tuple[int, ...], list[Tensor]] = {}
    for name, parameter in trainable:
        if name in row_blocks:
            inside.setdefault(row_blocks[name], []).append(parameter)
    outside = [p for name, p in trainable if name not in row_blocks]
    groups: list[dict[str, Any]] = [
        {
            "params": matrices,
            "weight_decay": weight_decay,
            "whole_matrices": True,
            "row_blocks": blocks,
        }
        for blocks, matrices in inside.items()
    ]
    groups.append({"params": [p for p in outside if p.ndim >= 2], "weight_decay": weight_decay})
    groups.append({"params": [p for p in outside if p.ndim < 2], "weight_decay": 0.0})
    return [group for group in groups if group["params"]]
