"""What every optimizer of a server begins with: the change that a round brought, and the server's state."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from edgefl.contract.schedule import Scalars
from edgefl.contract.server import ServerOpt, beside, state_of
from edgefl.contract.tensors import Tensors

Rule = Callable[[Tensor, Mapping[str, Tensor]], tuple[Tensor, Mapping[str, Tensor]]]
"""(Delta, the state by name) -> (the step to take, the next state), of one parameter."""


def on_change(name: str, state: Mapping[str, float], rule: Rule) -> ServerOpt:
    """``x + step`` in place of the mean of what devices sent, where ``rule`` makes the step of ``Delta = mean - x``.

    ``x`` is the model as the round began with it; an entry that no device sent has Delta = 0, and its state moves it all the
    same. Parameters have a place in every state; moving statistics have none and become their mean.
    """

    def step(before: Tensors, mean: Tensors, _hyper: Scalars) -> Tensors:
        states = {each: state_of(before, each) for each in state}
        after: Tensors = {}
        for parameter in next(iter(states.values())):
            x = before[parameter]
            change, new = rule(mean[parameter] - x, {each: states[each][parameter] for each in state})
            after[parameter] = x + change
            for each, value in new.items():
                after |= beside(each, {parameter: value})
        return after

    return ServerOpt(name, state, step)
