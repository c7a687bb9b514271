"""The algorithm that trains a submodel, with its codec and the server's optimizer: refused where these do not go
together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from edgefl.algorithms import catalog
from edgefl.codecs.apply import applied
from edgefl.codecs.codec import Codec
from edgefl.contract import server_state
from edgefl.contract.algorithm import Algorithm
from edgefl.contract.tensors import role_of
from edgefl.errors import ConfigError
from edgefl.facts.combinations import ROLLING, WHOLE, combination_error
from edgefl.objective.objective import Objective
from edgefl.optimizers.catalog import NONE, with_optimizer
from edgefl.submodels.submodel import Submodel

DEFAULT_ALGORITHM = "sgd"
"""What a codec that belongs to a local training may put its own in place of."""


def coded_algorithm(
    submodel: Submodel,
    name: str,
    options: Mapping[str, Any],
    codec: Codec,
    *,
    optimizer: str = NONE,
    optimizer_options: Mapping[str, Any] | None = None,
) -> Algorithm:
    """The local training ``name`` of a submodel, its update coded by ``codec``.

    A codec that belongs to a local training has it in place of ``sgd`` (:func:`trained_by`). ``optimizer``: one of the
    server's, ``none`` for what the algorithm itself says. ConfigError where algorithm, codec and kind do not go together.
    """
    if codec.feedback and submodel.moves:
        raise combination_error(
            f"codec {codec.name!r} keeps on each device what coding lost of every entry, and kind {submodel.kind!r} holds "
            "other entries in each round; choose a codec without feedback, or a kind that stays in its place",
            codec=codec.name,
            kind=_kind(submodel),
        )
    objective = Objective.of(submodel)
    name, options = trained_by(codec, name, options)
    algorithm = catalog.build(name, objective, **options)
    if algorithm.inference is not None and submodel.prefix:
        raise combination_error(
            f"algorithm {name!r} computes with its weights in a form of its own, and a tier with frozen units "
            f"would run these "
            "as they are; choose another algorithm, or a kind that trains the whole depth, such as width",
            algorithm=name,
            kind=_kind(submodel),
        )
    algorithm = with_optimizer(algorithm, optimizer, **(optimizer_options or {}))
    _check_server_state(algorithm, submodel)
    _check_carry(algorithm, submodel)
    return applied(codec, algorithm, objective)


def with_shorter(algorithm: Algorithm, others: Mapping[int, Algorithm]) -> Algorithm:
    """``algorithm`` with the steps of ``others`` for samples of so many tokens, ascending: the same training otherwise.

    Batches are then of like length where they were walked through. ConfigError for an algorithm whose exchanges or passes
    over the data are several: their batches are not drawn by length.
    """
    if not others:
        return algorithm
    if len(algorithm.exchanges) > 1 or any(phase.over_data for phase in algorithm.phases):
        raise ConfigError(
            f"algorithm {algorithm.name!r} has several exchanges or passes over the data, for which there are no graphs by "
            "length; leave data.lengths empty, or choose another algorithm",
            algorithm=algorithm.name,
        )
    phases = tuple(
        replace(
            phase,
            shorter={
                length: replace(others[length].phases[place].function, name=f"{phase.function.name}.{length}")
                for length in sorted(others)
            },
        )
        for place, phase in enumerate(algorithm.phases)
    )
    return replace(algorithm, phases=phases, draws="length" if algorithm.draws == "walk" else algorithm.draws)


def trained_by(codec: Codec, name: str, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The algorithm and its options: the ones that were asked for, or the one in place of sgd that the codec belongs to."""
    training = codec.training
    if training is None:
        return name, dict(options)
    if name not in (DEFAULT_ALGORITHM, training.algorithm):
        raise combination_error(
            f"codec {codec.name!r} goes with the local training {training.algorithm!r}, and algorithm.name is {name!r}; "
            "leave algorithm.name out, or choose a codec that codes the result of any training",
            algorithm=name,
            codec=codec.name,
        )
    return training.algorithm, {**options, **training.options}


def _kind(submodel: Submodel) -> str:
    """Return the name of the kind in the table of combinations."""
    if submodel.kind == "output_side" and not submodel.prefix:
        return WHOLE
    return ROLLING if submodel.kind == "width" and submodel.moves else submodel.kind


def check_lies_like_weights(algorithm: Algorithm, submodel: Submodel) -> None:
    """What devices read or send of the server's state lies where the weights lie: ConfigError if these do not lie there as
    tensors, in the same place in each round."""
    carrier = submodel.carrier
    if submodel.moves or (carrier is not None and set(carrier.update) - set(Objective.of(submodel).weights)):
        raise combination_error(
            f"algorithm {algorithm.name!r} shares {', '.join(algorithm.server_state)} of every parameter with the "
            f"devices, and "
            f"kind {submodel.kind!r} holds single entries or others in each round; choose output_side or "
            "width without rolling",
            algorithm=algorithm.name,
            kind=_kind(submodel),
        )


def state_read(exchange: Algorithm, names: Mapping[str, float]) -> tuple[str, ...]:
    """Which of the server's states ``names`` devices get in an exchange."""
    ports = (*exchange.start.inputs, *exchange.finish.inputs)
    labels = [name.partition(".")[2] for name in ports if role_of(name) == "weights"]
    return tuple(name for name in server_state.states_of(labels, names) if name != server_state.WEIGHTS)


def _check_server_state(algorithm: Algorithm, submodel: Submodel) -> None:
    if any(state_read(exchange, algorithm.server_state) for exchange in algorithm.exchanges):
        check_lies_like_weights(algorithm, submodel)


def _check_carry(algorithm: Algorithm, submodel: Submodel) -> None:
    """What a device keeps of every entry is of no use where it holds others in the next round."""
    ports = [name for each in algorithm.exchanges for name in (*each.start.inputs, *each.finish.inputs)]
    if submodel.moves and any(role_of(name) == "carry" for name in ports):
        raise combination_error(
            f"algorithm {algorithm.name!r} keeps something of every entry on each device, and kind {submodel.kind!r} holds "
            "other entries in each round; choose another algorithm, or a kind that stays in its place: output_side or width "
            "without rolling",
            algorithm=algorithm.name,
            kind=_kind(submodel),
        )
