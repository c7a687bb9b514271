"""The program that trains a submodel, with its codec and the server's optimizer: refused where these do not go together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from edgefl.codecs.apply import applied
from edgefl.codecs.codec import Codec
from edgefl.contract import server_state
from edgefl.contract.program import Program
from edgefl.contract.tensors import role_of
from edgefl.facts.combinations import ROLLING, WHOLE, combination_error
from edgefl.objective.objective import Objective
from edgefl.optimizers.catalog import NONE, with_optimizer
from edgefl.programs import catalog
from edgefl.submodels.submodel import Submodel
from edgefl.wire.errors import ConfigError

DEFAULT_PROGRAM = "sgd"
"""What a codec that belongs to a local training may put its own in place of."""


def coded_program(
    submodel: Submodel,
    name: str,
    options: Mapping[str, Any],
    codec: Codec,
    *,
    optimizer: str = NONE,
    optimizer_options: Mapping[str, Any] | None = None,
) -> Program:
    """The local training ``name`` of a submodel, its update coded by ``codec``.

    A codec that belongs to a local training has it in place of ``sgd`` (:func:`trained_by`). ``optimizer``: one of the
    server's, ``none`` for what the program itself says. ConfigError where program, codec and kind do not go together.
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
    program = catalog.build(name, objective, **options)
    if program.inference is not None and submodel.prefix:
        raise combination_error(
            f"program {name!r} computes with its weights in a form of its own, and a tier with frozen units would run these "
            "as they are; choose another program, or a kind that trains the whole depth, such as width",
            program=name,
            kind=_kind(submodel),
        )
    program = with_optimizer(program, optimizer, **(optimizer_options or {}))
    _check_server_state(program, submodel)
    _check_carry(program, submodel)
    return applied(codec, program, objective)


def with_shorter(program: Program, others: Mapping[int, Program]) -> Program:
    """``program`` with the steps of ``others`` for samples of so many tokens, ascending: the same training otherwise.

    Batches are then of like length where they were walked through. ConfigError for a program whose exchanges or passes
    over the data are several: their batches are not drawn by length.
    """
    if not others:
        return program
    if len(program.exchanges) > 1 or any(phase.over_data for phase in program.phases):
        raise ConfigError(
            f"program {program.name!r} has several exchanges or passes over the data, for which there are no graphs by "
            "length; leave data.lengths empty, or choose another program",
            program=program.name,
        )
    phases = tuple(
        replace(
            phase,
            shorter={
                length: replace(others[length].phases[place].function, name=f"{phase.function.name}.{length}")
                for length in sorted(others)
            },
        )
        for place, phase in enumerate(program.phases)
    )
    return replace(program, phases=phases, draws="length" if program.draws == "walk" else program.draws)


def trained_by(codec: Codec, name: str, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The program and its options: the ones that were asked for, or the one in place of sgd that the codec belongs to."""
    training = codec.training
    if training is None:
        return name, dict(options)
    if name not in (DEFAULT_PROGRAM, training.program):
        raise combination_error(
            f"codec {codec.name!r} goes with the local training {training.program!r}, and program.name is {name!r}; "
            "leave program.name out, or choose a codec that codes the result of any training",
            program=name,
            codec=codec.name,
        )
    return training.program, {**options, **training.options}


def _kind(submodel: Submodel) -> str:
    """Return the name of the kind in the table of combinations."""
    if submodel.kind == "output_side" and not submodel.prefix:
        return WHOLE
    return ROLLING if submodel.kind == "width" and submodel.moves else submodel.kind


def check_lies_like_weights(program: Program, submodel: Submodel) -> None:
    """What devices read or send of the server's state lies where the weights lie: ConfigError if these do not lie there as
    tensors, in the same place in each round."""
    carrier = submodel.carrier
    if submodel.moves or (carrier is not None and set(carrier.update) - set(Objective.of(submodel).weights)):
        raise combination_error(
            f"program {program.name!r} shares {', '.join(program.server_state)} of every parameter with the devices, and "
            f"kind {submodel.kind!r} holds single entries or others in each round; choose output_side or "
            "width without rolling",
            program=program.name,
            kind=_kind(submodel),
        )


def state_read(exchange: Program, names: Mapping[str, float]) -> tuple[str, ...]:
    """Which of the server's states ``names`` devices get in an exchange."""
    ports = (*exchange.start.inputs, *exchange.finish.inputs)
    labels = [name.partition(".")[2] for name in ports if role_of(name) == "weights"]
    return tuple(name for name in server_state.states_of(labels, names) if name != server_state.WEIGHTS)


def _check_server_state(program: Program, submodel: Submodel) -> None:
    if any(state_read(exchange, program.server_state) for exchange in program.exchanges):
        check_lies_like_weights(program, submodel)


def _check_carry(program: Program, submodel: Submodel) -> None:
    """What a device keeps of every entry is of no use where it holds others in the next round."""
    ports = [name for each in program.exchanges for name in (*each.start.inputs, *each.finish.inputs)]
    if submodel.moves and any(role_of(name) == "carry" for name in ports):
        raise combination_error(
            f"program {program.name!r} keeps something of every entry on each device, and kind {submodel.kind!r} holds "
            "other entries in each round; choose another program, or a kind that stays in its place: output_side or width "
            "without rolling",
            program=program.name,
            kind=_kind(submodel),
        )
