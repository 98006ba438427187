"""AdamW, and the rule that says which parameters decay.

Adam keeps a running mean of each gradient and of its square and divides one by the root of the
other (Kingma & Ba 2015, arXiv:1412.6980); AdamW shrinks the weights beside that step instead of
through the gradient (Loshchilov & Hutter 2019, arXiv:1711.05101).

The arithmetic is torch's fused kernel, one call for a whole list of tensors. An update is bound by
memory: written as a dozen operations it moves every moment and weight through memory as often, the
kernel does so once. For 30 million float32 elements on one CPU thread it took 19 ms, the operations
as `torch._foreach_*` 110 to 145: about 6 times as much. What is ours is the rest: float32 moments
for 16-bit parameters, tensors in any layout, states of any AdamW.

Of contiguous float32 and float64 parameters the update is that of `torch.optim.AdamW(fused=True)`
to the last bit, so that either can continue the other's run. Torch's other forms (`foreach=True`,
and its default on CPUs) round in another order and agree to about 1e-6.
"""

import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

# Formats whose steps are too coarse for moments: at beta2 = 0.999 an update of exp_avg_sq is a
# thousandth of it, and bfloat16 rounds everything below 1/256 to nothing.
HALF_PRECISION = (torch.bfloat16, torch.float16)


# Torch wraps this method to keep it out of compiled graphs, and the wrapper imports the compiler at
# its first call: a second of every start. Called as it was written, it needs none.
_add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)


class AdamW(torch.optim.Optimizer):
    """Adam with decoupled weight decay.

    With gradient g at step t, for each element of a parameter p:

        p <- p (1 - lr weight_decay)
        m <- m + (1 - beta1) (g - m)
        v <- beta2 v + (1 - beta2) g^2
        p <- p - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)

    The state of a parameter is `step` (0-d float32 on its device, as torch's fused form has it),
    `exp_avg` (m) and `exp_avg_sq` (v), both of the parameter's shape. A bfloat16 or float16
    parameter has float32 moments and its update is computed in float32, where torch keeps the
    moments in 16 bits too. The parameter itself still rounds to 16 bits after each step and
    swallows updates smaller than half of its own: to train in mixed precision keep the parameters
    in float32 and let autocast do the rest.

    State dicts are interchangeable with torch.optim.AdamW's, in both directions. Torch's takes the
    options of its groups from what it loads, so `fused` must be written into them again after it
    has loaded ours.

    Args:
        params: tensors, or dicts of `params` with options of their own, as in torch.
        lr: learning rate, at least 0. Written into `param_groups` it counts from the next step.
        betas: decay rates of the two means, each in [0, 1).
        eps: keeps the quotient finite where gradients are zero, at least 0.
        weight_decay: share of a weight, times lr, that each step removes; at least 0.

    Attributes:
        found_inf: 0-d float32 on the parameters' device, to be set before `step`: 1 leaves the step
            out, which then changes and counts nothing; 0 does not. So a GPU can decide, and nobody
            waits for its answer. None: nothing is left out.
        steps_in_parts: a step may be made as several, each with some of the parameters in
            `param_groups`. An heir that counts its steps itself sets False.

    Raises:
        ValueError: an option outside its range; names the value.
    """

    found_inf: Tensor | None = None
    steps_in_parts = True

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        _check_options(options)
        super().__init__(params, options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with options of their own; those not given are the optimizer's.

        Raises:
            ValueError: an option outside its range, or a parameter that is already in a group.
        """
        _check_options({**self.defaults, **param_group})
        _add_param_group(self, param_group)

    @torch.no_grad()
    def step(  # type: ignore[override]  # torch overloads it, to the same effect
        self, closure: Callable[[], float] | None = None
    ) -> float | None:
        """Update every parameter that has a gradient.

        Args:
            closure: computes the gradients and returns the loss; called once, before the update.

        Returns:
            What the closure returned; None without one.

        Raises:
            RuntimeError: a sparse gradient or a complex parameter.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._update_group(group)
        return loss

    def _update_group(self, group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        for params in self._parameters_by_kind(group["params"]):
            _update(
                params,
                [param.grad for param in params if param.grad is not None],
                [self.state[param]["exp_avg"] for param in params],
                [self.state[param]["exp_avg_sq"] for param in params],
                [self.state[param]["step"] for param in params],
                found_inf=self.found_inf,
                lr=group["lr"],
                beta1=beta1,
                beta2=beta2,
                eps=group["eps"],
                weight_decay=group["weight_decay"],
            )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the state and options of another AdamW, ours or torch's.

        As in torch the parameters are matched by their position, and moments that already have
        the right type and device are shared with `state_dict`, not copied.

        Raises:
            ValueError: other groups or sizes of groups; options of torch's that we do not have.
        """
        for option in ("amsgrad", "maximize"):
            if any(group.get(option, False) for group in state_dict["param_groups"]):
                raise ValueError(f"this AdamW has no {option}, with which the state was written")
        super().load_state_dict(state_dict)
        # The base class casts every moment to its parameter's type. Where that is 16 bits wide
        # they have just lost what they are kept in float32 for: take them again.
        saved_ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        for i, param in zip(saved_ids, params, strict=True):
            if i not in state_dict["state"]:
                continue
            for name, value in state_dict["state"][i].items():
                if name == "step":  # not shared: it is counted up in place
                    self.state[param][name] = _counter(value, param).clone()
                elif param.dtype in HALF_PRECISION:
                    self.state[param][name] = value.to(param.device, torch.float32)

    def _parameters_by_kind(self, params: list[Tensor]) -> list[list[Tensor]]:
        """Parameters with a gradient, in lists of one device and type, as the kernel takes them."""
        lists: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
        for param in params:
            if param.grad is None:
                continue
            if param.grad.is_sparse:
                raise RuntimeError("AdamW takes no sparse gradients: use torch.optim.SparseAdam")
            if param.is_complex():
                raise RuntimeError("AdamW takes no complex parameters: use torch.view_as_real")
            state = self.state[param]
            if not state:
                dtype = torch.float32 if param.dtype in HALF_PRECISION else param.dtype
                state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
                state["exp_avg"] = torch.zeros_like(param, dtype=dtype)
                state["exp_avg_sq"] = torch.zeros_like(param, dtype=dtype)
            state["step"] = _counter(state["step"], param)
            lists[param.device, param.dtype].append(param)
        return list(lists.values())


def decay_groups(
    named_parameters: Iterable[tuple[str, Tensor]], weight_decay: float
) -> list[dict[str, Any]]:
    """Sort parameters into those that decay and those that do not, for an optimizer's `params`.

    Matrices and embeddings decay. Biases and the gains of norms, which have one dimension or none,
    do not: decay would pull a gain towards 0, away from the 1 that leaves its input alone.

    Args:
        named_parameters: `model.named_parameters()`. Frozen parameters are left out; a tensor with
            several names (tied weights) is taken once, where it comes first.
        weight_decay: of the first group; the second has 0.

    Returns:
        At most two groups, `{"params": [...], "weight_decay": ...}`, in the order of the names;
        a group without parameters is omitted.
    """
    trainable = {id(param): param for _, param in named_parameters if param.requires_grad}
    decayed = [param for param in trainable.values() if param.ndim >= 2]
    undecayed = [param for param in trainable.values() if param.ndim < 2]
    assert sorted(map(id, decayed + undecayed)) == sorted(trainable), "not each exactly once"
    groups = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": undecayed, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _update(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    steps: list[Tensor],
    *,
    found_inf: Tensor | None,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    """Do one step, in place, for tensors of one device and type."""
    dtype = torch.float32 if params[0].dtype in HALF_PRECISION else params[0].dtype
    # The kernel walks through memory and takes no notice of strides: handed a transposed gradient
    # it takes each element for another one, and in a slice of a larger tensor it writes beside the
    # slice. So it is given contiguous tensors alone.
    p, g, m, v = (_contiguous(tensors, dtype) for tensors in (params, grads, exp_avgs, exp_avg_sqs))
    if found_inf is not None:
        found_inf = found_inf.to(params[0].device)
    torch._foreach_add_(steps, 1)
    torch._fused_adamw_(
        p,
        g,
        m,
        v,
        [],  # the largest v so far, which amsgrad alone needs
        steps,
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        weight_decay=weight_decay,
        eps=eps,
        amsgrad=False,
        maximize=False,
        found_inf=found_inf,
    )
    if found_inf is not None:
        torch._foreach_sub_(steps, [found_inf] * len(steps))
    for updated, tensors in ((p, params), (m, exp_avgs), (v, exp_avg_sqs)):
        _copy_unless_same(updated, tensors)


def _counter(step: float | Tensor, param: Tensor) -> Tensor:
    """A count of steps as the kernel reads it, whoever wrote it: float32, beside the parameter."""
    if isinstance(step, Tensor):
        return step.to(param.device, torch.float32)
    return torch.tensor(float(step), dtype=torch.float32, device=param.device)


def _contiguous(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The tensors themselves; contiguous copies of those with other strides or type."""
    contiguous = [
        tensor
        if tensor.dtype == dtype and tensor.is_contiguous()
        else torch.empty(tensor.shape, dtype=dtype, device=tensor.device)
        for tensor in tensors
    ]
    _copy_unless_same(tensors, contiguous)
    return contiguous


def _copy_unless_same(sources: list[Tensor], targets: list[Tensor]) -> None:
    pairs = [(s, t) for s, t in zip(sources, targets, strict=True) if s is not t]
    if pairs:
        torch._foreach_copy_([t for _, t in pairs], [s for s, _ in pairs])


def _check_options(options: dict[str, Any]) -> None:
    for name in ("lr", "eps", "weight_decay"):
        if not (options[name] >= 0 and math.isfinite(options[name])):
            raise ValueError(f"{name} {options[name]} must be a number of at least 0")
    for name, beta in zip(("beta1", "beta2"), options["betas"], strict=True):
        if not 0 <= beta < 1:
            raise ValueError(f"{name} {beta} must be at least 0 and less than 1")
