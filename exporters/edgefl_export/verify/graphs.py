"""Verification of exported graphs: each runs once in its runtime, beside torch, before it is published."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnxruntime
import torch

from edgefl.contract.algorithm import Function
from edgefl.errors import ExportError
from edgefl.wire.bundle.graphs import RowRange, parse_rows
from edgefl.wire.bundle.variants import differ
from edgefl_export.artifact import REWRITTEN, artifacts_in, is_page
from edgefl_export.verify.rounding import Array, ReferenceResults, distance, judge_wide, wide_example

# Float32 sums in another order differ by about 1e-6 of the largest entry; a wrong formula by far more.
RELATIVE = 1e-4
# A tensor that is zero in exact arithmetic (a gradient behind batch norm) is rounding noise in both.
ABSOLUTE = 1e-6
# Where rounding decides, the graph may stray from float64 this many times as far as torch does in float32.
FACTOR = 2.0
# Kinks of deep models move torch's float32 by a percent. Where it strays further, relative to the largest entry, a
# wrong formula would hide behind it.
CEILING = 5e-2
# But not behind a graph that is itself so close to float64.
CLOSE = 1e-2


@dataclass(frozen=True)
class ComparisonRules:
    """Strictness of a comparison with torch.

    Attributes:
        attempts: number of examples to try until one agrees without the excuse of rounding.
        forgiven: number of examples that may differ slightly more than rounding explains. At a kink, such as that of ReLU,
            a graph may take a branch that no float32 run of torch takes; a wrong formula fails on all examples.
        double: measure rounding by a float64 run of torch. If false, float32 runs on slightly changed examples measure it,
            because float64 would take most of the time of compiling a deep model.
    """

    attempts: int
    forgiven: int
    double: bool


THOROUGH = ComparisonRules(attempts=3, forgiven=1, double=True)
# Nothing is forgiven: what strays is looked at thoroughly.
QUICK = ComparisonRules(attempts=2, forgiven=0, double=False)

Run = Callable[[Mapping[str, Array]], Sequence[Array] | Mapping[str, Array]]
"""Function that runs a loaded graph: arrays by port name in (others are ignored), outputs in graph order or by name out."""

REDRAWS = 3
"""Number of times that new examples are drawn if torch returns NaN, such as the loss of a batch without valid labels."""


@dataclass(frozen=True)
class Verification:
    """Result of comparing a graph with torch on one example.

    Attributes:
        function: name of the function.
        seed: seed of the example.
        errors: largest error of each output relative to its largest entry. It is the difference from torch in float32 or,
            if that exceeds the tolerance, from torch in float64. For integers it is the share of entries that differ.
        set_aside: seeds of other examples that were tried, on which rounding had more influence.
        rounding: outputs whose error exceeds the tolerance but is explained by rounding, with the relative error of
            torch's own float32 run on the same example.
        found: outputs of the runtime on the example.
    """

    function: str
    seed: int
    errors: Mapping[str, float]
    set_aside: tuple[int, ...] = ()
    rounding: Mapping[str, float] = field(default_factory=dict)
    found: Mapping[str, Array] = field(default_factory=dict, repr=False, compare=False)

    @property
    def worst(self) -> float:
        """Largest of :attr:`errors`, 0 if there are none. At most ``RELATIVE`` if rounding excused no output."""
        return max(self.errors.values(), default=0.0)


def verify(
    function: Function, model: bytes, seed: int, in_place: Collection[str] = (), *, quick: bool = False
) -> Verification:
    """Run ``model`` in onnxruntime on an example and compare all outputs with torch.

    An output passes if it agrees within the tolerance with torch in float32 or in float64. It also passes if its
    distance from float64 is at most ``FACTOR`` times that of torch's float32. This excuse is weak. So other examples are
    tried for one that does not need it (:class:`ComparisonRules`), and the relative error of torch must be at most
    ``CEILING`` or that of the graph at most ``CLOSE``. If even the excuse fails on one example by at most ``CEILING``,
    all others have to pass.

    Args:
        function: the function that the graph computes.
        model: bytes of an ONNX graph, or of joined segments.
        seed: seed of the first example.
        in_place: state ports that the graph writes into the memory of their input, as on a device.
        quick: as in :func:`compare`.

    Raises:
        ExportError: if an output differs. The error names the first such output, its error and the allowed one; the
            detail ``worst`` is the largest relative error of all outputs. Also if the graph does not load or run, or if
            the excuse is needed and two runs of torch on one example differ.
    """
    return compare(function, load(function, model, in_place), seed, quick=quick)


def compare(function: Function, run: Run, seed: int, *, quick: bool = False) -> Verification:
    """Compare a graph in any runtime with torch, by the rules of :func:`verify`.

    Args:
        function: the function that the graph computes.
        run: function that runs the graph.
        seed: seed of the first example.
        quick: first measure rounding by float32 runs alone; use float64 only if the graph fails that comparison.

    Raises:
        ExportError: if an output differs from torch by more than rounding explains, or if ``run`` fails.
    """
    _compare_wide(function, run, seed)
    if quick:
        try:
            return _compare_examples(function, run, seed, QUICK)
        except ExportError:
            pass  # float64 decides
    return _compare_examples(function, run, seed, THOROUGH)


def _compare_wide(function: Function, run: Run, seed: int) -> None:
    """Raise ExportError if the graph differs from torch on samples of several magnitudes.

    Does nothing if the function has no such example (:func:`edgefl_export.verify.rounding.wide_example`).
    """
    if (wide := wide_example(function, seed)) is None:
        return
    example, yardstick = wide
    outputs = order_outputs(run({name: value.numpy() for name, value in example.items()}), yardstick.plain)
    for name, found in zip(yardstick.plain, outputs, strict=False):
        judge_wide(function, name, found, yardstick)


def _compare_examples(
    function: Function, run: Run, seed: int, care: ComparisonRules, redraws: int = REDRAWS
) -> Verification:
    reports: list[Verification] = []
    strayed: list[ExportError] = []
    for attempt in range(seed, seed + care.attempts):
        try:
            reports.append(_judge_example(function, run, attempt, double=care.double, proven=bool(reports)))
        except ExportError as error:
            if redraws and not error.details.get("finite", True):
                return _compare_examples(function, run, seed + care.attempts, care, redraws - 1)
            strayed.append(error)
            if len(strayed) > care.forgiven or not 0 <= _relative(error) <= CEILING:
                raise strayed[0] from None
            continue
        if not reports[-1].rounding and not strayed:
            break
    # Nothing beyond the ceiling, then the fewest outputs left to rounding, then the smallest errors.
    best = min(
        reports, key=lambda report: (bool(_undecided_outputs(report)), len(report.rounding), report.worst)
    )
    if unjudged := _undecided_outputs(best):
        raise _undecidable(function, unjudged[0], best)
    tried = range(seed, seed + len(reports) + len(strayed))
    return replace(best, set_aside=tuple(each for each in tried if each != best.seed))


def _judge_example(function: Function, run: Run, seed: int, *, double: bool, proven: bool) -> Verification:
    example = function.example(seed)
    yardstick = ReferenceResults(function, example, double=double, proven=proven)
    expected = yardstick.plain
    outputs = order_outputs(run({name: value.numpy() for name, value in example.items()}), expected)
    if len(outputs) != len(expected):
        raise ExportError(
            f"the graph of function {function.name!r} has {len(outputs)} outputs, torch gives {list(expected)}",
            function=function.name,
        )
    errors: dict[str, float] = {}
    rounding: dict[str, float] = {}
    wrong: list[ExportError] = []
    for (name, value), result in zip(expected.items(), outputs, strict=True):
        try:
            errors[name], strayed = _judge(function, name, value, result, yardstick)
        except ExportError as error:
            wrong.append(error)
            continue
        if strayed is not None:
            rounding[name] = strayed
    if wrong:
        wrong[0].details["worst"] = max(map(_relative, wrong))
        value = expected[str(wrong[0].details["output"])]
        wrong[0].details["finite"] = value.dtype.kind != "f" or bool(np.isfinite(value).all())
        raise wrong[0]
    found = dict(zip(expected, outputs, strict=True))
    return Verification(function.name, seed, errors, rounding=rounding, found=found)


def _undecided_outputs(report: Verification) -> list[str]:
    """Return the names of outputs that cannot be judged, because torch's float32 itself is too far from float64."""
    return [
        name for name, strayed in report.rounding.items() if strayed > CEILING and report.errors[name] > CLOSE
    ]


def _undecidable(function: Function, name: str, report: Verification) -> ExportError:
    strayed, error = report.rounding[name], report.errors[name]
    return ExportError(
        f"output {name!r} of function {function.name!r} differs from torch by {error:.3g} of its largest entry, and "
        f"torch's own float32 differs from float64 by {strayed:.3g}; up to {CEILING:g} is excused by rounding. Make "
        "the output less sensitive to rounding, or compute it in float64",
        function=function.name,
        output=name,
        relative=error,
        rounding=strayed,
        worst=report.worst,
    )


def agrees(
    function: Function, outputs: Sequence[str], load: Callable[[], Run], verification: Verification
) -> bool:
    """Return True if a variant of a verified graph runs in this runtime and has the same outputs.

    Args:
        function: the function that both graphs compute.
        outputs: names of its outputs, in order.
        load: loads the variant and returns the function that runs it; may raise ExportError, which counts as no.
        verification: result of the verified graph; the variant runs on the same example.
    """
    example = {name: value.numpy() for name, value in function.example(verification.seed).items()}
    try:
        results = order_outputs(load()(example), outputs)
    except ExportError:
        return False
    return not differ(dict(zip(outputs, results, strict=True)), verification.found, example)


def _relative(error: ExportError) -> float:
    """Return the relative error of the output that ``error`` reports; infinite for NaN or if the error has no such value."""
    relative = error.details.get("relative", math.inf)
    return relative if isinstance(relative, float) and not math.isnan(relative) else math.inf


def load(function: Function, model: bytes, in_place: Collection[str]) -> Run:
    """Load ``model``, or the segments (graphs that run one after another) that it joins, into onnxruntime and return a
    function that runs it.

    Args:
        function: the function that the graph computes, for errors.
        model: bytes of the graph.
        in_place: state ports that the graph writes into the memory of their input.

    Raises:
        ExportError: if loading fails; the returned function raises it if running fails.
    """
    sessions = [_session(function, each) for each in artifacts_in(model)]

    def run(session: Any, arrays: Mapping[str, Array]) -> list[Array]:
        try:
            return _run_bound(session, arrays, in_place)
        except Exception as error:
            raise _runtime_error(function, "run", error) from error

    if len(sessions) == 1:
        return functools.partial(run, sessions[0])

    def named(session: Any, arrays: Mapping[str, Array]) -> dict[str, Array]:
        return _by_port(session, run(session, arrays))

    return run_segments([functools.partial(named, each) for each in sessions])


def run_segments(segments: Sequence[Callable[[Mapping[str, Array]], Mapping[str, Array]]]) -> Run:
    """Return a function that runs ``segments`` in order, gives the pages that they return to later ones, and returns
    all other outputs.

    A page is an output that only later segments read.
    """

    def run(arrays: Mapping[str, Array]) -> Mapping[str, Array]:
        pages: dict[str, Array] = {}
        outputs: dict[str, Array] = {}
        for segment in segments:
            made = segment({**arrays, **pages})
            pages |= {name: array for name, array in made.items() if is_page(name)}
            outputs |= {name: array for name, array in made.items() if not is_page(name)}
        return outputs

    return run


def order_outputs(outputs: Sequence[Array] | Mapping[str, Array], names: Iterable[str]) -> Sequence[Array]:
    """Return the outputs of a run as a sequence; those of a mapping in the order of ``names``."""
    return [outputs[name] for name in names if name in outputs] if isinstance(outputs, Mapping) else outputs


def _session(function: Function, model: bytes) -> Any:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # what fails is raised, too
    options.intra_op_num_threads = max(1, torch.get_num_threads())
    try:
        return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime raises its own unrelated exception types
        raise _runtime_error(function, "load", error) from error


def _by_port(session: Any, outputs: Sequence[Array]) -> dict[str, Array]:
    """Return the outputs of a session by port name, without the suffix of state that is also an input."""
    read = {port.name for port in session.get_inputs()}
    names = [port.name for port in session.get_outputs()]
    ports = [plain if (plain := name.removesuffix(REWRITTEN)) in read else name for name in names]
    return dict(zip(ports, outputs, strict=True))


def _run_bound(session: Any, arrays: Mapping[str, Array], in_place: Collection[str]) -> list[Array]:
    """Run a session and return its outputs. Each state port in ``in_place`` is input and output in one copied array."""
    binding = session.io_binding()
    shared = {
        name: onnxruntime.OrtValue.ortvalue_from_numpy(arrays[name].copy())
        for name in in_place
        if name in arrays
    }
    for port in session.get_inputs():
        rows = parse_rows(port.name)
        name = rows.whole if rows else port.name
        if name not in shared:
            array = port_array(port.name, arrays)
            seen = array.reshape(port.shape) if rows else array
            binding.bind_cpu_input(port.name, np.asarray(seen, order="C"))
        elif rows:
            binding.bind_input(port.name, *_place(shared[name], arrays[name], rows, port.shape))
        else:
            binding.bind_ortvalue_input(port.name, shared[name])
    for port in session.get_outputs():
        rows = parse_rows(port.name)
        name = (rows.whole if rows else port.name).removesuffix(REWRITTEN)
        if name not in shared:
            binding.bind_output(port.name, "cpu")
        elif rows:
            binding.bind_output(port.name, *_place(shared[name], arrays[name], rows, port.shape))
        else:
            binding.bind_ortvalue_output(port.name, shared[name])
    session.run_with_iobinding(binding)
    names = [port.name for port in session.get_outputs()]
    values = [value.numpy().copy() for value in binding.get_outputs()]
    return join_rows(names, [_restore_rows(*each, arrays) for each in zip(names, values, strict=True)])


def _place(
    value: Any, array: Array, rows: RowRange, shape: Sequence[int]
) -> tuple[str, int, Any, list[int], int]:
    """Return the arguments that bind ``rows`` of the tensor ``value`` to a port: (device, device number, dtype, shape,
    address).

    ``array`` is the whole tensor's array, ``shape`` the port's shape.
    """
    _, address = rows.place(value.data_ptr(), array.shape, array.itemsize)
    return "cpu", 0, array.dtype.type, list(shape), address


def _restore_rows(name: str, value: Array, arrays: Mapping[str, Array]) -> Array:
    """Return ``value``, reshaped to rows of the whole tensor if port ``name`` is a range of rows."""
    rows = parse_rows(name)
    whole = arrays.get(rows.whole.removesuffix(REWRITTEN)) if rows else None
    return value if rows is None or whole is None else value.reshape(-1, *whole.shape[1:])


def port_array(name: str, arrays: Mapping[str, Array]) -> Array:
    """Return the array for port ``name``: an entry of ``arrays``, or a range of rows of one if the name says so."""
    rows = parse_rows(name)
    return arrays[rows.whole][rows.start : rows.stop] if rows else arrays[name]


def join_rows(names: Sequence[str], values: Sequence[Array]) -> list[Array]:
    """Return the outputs of a graph in order, with ports that are rows of one tensor concatenated to that tensor."""
    wholes: dict[str, list[Array]] = {}
    for name, value in zip(names, values, strict=True):
        rows = parse_rows(name)
        wholes.setdefault(rows.whole if rows else name, []).append(value)
    return [parts[0] if len(parts) == 1 else np.concatenate(parts) for parts in wholes.values()]


def _runtime_error(function: Function, verb: str, error: Exception) -> ExportError:
    return ExportError(
        f"onnxruntime {onnxruntime.__version__} cannot {verb} the graph of function {function.name!r}: {error}",
        function=function.name,
    )


def _judge(
    function: Function, name: str, expected: Array, found: Array, yardstick: ReferenceResults
) -> tuple[float, float | None]:
    """Compare output ``name`` with torch and return (relative error, relative error of torch's float32).

    The second is None if the output is within the tolerance. Raise ExportError if rounding does not excuse the error.

    Args:
        function: the function, for errors.
        name: name of the output.
        expected: torch's result in float32.
        found: result of the runtime.
        yardstick: more exact results of torch.
    """
    if (expected.shape, expected.dtype) != (found.shape, found.dtype):
        raise ExportError(
            f"output {name!r} of function {function.name!r} is {found.dtype}{list(found.shape)} in the runtime and "
            f"{expected.dtype}{list(expected.shape)} in torch",
            function=function.name,
            output=name,
        )
    if expected.size == 0:
        return 0.0, None
    if expected.dtype.kind != "f":
        return _judge_whole(function, name, expected, found, yardstick)
    scale = float(np.max(np.abs(expected)))
    tolerance = RELATIVE * scale + ABSOLUTE
    # Not "error > tolerance", here and below: NaN is never accepted.
    if (error := distance(expected, found)) <= tolerance:
        return (error / scale if scale else error), None
    if (error := distance(yardstick.exact[name], found)) <= tolerance:
        return (error / scale if scale else error), None
    unit, allowed = max(scale, ABSOLUTE), tolerance
    for strayed in yardstick.strays(name):
        allowed = tolerance + FACTOR * strayed
        if error <= allowed:
            return error / unit, strayed / unit
    why = f"{RELATIVE:g} of the largest entry, {scale:.3g}, and what torch loses by rounding"
    raise _wrong(function, name, error, allowed, error / unit, why)


def _judge_whole(
    function: Function, name: str, expected: Array, found: Array, yardstick: ReferenceResults
) -> tuple[float, float | None]:
    """Compare an integer output with torch and return (share that differs, share that differs between runs of torch).

    The second is None if all entries are equal. Entries may differ only as far as rounding moves floats across a
    threshold; else ExportError is raised. Arguments as in :func:`_judge`.
    """
    differing, allowed = distance(expected, found), 0.0
    if not differing:
        return 0.0, None
    for strayed in yardstick.strays(name):
        allowed = FACTOR * strayed
        if differing <= allowed and strayed <= CEILING * expected.size:
            return differing / expected.size, strayed / expected.size
    raise _wrong(function, name, differing, allowed, math.inf, f"{differing:.0f} whole numbers differ")


def _wrong(
    function: Function, name: str, error: float, tolerance: float, relative: float, why: str
) -> ExportError:
    return ExportError(
        f"output {name!r} of function {function.name!r} differs from torch by {error:.3g}, allowed are "
        f"{tolerance:.3g} ({why}); the rule of one of its ops is wrong",
        function=function.name,
        output=name,
        error=error,
        tolerance=tolerance,
        relative=relative,
    )
