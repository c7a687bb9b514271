"""The formats in which a bundle's graphs can be written: what captures, writes and checks them for each.

::

    form = format_of("onnx")
    captured = form.capture(algorithm.finish)
    artifact = form.write(captured)             # what a device loads, and what it costs
    form.verify(algorithm.finish, artifact.model, seed=1)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from importlib import metadata
from typing import TYPE_CHECKING, Protocol

import onnx
from google.protobuf.message import DecodeError

from edgefl.contract.algorithm import Function
from edgefl.errors import BundleError, ConfigError, ExportError
from edgefl.system.distribution import install
from edgefl.wire.bundle.formats import EXECUTORCH_DTYPES, FormatName, Outputs
from edgefl.wire.bundle.manifest import Graph, Port
from edgefl.wire.bundle.variants import strays
from edgefl_export.artifact import Artifact, artifacts_in, in_segments, is_page
from edgefl_export.capture.trace import Captured, Joint
from edgefl_export.memory.budget import within_onnx
from edgefl_export.memory.predict import predicted_arena, predicted_peak
from edgefl_export.memory.recompute import Budget, lean_and_peak
from edgefl_export.memory.usage import rewritable
from edgefl_export.onnx import capture_for
from edgefl_export.onnx.blocked import blocked
from edgefl_export.onnx.blocked.updates import summed
from edgefl_export.onnx.ops import OPSET
from edgefl_export.onnx.rows import by_rows
from edgefl_export.onnx.tiled import tiled
from edgefl_export.releases import least_onnxruntime
from edgefl_export.sources.blob import graph_nodes, onnx_nodes
from edgefl_export.verify.graphs import Run, Verification, in_order, load, verify

if TYPE_CHECKING:
    from edgefl_export.executorch.check.isolated import IsolatedRunner
    from edgefl_export.executorch.check.ports import TensorPort

# Whether another form of a graph computes what the graph does, before anybody downloads it.


def agree(captured: Captured, load: Callable[[], Run], verified: Verification) -> bool:
    """Whether the form of ``captured`` that ``load`` gives runs here, and makes what another one did of the example on
    which that was ``verified``."""
    example = {name: value.numpy() for name, value in captured.function.example(verified.seed).items()}
    try:
        outputs = in_order(load()(example), captured.outputs)
    except ExportError:  # its ops are not in this runtime
        return False
    return not strays(dict(zip(captured.outputs, outputs, strict=True)), verified.found, example)


BLOCKED, ROWS = "blocked", "rows"
"""Other forms of an ONNX model: :mod:`edgefl_export.onnx.blocked`, and by rows :mod:`edgefl_export.onnx.rows` and
:mod:`edgefl_export.onnx.tiled`. Of a program by rows: :mod:`edgefl_export.executorch.program.rows`."""


class Format(Protocol):
    """One way to write the functions of an algorithm, for the engines that read it."""

    @property
    def name(self) -> FormatName: ...

    @property
    def version(self) -> str:
        """Of the packages beside edgefl and torch that decide the bytes; "" if there is none."""

    def capture(self, function: Function, joint: Joint | None = None) -> Captured:
        """The function's graph as this format wants it; ExportError says which part of the contract it breaks."""

    def write(self, captured: Captured) -> Artifact:
        """Equal graphs give equal bytes. ExportError names an op that cannot be expressed and its source line."""

    def write_within(self, captured: Captured, budget: Budget) -> tuple[Artifact, int]:
        """:meth:`write` with as much recomputation as ``budget`` asks for, in segments that page where that is not enough,
        and the budget in bytes; ExportError with the smallest peak if none fits."""

    def verify(
        self,
        function: Function,
        model: bytes,
        seed: int,
        in_place: Collection[str] = (),
        *,
        quick: bool = False,
    ) -> Verification:
        """Run ``model`` in the runtime of this format beside torch; ExportError if it strays (edgefl_export.verify.graphs).

        The state ``in_place`` is written where it is read, if that runtime can be told to. ``quick`` takes torch's word
        in float32 for what rounding does, as long as that excuses the graph.
        """

    def verify_again(
        self, function: Function, model: bytes, seed: int, in_place: Collection[str] = ()
    ) -> Verification:
        """:meth:`verify` for a model that was not written here just now: a damaged one is an ExportError, whatever it
        does to the runtime."""

    def variants(self, captured: Captured, artifact: Artifact, verified: Verification) -> dict[str, bytes]:
        """Other forms of the artifact, by name, each tried here beside it, on the example on which it was
        ``verified``: devices may take the one that is fastest."""

    def differs(self, graph: Graph, model: bytes) -> str:
        """What ``model`` reads and the manifest's ``graph`` does not say, or the other way round; "" if they agree."""


class Onnx:
    """ONNX models for onnxruntime, on devices and in browsers."""

    name: FormatName = "onnx"
    version = ""

    def capture(self, function: Function, joint: Joint | None = None) -> Captured:
        return capture_for(function, joint)

    def write(self, captured: Captured) -> Artifact:
        return self._exported(*lean_and_peak(captured))

    def _exported(self, captured: Captured, peak: int | None = None) -> Artifact:
        """``peak``: the one that is predicted, where that was done before."""
        from edgefl_export.onnx.model import (  # with torch.onnx, a second that only who compiles waits for
            IR_VERSION,
            to_onnx,
        )

        model = to_onnx(captured)
        nodes = onnx_nodes(captured, model)
        peak = predicted_peak(captured) if peak is None else peak
        least = least_onnxruntime(OPSET, IR_VERSION)
        arena = predicted_arena(captured)
        return Artifact(model, peak, rewritable(captured), nodes, least_runtime=least, arena_bytes=arena)

    def write_within(self, captured: Captured, budget: Budget) -> tuple[Artifact, int]:
        form, count = within_onnx(captured, budget)
        if len(form) == 1:
            return self._exported(form[0]), count
        parts = [(each.inputs, each.outputs, self._exported(each)) for each in form]
        nodes = graph_nodes(captured, captured.module.graph)
        return in_segments(parts, predicted_peak(*form), nodes), count

    def verify(
        self,
        function: Function,
        model: bytes,
        seed: int,
        in_place: Collection[str] = (),
        *,
        quick: bool = False,
    ) -> Verification:
        return verify(function, model, seed, in_place, quick=quick)

    def verify_again(
        self, function: Function, model: bytes, seed: int, in_place: Collection[str] = ()
    ) -> Verification:
        return self.verify(function, model, seed, in_place)

    def variants(self, captured: Captured, artifact: Artifact, verified: Verification) -> dict[str, bytes]:
        """Of a runtime here that cannot run one, there is none: nobody would have tried it. Nor are there any of segments,
        which are for devices that have no memory to try them with."""
        if artifact.parts:
            return {}
        in_blocks = blocked(artifact.model)
        forms = {
            BLOCKED: in_blocks,
            ROWS: _in_rows(artifact.model),
            f"{BLOCKED}, {ROWS}": _in_rows(in_blocks) if in_blocks else None,
        }
        chosen: dict[str, bytes] = {}
        for name, form in forms.items():
            sums = summed(form) if form and BLOCKED in name else None
            for each in filter(None, (sums, form)):
                if agree(captured, partial(load, captured.function, each, artifact.in_place), verified):
                    chosen[name] = each
                    break
        return chosen

    def differs(self, graph: Graph, model: bytes) -> str:
        try:
            models = [onnx.load_from_string(each) for each in artifacts_in(model)]
            read = {value.name for each in models for value in each.graph.input if not is_page(value.name)}
        except (BundleError, DecodeError):
            return f"graph {graph.name!r} is no ONNX model; export the bundle again"
        listed = {port.name for port in graph.inputs}
        if missing := sorted(read - listed):
            return f"the graph reads {', '.join(missing)}, which the manifest does not list"
        if extra := sorted(listed - read):
            return f"the manifest lists {', '.join(extra)}, which the graph does not read"
        return ""


def _in_rows(model: bytes) -> bytes | None:
    """The model with its updates and its chains some rows at a time; None where it has neither."""
    updated = by_rows(model)
    return tiled(updated or model) or updated


class ExecuTorch:
    """ExecuTorch programs for phones. Its package is needed to write and check them: the extra ``executorch``.

    Each method imports what it needs: that takes a second, and a bare installation lacks what they ask for.

    ``outputs``: ``caller``, whoever calls a program gives the memory of its outputs, or ``planned``, the program has it: for
    callers that can only load and execute.
    """

    name: FormatName = "executorch"

    def __init__(self, outputs: Outputs = "caller") -> None:
        self._isolated: IsolatedRunner | None = None
        self._planned = outputs == "planned"
        try:
            self.version = metadata.version("executorch") + (", planned outputs" if self._planned else "")
        except metadata.PackageNotFoundError as error:
            raise ConfigError(
                f"graphs in format 'executorch' need the package executorch: {install('executorch')}, or choose "
                "format 'onnx'",
                format=self.name,
            ) from error

    def capture(self, function: Function, joint: Joint | None = None) -> Captured:
        from edgefl_export import executorch

        return executorch.capture_for(function, joint)

    def write(self, captured: Captured) -> Artifact:
        from edgefl_export.executorch.program.write import to_executorch

        return to_executorch(captured, planned_outputs=self._planned)

    def write_within(self, captured: Captured, budget: Budget) -> tuple[Artifact, int]:
        from edgefl_export.executorch.program.budget import within as program_within

        return program_within(captured, budget, planned_outputs=self._planned)

    def verify(
        self,
        function: Function,
        model: bytes,
        seed: int,
        in_place: Collection[str] = (),
        *,
        quick: bool = False,
    ) -> Verification:
        from edgefl_export.executorch.check import programs

        return programs.verify(function, model, seed, quick=quick)

    def verify_again(
        self, function: Function, model: bytes, seed: int, in_place: Collection[str] = ()
    ) -> Verification:
        """In a process of its own, which lives as long as this format."""
        from edgefl_export.executorch.check import isolated, programs

        self._isolated = self._isolated or isolated.IsolatedRunner()
        return programs.verify_isolated(function, model, seed, self._isolated)

    def variants(self, captured: Captured, artifact: Artifact, verified: Verification) -> dict[str, bytes]:
        from edgefl_export.executorch.check import programs
        from edgefl_export.executorch.program.write import in_rows

        form = in_rows(captured, artifact)
        if form is None or not agree(captured, partial(programs.load, captured.function, form), verified):
            return {}
        return {ROWS: form}

    def differs(self, graph: Graph, model: bytes) -> str:
        """Their names, which the writer left in the program, and what a device is told that stands at each place."""
        from edgefl_export.executorch.check.ports import read_ports

        try:
            inputs, outputs = read_ports(model)
        except ValueError as error:
            return f"graph {graph.name!r} is no ExecuTorch program with a method 'forward' ({error}); export it again"
        names = [port.name for port in inputs], [port.name for port in outputs]
        listed = [port.name for port in graph.inputs], [port.name for port in graph.outputs]
        if names != listed:
            return f"the graph has the ports {_told(names)}, the manifest lists {_told(listed)}"
        return _unlike("input", graph.inputs, inputs) or _unlike("output", graph.outputs, outputs)


FORMATS: dict[FormatName, type[Format]] = {"onnx": Onnx, "executorch": ExecuTorch}


def format_of(name: str, outputs: Outputs = "caller") -> Format:
    """The format of that name; ``outputs`` as of :class:`ExecuTorch`, which alone has a choice. ConfigError if there is
    none, or if its package is not installed."""
    factory = FORMATS.get(name)  # type: ignore[call-overload]
    if factory is None:
        raise ConfigError(f"no format {name!r}; there are: {', '.join(FORMATS)}", format=name)
    made: Format = ExecuTorch(outputs) if factory is ExecuTorch else factory()
    return made


def check_installed(names: Iterable[str]) -> None:
    """ConfigError for the first of these formats that cannot be written here, with what to install."""
    for name in names:
        format_of(name)


def _told(ports: tuple[list[str], list[str]]) -> str:
    return " -> ".join(", ".join(names) for names in ports)


def _unlike(kind: str, listed: tuple[Port, ...], found: Sequence[TensorPort]) -> str:
    for port, tensor in zip(listed, found, strict=True):
        claim = f"{port.dtype}{list(port.shape)}"
        has = f"{EXECUTORCH_DTYPES.get(tensor.dtype, tensor.dtype)}{list(tensor.shape)}"
        if claim != has:
            return f"{kind} {port.name!r} is {claim} in the manifest and {has} in the graph"
    return ""
