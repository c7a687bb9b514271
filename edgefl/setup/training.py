"""What a tier's devices run: the program with its codec and optimizer, its exchanges, and what they read."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from edgefl.codecs import catalog as codecs
from edgefl.codecs.apply import applied
from edgefl.codecs.codec import Codec
from edgefl.config import Federation
from edgefl.contract import server_state as memory
from edgefl.contract.program import Program
from edgefl.contract.tensors import role_of
from edgefl.models.spec import ModelSpec
from edgefl.objective.objective import Objective
from edgefl.optimizers import with_optimizer
from edgefl.programs import catalog
from edgefl.programs.submodels.frozen_forward import chunk_forward
from edgefl.submodels.submodel import Submodel
from edgefl.wire.errors import ConfigError
from exporters.bundle.build import Prefix

FORWARD_BATCH = 32
"""Rows per group in a frozen forward pass (EmbracingFL Algorithm 1, b)."""


def fetched(submodel: Submodel, tier: str, kept: Collection[str] = ()) -> tuple[str, ...]:
    """Names under which the weights to train are published: units that tiers share, or the tier's own payload; and those
    of the server's memories ``kept``."""
    if not submodel.units:
        own = f"{tier}/submodel"
        return (own, *(f"{own}/{name}" for name in kept))
    return (*submodel.units, *memory.units_of(kept, submodel.units, trained_names(submodel.spec)))


def trained_names(spec: ModelSpec) -> tuple[str, ...]:
    """The parameters that gradients move: each has a place in the server's memory."""
    named = spec.module.named_parameters(remove_duplicate=False)
    return tuple(name for name, parameter in named if parameter.requires_grad)


def functions(federation: Federation, submodel: Submodel) -> tuple[Program, list[Prefix]]:
    """What a bundle holds, before it is exported: the program of the trained units, and the frozen chunks."""
    prefix = [
        Prefix(chunk.units, chunk_forward(chunk.module, chunk.sample, batch=FORWARD_BATCH))
        for chunk in submodel.prefix
    ]
    return program_of(federation, submodel), prefix


def program_of(federation: Federation, submodel: Submodel) -> Program:
    """The local training of a submodel, its update coded. ConfigError where program, codec and kind do not go together."""
    codec = codecs.build(federation.codec.name, **federation.codec.options)
    if codec.feedback and submodel.moves:
        raise ConfigError(
            f"codec {codec.name!r} keeps on each device what coding lost of every entry, and kind {submodel.kind!r} holds "
            "other entries in each round; choose a codec without feedback, or a kind that stays in its place",
            codec=codec.name,
            kind=submodel.kind,
        )
    objective = Objective.of(submodel)
    name, options = _trained_by(codec, federation)
    program = catalog.build(name, objective, **options)
    if program.own_inference and submodel.prefix:
        raise ConfigError(
            f"program {name!r} computes with its weights in a form of its own, and a tier with frozen units would run these "
            "as they are; choose another program, or a kind that trains the whole depth, such as width",
            program=name,
            kind=submodel.kind,
        )
    optimizer = federation.optimizer
    if optimizer.name != "none":
        program = with_optimizer(program, optimizer.name, **optimizer.options)
    _check_memory(program, submodel)
    _check_carry(program, submodel)
    return applied(codec, program, objective)


def _check_memory(program: Program, submodel: Submodel) -> None:
    if any(reads(exchange, program.memory) for exchange in program.exchanges):
        check_lies_like_weights(program, submodel)


def check_lies_like_weights(program: Program, submodel: Submodel) -> None:
    """What devices read or send of the server's memory lies where the weights lie: ConfigError if these do not lie there as
    tensors, in the same place in each round."""
    carrier = submodel.carrier
    if submodel.moves or (carrier is not None and set(carrier.update) - set(Objective.of(submodel).weights)):
        raise ConfigError(
            f"program {program.name!r} shares {', '.join(program.memory)} of every parameter with the devices, and kind "
            f"{submodel.kind!r} holds single entries or others in each round; choose output_side or width without rolling",
            program=program.name,
            kind=submodel.kind,
        )


def _check_carry(program: Program, submodel: Submodel) -> None:
    """What a device keeps of every entry is of no use where it holds others in the next round."""
    ports = [name for each in program.exchanges for name in (*each.start.inputs, *each.finish.inputs)]
    if submodel.moves and any(role_of(name) == "carry" for name in ports):
        raise ConfigError(
            f"program {program.name!r} keeps something of every entry on each device, and kind {submodel.kind!r} holds "
            "other entries in each round; choose another program, or a kind that stays in its place: output_side or width "
            "without rolling",
            program=program.name,
            kind=submodel.kind,
        )


def _trained_by(codec: Codec, federation: Federation) -> tuple[str, dict[str, Any]]:
    """The program and its options: the federation's own, or the one in place of sgd that the codec belongs to."""
    table, training = federation.program, codec.training
    if training is None:
        return table.name, table.arguments
    if table.name not in ("sgd", training.program):
        raise ConfigError(
            f"codec {codec.name!r} goes with the local training {training.program!r}, and program.name is {table.name!r}; "
            "leave program.name out, or choose a codec that codes the result of any training",
            codec=codec.name,
            program=table.name,
        )
    return training.program, {**table.arguments, **training.options}


def exchange_names(program: Program) -> tuple[str, ...]:
    """What files and people call the exchanges of a program, in their order: "" is the main one."""
    return (*_numbered("opening", len(program.opening)), *_numbered("ahead", len(program.ahead)), "")


def _numbered(word: str, count: int) -> list[str]:
    return [word] if count == 1 else [f"{word}-{number}" for number in range(1, count + 1)]


def exchange_of(program: Program, name: str) -> Program:
    """The exchange of that name (:func:`exchange_names`); ConfigError if the program has none."""
    names = exchange_names(program)
    if name not in names:
        raise ConfigError(
            f"program {program.name!r} has no exchange {name!r}, but {', '.join(repr(each) for each in names)}",
            program=program.name,
            exchange=name,
        )
    return program.exchanges[names.index(name)]


def reads(exchange: Program, kept: Collection[str]) -> tuple[str, ...]:
    """The server's memories that devices get in an exchange."""
    ports = (*exchange.start.inputs, *exchange.finish.inputs)
    labels = [name.partition(".")[2] for name in ports if role_of(name) == "weights"]
    return tuple(name for name in memory.memories(labels, kept) if name != memory.WEIGHTS)
