"""Loss scaling for float16 where each rank has only a shard of the gradients.

torch's GradScaler looks for infinities in `grad` of an optimizer's parameters, and every rank
decides for itself whether to skip the step. With shards there is no such `grad`, and one rank alone
may have the infinity: this one looks at the shards, and all ranks decide alike.
"""

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from dist.collectives import all_reduce_sum
from dist.sharded_optimizer import ShardedOptimizer


class GradScaler(torch.amp.GradScaler):
    """torch.amp.GradScaler, for any optimizer and for ShardedOptimizer.

        scaler.scale(loss).backward()
        ddp.finish_gradient_sync()
        scaler.unscale_and_clip_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()

    `unscale_` alone, and `step` without either, work as in torch. Who unscales and skips without
    it divides by `divisor` and calls `update_after` instead of `update`: then nothing is read back
    from the device.
    """

    @property
    def divisor(self) -> float | Tensor:
        """What `scale` has multiplied by: a 0-d tensor, not to be changed; 1 if not enabled."""
        return self._scale if self.is_enabled() and self._scale is not None else 1.0

    def update_after(self, grad_norm: Tensor) -> None:
        """Let the scale fall after infinite gradients, or grow after many finite ones.

        Args:
            grad_norm: 0-d, of complete gradients, alike on all ranks; finite if all of them are.
        """
        if self.is_enabled():
            scale, growth_tracker = self._check_scale_growth_tracker("update_after")
            torch._amp_update_scale_(
                scale,
                growth_tracker,
                (~torch.isfinite(grad_norm)).float(),
                self.get_growth_factor(),
                self.get_backoff_factor(),
                self.get_growth_interval(),
            )

    def unscale_and_clip_(self, optimizer: ShardedOptimizer, max_norm: float) -> Tensor:
        """Unscale, clip, and find out whether the step is to be skipped, in one reduction.

        Args:
            optimizer: whose gradients are complete.
            max_norm: above 0; infinity: no clipping.

        Returns:
            The norm of the unscaled gradients before clipping, 0-d; not finite if any is not.

        Raises:
            RuntimeError: they have been unscaled since the last update().
        """
        state = self._per_optimizer_states[id(optimizer)]
        if self.is_enabled() and state["stage"] is not OptState.READY:
            raise RuntimeError("gradients are unscaled already: once a step, then update()")
        norm = optimizer.clip_grad_norm(max_norm, self.divisor)
        state["found_inf_per_device"] = {norm.device: (~torch.isfinite(norm)).float()}
        state["stage"] = OptState.UNSCALED
        return norm

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, Tensor]:
        if not isinstance(optimizer, ShardedOptimizer) or not optimizer.has_shards:
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        shards = optimizer.gradient_shards()
        if shards:
            torch._amp_foreach_non_finite_check_and_unscale_(shards, found_inf, inv_scale)
        all_reduce_sum(found_inf).clamp_(max=1.0)
        return {found_inf.device: found_inf}
