"""A tier's bundle: every function of its round exported, checked against torch, and listed in a manifest."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from edgefl.programs.contract import Function, Program, TensorSpec, prefixed, role_of
from edgefl.wire.blobs import describe
from edgefl.wire.bundle import Bundle
from edgefl.wire.errors import ExportError
from edgefl.wire.limits import Limits
from edgefl.wire.manifest import Chunk, DataSpec, Graph, Manifest, PhaseSpec, Port
from exporters.capture import capture
from exporters.onnx import to_onnx
from exporters.recompute import Budget, within
from exporters.verify import verify
from exporters.wiring import check_wiring

VERIFY_SEED = 1


@dataclass(frozen=True)
class Prefix:
    """One frozen chunk: its units and the function that runs them forward."""

    units: tuple[str, ...]
    forward: Function


@dataclass(frozen=True)
class Label:
    """What people read on a bundle."""

    model: str
    tier: str


def build_bundle(
    program: Program,
    prefix: Sequence[Prefix],
    suffix: tuple[str, ...],
    *,
    label: Label,
    data: DataSpec,
    chunk_bytes: int = Limits().chunk_bytes,
    memory_budget: Budget | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Bundle:
    """Export ``program`` behind ``prefix`` for a device that trains the units ``suffix``.

    ``memory_budget`` bounds the steps: they recompute what it takes. Every graph is run once in onnxruntime and
    compared with torch before the bundle exists. Raises ExportError, also if the functions do not fit together (a
    step reads a state that nobody left). Equal functions give equal bytes, so tiers share graphs by their digest.
    """
    blobs: dict[str, bytes] = {}

    steps = {phase.function.name for phase in program.phases}

    def add(name: str, function: Function) -> Graph:
        progress(f"{label.model}, tier {label.tier}: graph {name}")
        captured = capture(function)
        budget = 0
        if memory_budget is not None and name in steps:
            budget = memory_budget.of(captured)
            captured = within(captured, budget)
        model = to_onnx(captured)
        verify(function, model, VERIFY_SEED)
        ref = describe(model, chunk_bytes)
        blobs[ref.sha256] = model
        masks = program.masks if name == program.finish.name else {}
        inputs, outputs = ports(captured.inputs), ports(captured.outputs, masks)
        return Graph(name=name, format="onnx", blob=ref, inputs=inputs, outputs=outputs, memory_budget=budget)

    chunks = [(f"forward.{number}", chunk) for number, chunk in enumerate(prefix, 1)]
    graphs = [add(name, chunk.forward) for name, chunk in chunks]
    graphs += [add(name, function) for name, function in _named(program).items()]
    manifest = Manifest(
        model=label.model,
        program=program.name,
        tier=label.tier,
        parameters=trained_entries(program),
        data=data,
        batch=batch_size(program),
        prefix=tuple(Chunk(units=chunk.units, graph=name) for name, chunk in chunks),
        suffix=suffix,
        start=program.start.name,
        phases=tuple(
            PhaseSpec(name=phase.name, graph=phase.function.name, steps=phase.steps)
            for phase in program.phases
        ),
        finish=program.finish.name,
        evaluate=program.evaluate.name,
        hyper=dict(program.hyper),
        graphs=tuple(graphs),
        codec=program.form.codec,
        codec_version=program.form.version,
    )
    check_wiring(manifest)
    return Bundle(manifest, blobs)


def _named(program: Program) -> dict[str, Function]:
    """The functions by name; phases may share one, but two may not share a name."""
    named: dict[str, Function] = {}
    for function in program.functions:
        if named.setdefault(function.name, function) is not function:
            raise ExportError(
                f"program {program.name!r} has two functions named {function.name!r}; give each its own name",
                program=program.name,
                function=function.name,
            )
    return named


def ports(specs: Mapping[str, TensorSpec], masks: Mapping[str, int] | None = None) -> tuple[Port, ...]:
    """Named tensors as a manifest tells them; ``masks`` names the packed bits among an update's, with their number."""
    packed = prefixed("update", masks or {})
    return tuple(
        Port(
            name=name,
            role=role_of(name),  # type: ignore[arg-type]
            dtype=str(spec.dtype).removeprefix("torch."),
            shape=spec.shape,
            mask=packed.get(name, 0),
        )
        for name, spec in specs.items()
    )


def batch_size(program: Program) -> int:
    """Rows of the batch ports of the steps; the same for all of them."""
    sizes = {
        spec.shape[0]
        for phase in program.phases
        for name, spec in phase.function.inputs.items()
        if role_of(name) == "batch"
    }
    if len(sizes) != 1:
        raise ExportError(
            f"the batches of program {program.name!r} should have one size, found {sorted(sizes)}",
            sizes=sizes,
        )
    return sizes.pop()


def trained_entries(program: Program) -> int:
    """Entries the device sends back, moving statistics included."""
    state = program.finish.inputs
    weights = [spec for name, spec in state.items() if name.startswith("state.weights.")]
    return sum(math.prod(spec.shape) for spec in weights)
