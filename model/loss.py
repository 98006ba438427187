"""Cross-entropy over the vocabulary, with one fp32 pass in each direction."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


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
