"""Where a backward may write a gradient itself, to save the copy into the bucket."""

import weakref
from collections.abc import Callable

from torch import Tensor, nn


class GradMemory:
    """What a parameter's `grad_memory` is.

    Args:
        memory_for: method of the wrapper, called with a parameter's identity; the wrapper is not
            kept alive.
        parameter: whose gradient it is.
    """

    def __init__(self, memory_for: Callable[[int], Tensor | None], parameter: nn.Parameter) -> None:
        self._memory_for = weakref.WeakMethod(memory_for)
        self._key = id(parameter)

    def __call__(self) -> Tensor | None:
        """A tensor like the parameter, to be filled and handed to autograd; None: not now."""
        memory_for = self._memory_for()
        return None if memory_for is None else memory_for(self._key)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # a pickled module is one without the wrapper
