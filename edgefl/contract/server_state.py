"""The server's state, kept beside the model: more tensors, averaged, checkpointed and published like the model's own.

The tensor of state ``m`` for parameter ``conv.weight`` is ``m/conv.weight``, in unit ``m/conv``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import numpy as np

from edgefl.contract.schedule import Scalars
from edgefl.contract.server import ServerOpt
from edgefl.wire.regions import Placement, Region
from edgefl.wire.tensors import Array, Arrays

WEIGHTS = ""
"""Stands for the weights themselves among the names of states."""


def initial(states: Mapping[str, float], weights: Mapping[str, Array], trained: Iterable[str]) -> Arrays:
    """Every state before the first round: one tensor for each of the ``trained`` parameters."""
    names = sorted(trained)
    return {
        f"{state}/{name}": np.full(weights[name].shape, value, weights[name].dtype)
        for state, value in states.items()
        for name in names
    }


def units_of(states: Iterable[str], units: Iterable[str], trained: Collection[str]) -> tuple[str, ...]:
    """The units of all states: those of the model that have a trained parameter, once for each."""
    trained_units = {name.partition(".")[0] for name in trained}
    own = [unit for unit in units if unit in trained_units]
    return tuple(f"{state}/{unit}" for state in states for unit in own)


def state_in(name: str, states: Collection[str]) -> str:
    """Which state a tensor belongs to; :data:`WEIGHTS` for one of the model's."""
    state, slash, _ = name.partition("/")
    return state if slash and state in states else WEIGHTS


def states_of(labels: Iterable[str], states: Collection[str]) -> tuple[str, ...]:
    """The states (:data:`WEIGHTS`: the weights) that these tensors belong to, each once."""
    return tuple(dict.fromkeys(state_in(label, states) for label in labels))


def model_of(arrays: Mapping[str, Array], states: Collection[str]) -> Arrays:
    """The model's own tensors."""
    return {name: array for name, array in arrays.items() if state_in(name, states) == WEIGHTS}


def regions_of(placement: Placement, names: Iterable[str], trained: Collection[str]) -> dict[str, Region]:
    """Where the tensors of an update lie that holds these states (:data:`WEIGHTS`: the weights) of a placement."""
    regions: dict[str, Region] = {}
    for state in names:
        if state == WEIGHTS:
            regions |= placement.regions
        else:
            regions |= {
                f"{state}/{name}": region for name, region in placement.regions.items() if name in trained
            }
    return regions


def stepped(
    server: ServerOpt, before: Mapping[str, Array], mean: Mapping[str, Array], hyper: Scalars
) -> Arrays:
    """The new model and state: the mean, and what the server's step makes of it. StepError as :meth:`ServerOpt.moved`."""
    return {**mean, **server.moved(before, mean, hyper)}


def states_given(server: ServerOpt, sends: Collection[str], trained: Iterable[str]) -> tuple[str, ...]:
    """The states (and :data:`WEIGHTS`) that an update of ``sends`` holds once it is unfolded."""
    parameter = next(iter(trained), None)
    if parameter is None:
        return tuple(sends)
    names = [parameter if state == WEIGHTS else f"{state}/{parameter}" for state in sends]
    after = server.names_unfolded(tuple(names))
    return tuple(WEIGHTS if name == parameter else name.partition("/")[0] for name in after)
