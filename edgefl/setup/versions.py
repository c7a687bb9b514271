"""Algorithms that allow several versions of the model at a time (round.mode buffered)."""

from __future__ import annotations

from edgefl.contract import server_state
from edgefl.contract.algorithm import Algorithm
from edgefl.contract.server import MEAN
from edgefl.facts.combinations import combination_error


def why_not(method: Algorithm) -> str:
    """Return the reason why devices of ``method`` cannot begin from several versions of the model; empty if they can.

    An update must be a change of the weights that is valid whatever the other devices began from. Its inputs must be in the
    weights of its version, or be the device's own.
    """
    if method.whole:
        return "it needs every device in every round, and no round waits for any"
    if len(method.exchanges) > 1:
        return f"it has {len(method.exchanges)} exchanges in turn, and devices would be in several of them at a time"
    if method.server.unfold is not MEAN.unfold:
        return "the server averages something else than what devices send, which holds for one version of it"
    if (shared := _shared(method)) != ():
        return f"devices read the server's {', '.join(shared)} beside the weights, which belongs to one version of them"
    if method.carry_rule.needed or method.carry_rule.exchanges:
        return "what a device keeps is good for the next round only, and versions come and go meanwhile"
    return ""


def check_versions(method: Algorithm) -> None:
    """ConfigError with the reason where devices of ``method`` cannot begin from several versions at a time."""
    if why := why_not(method):
        raise combination_error(
            f"algorithm {method.name!r} does not go with round.mode buffered: {why}; choose round.mode synchronous, or "
            "another algorithm",
            algorithm=method.name,
            mode="buffered",
        )


def _shared(method: Algorithm) -> tuple[str, ...]:
    """The server's states that devices read, or that only devices could fill."""
    names = [name for function in method.functions for name in function.inputs if name.startswith("weights.")]
    read = server_state.states_of([name.removeprefix("weights.") for name in names], method.server_state)
    return tuple(name for name in read if name != server_state.WEIGHTS)
