"""What every optimizer of a server begins with: the change that a round brought, and what is kept of earlier ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from edgefl.contract.server import Scalars, ServerOpt, beside, memory_of
from edgefl.contract.tensors import Tensors

Rule = Callable[[Tensor, Mapping[str, Tensor]], tuple[Tensor, Mapping[str, Tensor]]]
"""(Delta, what is kept by the name of the memory) -> (the step to take, what is kept from now on), of one parameter."""


def on_change(name: str, memory: Mapping[str, float], rule: Rule) -> ServerOpt:
    """``x + step`` in place of the mean of what devices sent, where ``rule`` makes the step of ``Delta = mean - x``.

    ``x`` is the model as the round began with it; an entry that no device sent has Delta = 0, and what is kept of it moves
    it all the same. Parameters have a place in every memory; moving statistics have none and become their mean.
    """

    def step(before: Tensors, mean: Tensors, _hyper: Scalars) -> Tensors:
        kept = {each: memory_of(before, each) for each in memory}
        found: Tensors = {}
        for parameter in next(iter(kept.values())):
            x = before[parameter]
            moved, left = rule(mean[parameter] - x, {each: kept[each][parameter] for each in memory})
            found[parameter] = x + moved
            for each, value in left.items():
                found |= beside(each, {parameter: value})
        return found

    return ServerOpt(name, memory, step)
