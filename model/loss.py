"""Cross-entropy over the vocabulary: of logits, or of features and the head, a few at a time.

Logits are the largest tensor of a training step: 8192 tokens x 50304 entries in fp32 are 1.6 GB,
and their gradient as much again. Neither is needed whole. In `head_loss` the logits of some tokens
are made, turned into losses and at once into gradients of features and weight, and forgotten: the
gradient of a mean is known but for one factor, which backward multiplies in. No product is computed
twice.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from model.linear import grad_memory

# Logits that stand in memory at once: on a CPU about what its caches hold, on a GPU enough work.
CHUNK_ELEMENTS = {"cpu": 2**21, "cuda": 2**26}
# For each chunk the gradient of the whole weight is read and written: that must not be the work.
FEWEST_TOKENS = 512
# In float16 the gradient of the weight, summed over a chunk, must stay below 65504.
MOST_FLOAT16_TOKENS = 8192


class CrossEntropyLoss(nn.Module):
    """-log softmax(logits)[target], as logsumexp(logits) - logits[target].

    logsumexp subtracts the maximum before it exponentiates, so logits of any size give a finite
    loss. Logits in half precision are widened to fp32 first.

    Args:
        ignore_index: targets with this value count for nothing.
        reduction: "mean" over the targets that count, "sum", or "none" for one loss a target.

    Raises:
        ValueError: another reduction.
    """

    def __init__(self, ignore_index: int = -100, reduction: str = "mean") -> None:
        super().__init__()
        if reduction not in ("mean", "sum", "none"):
            raise ValueError(f"reduction is {reduction!r}, it must be mean, sum or none")
        self.ignore_index = ignore_index
        self.reduction = reduction

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Loss of logits (..., vocab) against targets (...) int64, fp32.

        With "mean" and no target that counts the result is NaN, as in torch.
        """
        losses = _TokenLosses.apply(logits, targets, self.ignore_index)
        if self.reduction == "none":
            return losses
        if self.reduction == "sum":
            return losses.sum()
        return losses.sum() / (targets != self.ignore_index).sum()


class _TokenLosses(torch.autograd.Function):
    """One loss a target. The gradient is softmax(logits) - onehot(target), made in one buffer."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
        counted = targets != ignore_index
        safe_targets = targets.where(counted, 0).unsqueeze(-1)
        wide = logits.float()
        log_normaliser = torch.logsumexp(wide, dim=-1, keepdim=True)
        losses = (log_normaliser - wide.gather(-1, safe_targets)).squeeze(-1)
        ctx.save_for_backward(logits, log_normaliser, safe_targets, counted)
        return losses.where(counted, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_losses: Tensor) -> tuple[Tensor, None, None]:
        logits, log_normaliser, safe_targets, counted = ctx.saved_tensors
        scale = grad_losses.where(counted, 0.0).unsqueeze(-1)
        # Half precision minus fp32 is fp32: no widened copy of the logits is made.
        grad = (logits - log_normaliser).exp_().mul_(scale)
        grad.scatter_add_(-1, safe_targets, -scale)
        return grad.to(logits.dtype), None, None


def head_loss(
    features: Tensor, weight: Tensor, targets: Tensor, ignore_index: int = -100
) -> Tensor:
    """Mean cross-entropy of `features @ weight.T` against targets, 0-d fp32.

    Under autocast the products are in its type, sums and losses in fp32 as always.

    Args:
        features: (..., d_model).
        weight: of the head, (vocab_size, d_model).
        targets: (...) int64.
        ignore_index: targets with this value count for nothing; if all have it, the mean is NaN.
    """
    return _HeadLoss.apply(features, weight, targets, ignore_index)


class _HeadLoss(torch.autograd.Function):
    """The gradients are made in forward, but for the factor that backward is given."""

    @staticmethod
    def forward(
        ctx: Any, features: Tensor, weight: Tensor, targets: Tensor, ignore_index: int
    ) -> Tensor:
        device = features.device.type
        dtype = _product_dtype(features)
        flat, flat_targets = features.flatten(0, -2), targets.flatten()
        counted = flat_targets != ignore_index
        safe_targets = flat_targets.where(counted, 0)
        needs_features, needs_weight = ctx.needs_input_grad[:2]
        # In 16 bits as large as probabilities are: divided by the number of tokens they would
        # vanish in float16.
        grad_features = torch.empty_like(flat) if needs_features else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
        total = torch.zeros((), device=features.device)
        with torch.autocast(device, enabled=False):
            narrow_weight = weight.to(dtype)
            for rows in _chunks(len(flat), weight, dtype):
                x = flat[rows].to(dtype)
                chosen, counts = safe_targets[rows, None], counted[rows, None]
                logits = (x @ narrow_weight.T).float()
                normaliser = torch.logsumexp(logits, dim=-1, keepdim=True)
                losses = normaliser - logits.gather(-1, chosen)
                total += losses.where(counts, 0.0).sum()
                if not (needs_features or needs_weight):
                    continue
                # softmax - onehot, in the memory of the logits.
                grad = logits.sub_(normaliser).exp_().mul_(counts)
                grad.scatter_add_(-1, chosen, -counts.float())
                narrow = grad.to(dtype)
                if grad_features is not None:
                    grad_features[rows] = narrow @ narrow_weight
                if grad_weight is not None:
                    grad_weight += narrow.T @ x
        count = counted.sum()
        ctx.shape, ctx.weight = features.shape, weight
        ctx.save_for_backward(grad_features, grad_weight, count)
        return total / count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        grad_features, grad_weight, count = ctx.saved_tensors
        # Without a target that counts the loss is NaN and moves nothing, as in torch.
        factor = grad / count.clamp(min=1)
        if grad_features is not None:
            grad_features = (grad_features * factor).view(ctx.shape)
        if grad_weight is not None:
            memory = grad_memory(ctx.weight, ctx.next_functions[1][0])
            if memory is None:
                grad_weight = (grad_weight * factor).to(ctx.weight.dtype)
            else:
                grad_weight = torch.mul(grad_weight, factor, out=memory)
        return grad_features, grad_weight, None, None


def _product_dtype(features: Tensor) -> torch.dtype:
    device = features.device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return features.dtype


def _chunks(tokens: int, weight: Tensor, dtype: torch.dtype) -> list[slice]:
    elements = CHUNK_ELEMENTS.get(weight.device.type, CHUNK_ELEMENTS["cuda"])
    step = max(FEWEST_TOKENS, elements // len(weight))
    if dtype == torch.float16:  # a sum of so many gradients of up to 1 is within its range
        step = min(step, MOST_FLOAT16_TOKENS)
    return [slice(first, first + step) for first in range(0, tokens, step)]
