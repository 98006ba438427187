"""All-gather of updated weights, hidden under the next forward.

After a sharded step each rank has new values for its shard of every bucket of weights, and old ones
for the rest. The shards are exchanged while the next forward already runs: each bucket is awaited
when the first module that reads it is called.

Which module reads which weight is taken from the module tree: a *unit* is a child of the wrapped
module, or an element of its ModuleList, ModuleDict or Sequential (a Transformer's embedding, each
of its blocks, its head). A unit's forward pre-hook awaits all weights inside the unit; the wrapped
module's own awaits its direct parameters, and the weights of units that its last forward did not
call, since it may read them itself. Blocks that `torch.compile` has compiled one by one keep this:
the hook is left out of their graphs. Reading a state dict awaits everything, and so does loading.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dist.bucket import Bucket
from dist.collectives import BucketCollectives, Work


class ParameterGather:
    """The gathers of one module's weights.

    Args:
        module: whose forward is the next to read the weights; None: nothing awaits by itself.
        collectives: that move the shards.
    """

    def __init__(self, module: nn.Module | None, collectives: BucketCollectives) -> None:
        self._collectives = collectives
        self._buffers: list[Tensor] = []
        self._address_of: dict[int, int] = {}  # parameter's identity -> its buffer's address
        self._works: dict[int, Work] = {}  # by the buffer's address
        self._units: list[nn.Module] = []
        self._called: set[nn.Module] = set()
        self._module = module
        if module is not None:
            self._units = list(_units(module))
            # The module outlives the optimizer, and must not keep it alive.
            before_module = torch.compiler.disable(_weakly(self._before_module))
            before_unit = torch.compiler.disable(_weakly(self._before_unit))
            before_state = _weakly(self._before_state)
            hooks = [module.register_forward_pre_hook(before_module)]
            hooks += [unit.register_forward_pre_hook(before_unit) for unit in self._units]
            for part in module.modules():
                hooks.append(part.register_state_dict_pre_hook(before_state))
                hooks.append(part.register_load_state_dict_pre_hook(before_state))
            for hook in hooks:
                weakref.finalize(self, hook.remove)

    def add(self, bucket: Bucket) -> Tensor:
        """Take on a bucket of weights; returns the buffer (padded_numel,) that will hold them."""
        buffer = self._collectives.new_buffer(bucket.padded_numel, bucket.dtype, bucket.device)
        for parameter in bucket.parameters:
            self._address_of[id(parameter)] = buffer.data_ptr()
        self._buffers.append(buffer)
        return buffer

    def start(self, buffers: Iterable[Tensor]) -> None:
        """Begin to gather buckets, in this order."""
        for buffer in buffers:
            self._works[buffer.data_ptr()] = self._collectives.all_gather(buffer)

    def wait(self) -> None:
        """Wait for all buckets: then every rank has all weights."""
        self._wait_for(list(self._works))

    def wait_until_writable(self) -> None:
        """Wait until this rank may change its shards: it has all others', and they have its."""
        self.wait()
        for buffer in self._buffers:
            self._collectives.wait_until_writable(buffer)

    def _before_module(self, *_: Any) -> None:
        if self._works:
            inside = [unit for unit in self._units if unit in self._called]
            self._wait_for(self._addresses(self._parameters_outside(inside)))
        self._called.clear()

    def _before_unit(self, unit: nn.Module, *_: Any) -> None:
        self._called.add(unit)
        if self._works:
            self._wait_for(self._addresses(unit.parameters()))

    def _before_state(self, *_: Any) -> None:
        self.wait()

    def _parameters_outside(self, units: Sequence[nn.Module]) -> Iterator[nn.Parameter]:
        assert self._module is not None
        inside = {id(parameter) for unit in units for parameter in unit.parameters()}
        return (p for p in self._module.parameters() if id(p) not in inside)

    def _addresses(self, parameters: Iterator[nn.Parameter]) -> list[int]:
        addresses = {self._address_of.get(id(parameter)) for parameter in parameters}
        return [address for address in self._works if address in addresses]

    def _wait_for(self, addresses: Sequence[int]) -> None:
        for address in addresses:  # in the order of starting
            self._works.pop(address).wait()


def _weakly(method: Callable[..., None]) -> Callable[..., None]:
    """A method that does not keep its object alive, and does nothing without it."""
    reference = weakref.WeakMethod(method)

    def call(*arguments: Any) -> None:
        living = reference()
        if living is not None:
            living(*arguments)

    return call


def _units(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
            yield from _units(child)
        else:
            yield child
