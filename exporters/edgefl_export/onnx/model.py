"""Writer of ONNX models: a graph of core ops in, bytes out. No other module calls torch.onnx.

The bytes hold standard ops of the default domain, no weights (they are graph inputs), the port names and static
shapes of the function, and nothing of the machine that made them: equal functions give equal bytes. The
optimizer of torch.onnx stays off, because it folds and renames; the few clean-ups below touch constants only.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator

import onnx
import onnx_ir as ir
import torch

from edgefl.errors import ExportError
from edgefl_export.artifact import REWRITTEN
from edgefl_export.capture.patches import patched
from edgefl_export.capture.trace import LoweredGraph, exported_program
from edgefl_export.capture.unsupported import check_floats, unsupported
from edgefl_export.onnx import op_tables
from edgefl_export.onnx.ops import OPSET, TRANSLATIONS
from edgefl_export.onnx.passes import PASSES

# The version that came with opset 18; an older runtime refuses a newer file even if it knows every op in it.
IR_VERSION = 9


def to_onnx(lowered: LoweredGraph) -> bytes:
    """Return the graph as a serialized ONNX model with the inputs and outputs of ``lowered``, in order.

    Raises ExportError naming the op, the module and the source line if an op or a type cannot be expressed.
    """
    check_floats(lowered)
    with patched(op_tables.protocols()):
        model = _translate(lowered)
        _clean(model)
        _separate_outputs(model.graph)
        _name_ports(lowered, model)
        _name_the_rest(model)
        proto = ir.to_proto(model)
    _check(lowered, proto)
    return bytes(proto.SerializeToString(deterministic=True))


def _translate(lowered: LoweredGraph) -> ir.Model:
    try:
        return _export(lowered, decomposed=True)
    except torch.onnx.errors.OnnxExporterError:
        pass  # an op outside the core set: let torch.onnx decompose it, which traces once more
    try:
        return _export(lowered, decomposed=False)
    except torch.onnx.errors.OnnxExporterError as error:
        raise unsupported(lowered, error) from error


def _export(lowered: LoweredGraph, decomposed: bool) -> ir.Model:
    with patched(*op_tables.patches(decomposed)), _without_warnings():
        algorithm = exported_program(lowered)
        if decomposed:
            algorithm.run_decompositions = lambda table=None: algorithm
        exported = torch.onnx.export(
            algorithm,
            opset_version=OPSET,
            custom_translation_table=TRANSLATIONS,
            optimize=False,
            verbose=False,
        )
    assert exported is not None
    return exported.model


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """Suppress warnings of torch.onnx about missing packages and annotations of nodes, which do not concern the user."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _clean(model: ir.Model) -> None:
    """Run the passes, and drop what describes the exporting machine."""
    for rewrite in PASSES:
        rewrite(model)
    model.producer_name = "edgefl"
    model.producer_version = None
    model.ir_version = IR_VERSION
    model.metadata_props.clear()
    model.graph.metadata_props.clear()


def _separate_outputs(graph: ir.Graph) -> None:
    """Give each output a value of its own: the clean-ups merge equal values, which outputs may be."""
    seen: set[ir.Value] = set()
    for index, value in enumerate(graph.outputs):
        if value in seen or value in graph.inputs:
            copy = ir.node("Identity", [value])
            copy.outputs[0].type, copy.outputs[0].shape = value.type, value.shape
            graph.append(copy)
            graph.outputs[index] = copy.outputs[0]
        seen.add(graph.outputs[index])


def output_names(lowered: LoweredGraph) -> tuple[str, ...]:
    """Return the names of the model's outputs, in the order of the ports.

    ONNX gives every value of a graph its own name, so a port that is both read and written (state) cannot have
    one name for both: the output carries a suffix then. Runtimes therefore match outputs by position.
    """
    return tuple(name + REWRITTEN if name in lowered.inputs else name for name in lowered.outputs)


def _name_ports(lowered: LoweredGraph, model: ir.Model) -> None:
    for value, name in zip(model.graph.inputs, lowered.inputs, strict=True):
        value.name = name
    specs = lowered.outputs.values()
    for value, name, spec in zip(model.graph.outputs, output_names(lowered), specs, strict=True):
        value.name = name
        value.shape = ir.Shape(spec.shape)


def _name_the_rest(model: ir.Model) -> None:
    """Give values short names by position: those of the trace are long and of no use to a device."""
    ports = {id(value) for value in (*model.graph.inputs, *model.graph.outputs)}
    constants = list(model.graph.initializers.values())
    model.graph.initializers.clear()
    for index, value in enumerate(constants):
        value.name = f"c{index}"
        model.graph.initializers[value.name] = value
    count = 0
    for index, node in enumerate(model.graph):
        node.name = f"{node.op_type}_{index}"
        for value in node.outputs:
            if id(value) not in ports and value.name:
                value.name = f"v{count}"
                count += 1


def _check(lowered: LoweredGraph, proto: onnx.ModelProto) -> None:
    """Raise ExportError if the model violates what every model of this writer must keep. That is a bug of ours."""
    inputs = [value.name for value in proto.graph.input]
    outputs = [value.name for value in proto.graph.output]
    domains = {node.domain for node in proto.graph.node} | {f.domain for f in proto.functions}
    weights = [value.name for value in proto.graph.initializer if value.name in lowered.inputs]
    if inputs != list(lowered.inputs) or outputs != list(output_names(lowered)) or domains - {""} or weights:
        raise ExportError(
            f"the ONNX form of function {lowered.name!r} lost its ports, folded a weight or uses custom ops "
            f"(domains {sorted(domains)}); report this with the function's source",
            function=lowered.name,
        )
