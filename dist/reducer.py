"""One bucket's gradients on their way through a sync.

The gradients of a bucket lie in one flat buffer. What is made of them there is either their average
over all ranks, which every rank then has whole (an all-reduce), or only this rank's shard of it (a
reduce-scatter): then the full gradients are needed no longer than until they are sent, and their
memory goes to the next bucket that backward fills.
"""

import torch
from torch import Tensor

from dist import huge_pages
from dist.bucket import Bucket
from dist.collectives import HALF_PRECISION, BucketCollectives, Work, world_size

SECOND_BACKWARD = (
    "a second backward before finish_gradient_sync(): finish the first, or run all "
    "micro-batches but the last under no_sync()"
)

# Elements of a vector whose gradient, once it is complete, moves with others' when the bucket is
# sent: a call for each takes longer than the copy. A larger one moves while it is in the cache, and
# so does a matrix, which backward may have written into the bucket itself.
MOST_OF_A_SMALL_VECTOR = 2**14


class Reducer:
    """The gradients of one bucket.

    Args:
        bucket: its layout.
        collectives: that average it.
        scatter: keep this rank's shard of the average alone.
        wire_dtype: in which gradients travel; None: in their own.

    Attributes:
        shard: this rank's shard of the average, (padded_numel / world_size,), float32 where
            gradients have 16 bits; None unless `scatter` is set and a sync has finished since the
            gradients were last cleared.
        used: by parameter, whether any rank had a gradient for it; of the last finished sync.
        sent: whether the bucket has been sent in this sync.
    """

    def __init__(
        self,
        bucket: Bucket,
        collectives: BucketCollectives,
        scatter: bool = False,
        wire_dtype: torch.dtype | None = None,
    ) -> None:
        self.bucket = bucket
        self.scatter = scatter
        self.shard: Tensor | None = None
        self.used = [False] * len(bucket.parameters)
        self.sent = False
        self._collectives = collectives
        # A complex number has no narrower type there: it would lose its imaginary part.
        narrows = wire_dtype is not None and wire_dtype.itemsize < bucket.dtype.itemsize
        self._wire_dtype = wire_dtype if narrows and not bucket.dtype.is_complex else None
        self._buffer: Tensor | None = None
        self._views: list[Tensor] = []
        self._addresses: list[int] = []  # of the views
        # By the buffer's address.
        self._views_of: dict[int, tuple[list[Tensor], list[int]]] = {}
        self._is_frozen = not any(parameter.requires_grad for parameter in bucket.parameters)
        self._moves_late = [
            parameter.dim() < 2 and parameter.numel() <= MOST_OF_A_SMALL_VECTOR
            for parameter in bucket.parameters
        ]
        self._ready = [False] * len(bucket.parameters)
        self._is_lent = [False] * len(bucket.parameters)
        self._num_ready = 0
        self._expected = 0
        self._wire: Tensor | None = None
        self._shard_memory: Tensor | None = None
        self._arriving: Tensor | None = None
        self._work: Work | None = None

    @property
    def started(self) -> bool:
        """Whether a sync is under way in this bucket."""
        return self.sent or self._num_ready > 0

    def is_complete(self) -> bool:
        """Whether every gradient that can come has come."""
        if self._num_ready == 0:
            return not any(parameter.requires_grad for parameter in self.bucket.parameters)
        return self._num_ready >= self._expected

    def is_dormant(self) -> bool:
        """Whether there is nothing to send: frozen from the start, and still."""
        return self._is_frozen and not any(p.requires_grad for p in self.bucket.parameters)

    def memory_for(self, index: int) -> Tensor | None:
        """A parameter's part of the buffer, for backward to write the gradient there itself.

        None where that is not the place for it: it has been sent, a gradient is there to be added
        to, or the place is lent already: for another use of the parameter in the same forward, or
        to a backward that broke off.
        """
        is_taken = self.sent or self._is_lent[index]
        if is_taken or self.bucket.parameters[index].grad is not None:
            return None
        if self._buffer is None:
            self._borrow_buffer()
        self._is_lent[index] = True
        # Autograd keeps a gradient as it is, and does not copy it, if nobody else knows the tensor.
        return self._views[index].detach()

    def take(self, index: int, is_complete: bool) -> bool:
        """A parameter's gradient has come, or a part of it.

        Args:
            index: of the parameter.
            is_complete: nothing will be added before it is sent.

        Returns:
            Whether all of the bucket is complete now.

        Raises:
            RuntimeError: the bucket has been sent in this sync, or the gradient already was
                complete.
        """
        # What is run for every parameter costs by the line.
        if self.sent:
            self.bucket.parameters[index].grad = None  # a piece too late is no gradient
            raise RuntimeError(SECOND_BACKWARD)
        if not (is_complete and self._moves_late[index]):
            self._move(index)
        self._is_lent[index] = False
        if not is_complete:
            return False
        if self._ready[index]:
            raise RuntimeError(SECOND_BACKWARD)
        if self._num_ready == 0:
            # Here, not in the constructor: parameters may be frozen or thawed between steps.
            self._expected = sum(parameter.requires_grad for parameter in self.bucket.parameters)
        self._ready[index] = True
        self._num_ready += 1
        return self._num_ready >= self._expected

    def _move(self, index: int) -> None:
        """Make a parameter's gradient a view of the buffer, whoever made it."""
        if self._buffer is None:
            self._borrow_buffer()
        parameter, view = self.bucket.parameters[index], self._views[index]
        gradient = parameter.grad
        if gradient is not None and gradient is not view:
            if gradient.data_ptr() != self._addresses[index]:
                view.copy_(gradient.detach() if gradient.requires_grad else gradient)
            parameter.grad = view

    def send(self) -> list[bool]:
        """Start to average the bucket.

        Returns:
            By parameter, whether this rank has a gradient for it.
        """
        if self._buffer is None:
            self._borrow_buffer()
        assert self._buffer is not None
        has_gradient = []
        elsewhere, places = [], []
        for parameter, view in zip(self.bucket.parameters, self._views, strict=True):
            gradient = parameter.grad
            has_gradient.append(gradient is not None)
            if gradient is None:
                view.zero_()
                continue
            if gradient is not view:  # moves late, or no hook took it: frozen, or set by hand
                elsewhere.append(gradient)
                places.append(view)
        if elsewhere:
            with torch.no_grad():
                torch._foreach_copy_(places, elsewhere)
        # Until the average is there, nobody has a gradient: a backward too many would add to what
        # is being sent, and an optimizer would step with it.
        for parameter in self.bucket.parameters:
            parameter.grad = None
        if self._wire_dtype is not None:
            self._wire = self._collectives.new_buffer(
                self._buffer.numel(), self._wire_dtype, self._buffer.device
            )
            self._wire.copy_(self._buffer)
        on_its_way = self._buffer if self._wire is None else self._wire
        if self.scatter:
            if self._wire is not None:
                self._collectives.recycle(self._buffer)
                self._buffer = None
            self._arriving = self._memory_of_shard()
            self._work = self._collectives.reduce_scatter_mean(on_its_way, self._arriving)
        else:
            self._work = self._collectives.all_reduce_mean(on_its_way)
        self.sent = True
        return has_gradient

    def wait(self) -> None:
        """Wait for the average; the memory of full gradients that were scattered is free then."""
        if self._work is None:
            return
        self._work.wait()
        self._work = None
        if self.scatter:
            self._return_buffers()

    def finish(self, used: list[bool]) -> None:
        """Hand the average over, and be ready for the next sync.

        Args:
            used: by parameter, whether any rank had a gradient for it.
        """
        if self.scatter:
            self._keep_shard(used)
        else:
            assert self._buffer is not None
            if self._wire is not None:
                self._buffer.copy_(self._wire)
                self._collectives.recycle(self._wire)
            for parameter, view, is_used in zip(
                self.bucket.parameters, self._views, used, strict=True
            ):
                # A parameter frozen on this rank alone would break the replicas: it takes part.
                if is_used:
                    parameter.grad = view
                elif parameter.grad is not None:  # set by hand since it was sent
                    parameter.grad = None
            self.used = used
            self._wire = None
        self._ready = [False] * len(self._ready)
        self._is_lent = [False] * len(self._is_lent)
        self._num_ready = 0
        self.sent = False

    def zero(self) -> None:
        """Let the gradients in the shard be zeros; which there are stays as it is."""
        if self.shard is not None:
            self.shard.zero_()

    def clear(self) -> None:
        """Forget the shard; parameters' gradients are cleared by whoever owns those."""
        self.shard = None
        self.used = [False] * len(self.bucket.parameters)
        self._is_lent = [False] * len(self._is_lent)

    def retire(self) -> None:
        """Give the buffer back for good: gradients in it get memory of their own."""
        for parameter, view in zip(self.bucket.parameters, self._views, strict=False):
            if parameter.grad is view:
                parameter.grad = view.clone()
        self._return_buffers()

    def _return_buffers(self) -> None:
        for buffer in (self._buffer, self._wire):
            if buffer is not None:
                self._collectives.recycle(buffer)
        self._buffer = self._wire = None

    def _keep_shard(self, used: list[bool]) -> None:
        if self.shard is None:
            self.shard, self.used = self._arriving, used
        else:  # not cleared since the last sync: gradients add up, as in torch
            assert self._arriving is not None
            self.shard.add_(self._arriving)
            self.used = [a or b for a, b in zip(self.used, used, strict=True)]
        self._arriving = None

    def _memory_of_shard(self) -> Tensor:
        if self._shard_memory is not None and self.shard is None:
            return self._shard_memory
        is_half = self.bucket.dtype in HALF_PRECISION
        memory = huge_pages.empty(
            self.bucket.padded_numel // world_size(),
            torch.float32 if is_half else self.bucket.dtype,
            self.bucket.device,
        )
        if self._shard_memory is None:
            self._shard_memory = memory
        return memory

    def _borrow_buffer(self) -> None:
        bucket = self.bucket
        buffer = self._collectives.new_buffer(bucket.padded_numel, bucket.dtype, bucket.device)
        # Making a view takes longer than all else that a small gradient costs: make it once.
        if buffer.data_ptr() not in self._views_of:
            views = bucket.views(buffer)
            self._views_of[buffer.data_ptr()] = views, [view.data_ptr() for view in views]
        self._buffer = buffer
        self._views, self._addresses = self._views_of[buffer.data_ptr()]
