"""Server state: tensors that the server averages, checkpoints and publishes like the model's own.

The tensor of state ``m`` for parameter ``conv.weight`` is ``m/conv.weight``, in unit ``m/conv``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import numpy as np

from edgefl.contract.server import Scalars, ServerOpt
from edgefl.wire.regions import Placement, Region
from edgefl.wire.tensors import Array, Arrays

WEIGHTS = ""
"""Denotes the weights themselves among the names of states."""


def initial(states: Mapping[str, float], weights: Mapping[str, Array], trained: Iterable[str]) -> Arrays:
    """Return the initial tensors of every server state, by ``<state>/<parameter>``. All entries of a tensor are equal.

    Args:
        states: Initial value of each state, by its name.
        weights: The model's weights, which give shapes and dtypes.
        trained: Names of the trained parameters. Each state has one tensor for each.
    """
    names = sorted(trained)
    return {
        f"{state}/{name}": np.full(weights[name].shape, value, weights[name].dtype)
        for state, value in states.items()
        for name in names
    }


def units_of(states: Iterable[str], units: Iterable[str], trained: Collection[str]) -> tuple[str, ...]:
    """Return ``<state>/<unit>`` for each state and each of the model's ``units`` that has a trained parameter.

    A unit is a stage of the model; its name is the first part of its parameters' names.

    Args:
        states: Names of the server states, the outer loop of the result.
        units: Names of the model's units, in order.
        trained: Names of the trained parameters, ``<unit>.<...>``.
    """
    trained_units = {name.partition(".")[0] for name in trained}
    own = [unit for unit in units if unit in trained_units]
    return tuple(f"{state}/{unit}" for state in states for unit in own)


def state_in(name: str, states: Collection[str]) -> str:
    """Return the name of the server state, one of ``states``, that tensor ``name`` is part of.

    Return :data:`WEIGHTS` if it is a tensor of the model itself.
    """
    state, slash, _ = name.partition("/")
    return state if slash and state in states else WEIGHTS


def states_of(labels: Iterable[str], states: Collection[str]) -> tuple[str, ...]:
    """Return the server states that the tensors ``labels`` are part of, each once, in the order of their first use.

    Tensors of the model itself count as state :data:`WEIGHTS`.

    Args:
        labels: Names of tensors, such as ``conv.weight`` and ``m/conv.weight``.
        states: Names of all server states.
    """
    return tuple(dict.fromkeys(state_in(label, states) for label in labels))


def model_of(arrays: Mapping[str, Array], states: Collection[str]) -> Arrays:
    """Return the tensors of ``arrays`` that are part of the model, without those of the server ``states``."""
    return {name: array for name, array in arrays.items() if state_in(name, states) == WEIGHTS}


def regions_of(
    placement: Placement, names: Iterable[str], trained: Collection[str], private: Collection[str] = ()
) -> dict[str, Region]:
    """Return the region (position in the global tensor) of each tensor of an update, by its name in the global model.

    Args:
        placement: Regions of the weights that the tier holds.
        names: Server states that the update contains; :data:`WEIGHTS` denotes the model's weights.
        trained: Names of the trained parameters. States have no tensors for others.
        private: Names of tensors that stay on the device, which no update holds.
    """
    regions: dict[str, Region] = {}
    for state in names:
        if state == WEIGHTS:
            regions |= {name: region for name, region in placement.regions.items() if name not in private}
        else:
            regions |= {
                f"{state}/{name}": region for name, region in placement.regions.items() if name in trained
            }
    return regions


def apply_server_step(
    server: ServerOpt, before: Mapping[str, Array], mean: Mapping[str, Array], hyper: Scalars
) -> Arrays:
    """Return the new model and server state by name: ``mean``, with the tensors that the server's step changes.

    Args:
        server: Server optimizer.
        before: Weights and state at the start of the exchange (round trip between server and device), by name.
        mean: Averages of the exchange, by the same names.
        hyper: Scalars of the exchange, and ``share``, the fraction of all devices that reported.

    Raises:
        ServerStepError: The step raised an error or returned invalid values (:meth:`ServerOpt.moved`).
    """
    return {**mean, **server.moved(before, mean, hyper)}


def unfolded_states(server: ServerOpt, sends: Collection[str], trained: Iterable[str]) -> tuple[str, ...]:
    """Return the server states that the averages contain if devices send the states ``sends``.

    They differ from ``sends`` if the server optimizer replaces an update by other tensors
    (:meth:`ServerOpt.unfolded`). In both, :data:`WEIGHTS` denotes the model's weights. If ``trained`` is empty,
    return ``sends``.
    """
    parameter = next(iter(trained), None)
    if parameter is None:
        return tuple(sends)
    names = [parameter if state == WEIGHTS else f"{state}/{parameter}" for state in sends]
    after = server.names_unfolded(tuple(names))
    return tuple(WEIGHTS if name == parameter else name.partition("/")[0] for name in after)
