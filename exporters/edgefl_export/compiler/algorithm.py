"""Algorithms with a codec and the server's optimizer, and the errors for combinations that do not work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from edgefl.algorithms import catalog
from edgefl.codecs import catalog as codecs
from edgefl.codecs.apply import apply_codec
from edgefl.codecs.codec import Codec
from edgefl.contract import server_state
from edgefl.contract.algorithm import Algorithm
from edgefl.contract.choice import AlgorithmChoice, CodecChoice, OptimizerChoice
from edgefl.contract.tensors import role_of
from edgefl.errors import ConfigError
from edgefl.facts.combinations import ROLLING, WHOLE, combination_error
from edgefl.objective.objective import Objective
from edgefl.optimizers.catalog import NONE, with_optimizer
from edgefl.submodels.output_side.submodel import OutputSide
from edgefl.submodels.submodel import Submodel

DEFAULT_ALGORITHM = "sgd"
"""The algorithm that a codec with a local training of its own may replace."""


class TrainingChoices(NamedTuple):
    """Choice of algorithm, codec and server optimizer; ``optimizer`` None is the server optimizer of the algorithm."""

    algorithm: AlgorithmChoice
    codec: CodecChoice
    optimizer: OptimizerChoice | None = None

    def build(self, submodel: Submodel) -> Algorithm:
        """Return the local training of ``submodel`` with these choices.

        Raises:
            ConfigError: if algorithm, codec and the kind of submodel cannot be combined.
        """
        return coded_algorithm(
            submodel,
            self.algorithm.name,
            self.algorithm.options,
            codecs.build(self.codec.name, **self.codec.options),
            optimizer=self.optimizer.name if self.optimizer else NONE,
            optimizer_options=self.optimizer.options if self.optimizer else None,
        )


def coded_algorithm(
    submodel: Submodel,
    name: str,
    options: Mapping[str, Any],
    codec: Codec,
    *,
    optimizer: str = NONE,
    optimizer_options: Mapping[str, Any] | None = None,
) -> Algorithm:
    """Return the local training of a submodel whose ``finish`` function encodes the update.

    Args:
        submodel: the submodel to train.
        name: name of the algorithm. A codec with a local training of its own replaces ``sgd`` (:func:`resolve_training`).
        options: options of the algorithm.
        codec: codec of the update.
        optimizer: name of the server's optimizer; ``none`` for that of the algorithm.
        optimizer_options: options of the server's optimizer.

    Raises:
        ConfigError: if algorithm, codec and the kind of submodel cannot be combined.
    """
    if codec.feedback and submodel.moves:
        raise combination_error(
            f"codec {codec.name!r} keeps on each device what coding lost of every entry, and kind {submodel.kind!r} holds "
            "other entries in each round; choose a codec without feedback, or a kind that stays in its place",
            codec=codec.name,
            kind=_kind(submodel),
        )
    objective = Objective.of(submodel)
    name, options = resolve_training(codec, name, options)
    algorithm = catalog.build(name, objective, **options)
    if algorithm.inference is not None and submodel.prefix:
        raise combination_error(
            f"algorithm {name!r} computes with its weights in a form of its own, and a tier with frozen units "
            f"would run these "
            "as they are; choose another algorithm, or a kind that trains the whole depth, such as width",
            algorithm=name,
            kind=_kind(submodel),
        )
    if algorithm.private and submodel.prefix:
        whole = catalog.build(name, Objective.of(OutputSide(submodel.spec, 0)), **options)
        _check_private(whole, objective, submodel)
    algorithm = with_optimizer(algorithm, optimizer, **(optimizer_options or {}))
    _check_server_state(algorithm, submodel)
    _check_carry(algorithm, submodel)
    return apply_codec(codec, algorithm, objective)


def with_shorter(algorithm: Algorithm, others: Mapping[int, Algorithm]) -> Algorithm:
    """Return ``algorithm`` with additional training steps for shorter texts, so that a device need not pad them to
    full length.

    If the batches of ``algorithm`` walk through the data in order, they are drawn by length instead.

    Args:
        algorithm: local training for texts of full length (the longest that the model reads).
        others: the same training for shorter texts, by their number of tokens. If empty, ``algorithm`` is returned.

    Raises:
        ConfigError: if the algorithm has several exchanges (round trips) or passes over the data, which cannot draw by
            length.
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


def resolve_training(codec: Codec, name: str, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return name and options of the algorithm to train with ``codec``.

    A codec with a local training of its own replaces the algorithm ``sgd`` by it and adds its options.

    Raises:
        ConfigError: if the codec has a local training of its own, and ``name`` is neither that nor ``sgd``.
    """
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
    """Return the name of the submodel's kind in the table of combinations (:mod:`edgefl.facts.combinations`)."""
    if submodel.kind == "output_side" and not submodel.prefix:
        return WHOLE
    return ROLLING if submodel.kind == "width" and submodel.moves else submodel.kind


def check_whole_tensors(algorithm: Algorithm, submodel: Submodel) -> None:
    """Check that a submodel can hold server state for every parameter.

    Server state has the layout of the weights, so these must be whole tensors in the same region in every round.

    Raises:
        ConfigError: if the submodel holds single entries, or other entries in each round.
    """
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
    """Return the names of the server states, such as control variates, that devices download in an exchange (one round
    trip).

    Args:
        exchange: functions of the exchange.
        names: all server states of the algorithm, by name (``Algorithm.server_state``).
    """
    ports = (*exchange.start.inputs, *exchange.finish.inputs)
    labels = [name.partition(".")[2] for name in ports if role_of(name) == "weights"]
    return tuple(name for name in server_state.states_of(labels, names) if name != server_state.WEIGHTS)


def _check_server_state(algorithm: Algorithm, submodel: Submodel) -> None:
    if any(state_read(exchange, algorithm.server_state) for exchange in algorithm.exchanges):
        check_whole_tensors(algorithm, submodel)


def _check_private(whole: Algorithm, objective: Objective, submodel: Submodel) -> None:
    """Raise ConfigError if frozen units have tensors that ``whole``, the algorithm for the whole model, keeps on devices.

    Devices of this tier would run them with the server's values, which no device trains.
    """
    frozen = [name for name in whole.private if name not in objective.weights]
    if frozen:
        raise combination_error(
            f"algorithm {whole.name!r} keeps {min(frozen)!r} on each device ({len(frozen)} such), and this tier has it in "
            "a frozen unit, with untrained values; move the cut in front of it, or choose a kind that trains the "
            "whole depth, such as width",
            algorithm=whole.name,
            kind=_kind(submodel),
        )


def _check_carry(algorithm: Algorithm, submodel: Submodel) -> None:
    """Raise ConfigError if an algorithm keeps state of each weight on the device and the submodel has other weights in
    each round.
    """
    ports = [name for each in algorithm.exchanges for name in (*each.start.inputs, *each.finish.inputs)]
    if submodel.moves and any(role_of(name) == "carry" for name in ports):
        raise combination_error(
            f"algorithm {algorithm.name!r} keeps something of every entry on each device, and kind {submodel.kind!r} holds "
            "other entries in each round; choose another algorithm, or a kind that stays in its place: output_side or width "
            "without rolling",
            algorithm=algorithm.name,
            kind=_kind(submodel),
        )
