"""Where a backward may write a gradient itself, to save the copy into the bucket."""

import weakref
from collections.abc import Callable

from torch import Tensor


class GradMemory:
    """What a parameter's `grad_memory` is.

    Args:
        memory_for: method of the wrapper, called with a parameter; the wrapper is not kept alive.
    """

    def __init__(self, memory_for: Callable[[Tensor], Tensor | None]) -> None:
        self._memory_for = weakref.WeakMethod(memory_for)

    def __call__(self, parameter: Tensor) -> Tensor | None:
        """A tensor like the parameter, to be filled and handed to autograd; None: not now."""
        memory_for = self._memory_for()
        return None if memory_for is None else memory_for(parameter)

    def __reduce__(self) -> tuple[type[set[None]], tuple[()]]:
        # A pickled parameter is one without the wrapper; of all that is false, this is what
        # torch.load takes with weights_only.
        return set, ()
