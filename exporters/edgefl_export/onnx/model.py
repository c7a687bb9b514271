"""Writer of ONNX models by torch.onnx, with caches for tables that torch.onnx computes again for each export and node.

onnx_ir asks of each value which protocols it meets, and Python lists a protocol's attributes for each question.
torch.onnx reads an op's schema for each node, and its 500 op functions for each export: most of a small graph's time. A
graph of core ops needs none of the decompositions that it collects, and no op that came with a later import. To find
where types are mixed it runs every op once more, without values; each node has the result already. It writes Python
code for graphs that are never run, and a description of each node that is never read. It searches every op's source for
a name that is the same for all, and converts what needs no conversion.

All of it is private to torch.onnx, onnx_ir and Python's typing and may move: then exports are slower, nothing else.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import logging
import threading
import typing
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import onnx
import onnx_ir as ir
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily

from edgefl.errors import ExportError
from edgefl_export.artifact import REWRITTEN
from edgefl_export.capture.graph import LoweredGraph, without_values
from edgefl_export.capture.patches import Patch, patched
from edgefl_export.capture.refusals import check_floats, unsupported_error
from edgefl_export.capture.trace import exported_program
from edgefl_export.onnx.ops import OPSET, TRANSLATIONS
from edgefl_export.onnx.passes import PASSES


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _private(name: str) -> Any:
    return _module(f"torch.onnx._internal.{name}")


_COLLECT = "create_onnx_friendly_decomposition_table"
_DECOMPOSITIONS = _private("exporter._decomp")
_REGISTRY: Any = getattr(_private("exporter._registration"), "ONNXRegistry", None)
_PROMOTION = _private("fx.passes.type_promotion")
_INTERPRETER: Any = getattr(_PROMOTION, "_TypePromotionInterpreter", None)
_CORE = _private("exporter._core")
_SCHEMAS = _private("exporter._schemas")
_CONVERTER = _module("onnxscript.version_converter")
_TRACED: Any = getattr(_module("onnxscript.values"), "TracedOnnxFunction", None)
_SIGNATURE: Any = getattr(getattr(ir, "schemas", None), "OpSignature", None)
# The library's own functions, which the patches call.
_collect: Any = getattr(_DECOMPOSITIONS, _COLLECT, None)
_from_torchlib: Any = getattr(_REGISTRY, "from_torchlib", None)
_run_node: Any = getattr(_INTERPRETER, "run_node", None)
_from_op_schema: Any = getattr(_SIGNATURE, "from_op_schema", None)
_from_function: Any = getattr(_SCHEMAS, "op_signature_from_function", None)
_convert_version: Any = getattr(_CONVERTER, "convert_version", None)
_recompile = fx.GraphModule.recompile
_listed_attrs: Any = getattr(typing, "_get_protocol_attrs", None)
_signatures: dict[tuple[str, str, int], Any] = {}


def protocols() -> Patch:
    """Return the patch that caches the attributes of typing protocols, for all work on graphs of onnx_ir."""
    return Patch(typing, "_get_protocol_attrs", _protocol_attrs)


def patches(decomposed: bool) -> Iterator[Patch]:
    """Yield the patches for one export by torch.onnx; ``decomposed``: the exported graph consists of core ops already."""
    yield Patch(_SIGNATURE, "from_op_schema", staticmethod(_signature))
    yield Patch(_SCHEMAS, "op_signature_from_function", _function_signature)
    yield Patch(_CORE, "_set_node_metadata", lambda node, ir_node: None)
    yield Patch(_CONVERTER, "convert_version", _convert)
    if decomposed:
        yield Patch(fx.GraphModule, "recompile", _no_code(threading.get_ident()))
        yield Patch(_TRACED, "function_ir", property(_domain_alone))
        yield Patch(_REGISTRY, "from_torchlib", staticmethod(_registry))
        yield Patch(_DECOMPOSITIONS, _COLLECT, _no_decompositions(threading.get_ident()))
        yield Patch(getattr(_private("fx._pass"), "Transform", None), "_detect_fake_mode", _fake_mode)
        if hasattr(_PROMOTION, "get_type_promotion_rule") and hasattr(_INTERPRETER, "_maybe_promote_node"):
            yield Patch(_INTERPRETER, "run_node", _promote)
            yield Patch(_INTERPRETER, "_run_node_and_set_meta", _run_again)


def _no_decompositions(thread: int) -> Callable[[object], object]:
    """Return a replacement for torch.onnx's search for decompositions: it finds none in the thread ``thread``."""
    return lambda ops: {} if threading.get_ident() == thread else _collect(ops)


def _no_code(thread: int) -> Callable[[fx.GraphModule], object]:
    """Return a replacement for ``GraphModule.recompile`` that does nothing in ``thread``: no exported graph runs."""
    return lambda module: None if threading.get_ident() == thread else _recompile(module)


def _convert(model: ir.Model, target_version: int, fallback: bool | None = None) -> None:
    """Convert the model to another ONNX opset by torch.onnx, with the same arguments, but only if it has functions or
    another opset than ``target_version``.
    """
    if model.functions or model.opset_imports.get("") != target_version:
        _convert_version(model, target_version, fallback)


def _domain_alone(function: Any) -> Any:
    """Return an object with the domain of an op's function, the only attribute that the registry reads."""
    return SimpleNamespace(domain=function.opset.domain)


def _fake_mode(transform: Any) -> FakeTensorMode | None:
    """Return the fake mode of the inputs, or None if none has one. Asking torch for it would import torch's own compiler."""
    values = (node.meta.get("val") for node in transform.module.graph.nodes)
    return next((value.fake_mode for value in values if isinstance(value, FakeTensor)), None)


def _promote(interpreter: Any, node: fx.Node) -> Any:
    """Insert casts before an op of mixed types and return the value of the node."""
    if node.op != "call_function" or "val" not in node.meta:
        return _run_node(interpreter, node)
    with interpreter._set_current_node(node):
        rule = _PROMOTION.get_type_promotion_rule(node, interpreter.type_promotion_table)
        if rule:
            interpreter._maybe_promote_node(node, rule)
    return node.meta["val"]


def _run_again(interpreter: Any, node: fx.Node) -> Any:
    """Compute the result of a node whose arguments have changed types, without values, and store it in the interpreter.

    A fake tensor of torch would import torch's own compiler.
    """
    with unset_fake_temporarily():
        result = without_values(node.target, *interpreter.fetch_args_kwargs_from_env(node))
    interpreter.env[node] = node.meta["val"] = result
    return result


def _registry(**options: int) -> Any:
    """Return a copy of the registry of ONNX functions for one export, which adds functions to it."""
    known = _torchlib(**options)
    own = copy.copy(known)
    own.functions = {op: list(functions) for op, functions in known.functions.items()}
    return own


@functools.cache
def _torchlib(**options: int) -> Any:
    return _from_torchlib(**options)


@functools.cache
def _protocol_attrs(protocol: type) -> Any:
    return _listed_attrs(protocol)


def _signature(schema: onnx.defs.OpSchema) -> Any:
    key = (schema.domain, schema.name, schema.since_version)
    if key not in _signatures:
        _signatures[key] = _from_op_schema(schema)
    return _signatures[key]


@functools.cache
def _function_signature(function: Callable[..., Any], *names: str, **options: Any) -> Any:
    """Return the signature of an op's function, cached, because torch.onnx reads those of our functions for each export."""
    return _from_function(function, *names, **options)


# Writer of ONNX models: a graph of core ops in, bytes out. No other module calls torch.onnx.
#
# The bytes hold standard ops of the default domain, no weights (they are graph inputs), the port names and static
# shapes of the function, and nothing of the machine that made them: equal functions give equal bytes. The
# optimizer of torch.onnx stays off, because it folds and renames; the few clean-ups below touch constants only.

# The version that came with opset 18; an older runtime refuses a newer file even if it knows every op in it.
IR_VERSION = 9


def to_onnx(lowered: LoweredGraph) -> bytes:
    """Return the graph as bytes of an ONNX model with the inputs and outputs of ``lowered``, in order.

    Raises:
        ExportError: if ONNX cannot express an op or a type; it names the op, the module and the source line.
    """
    check_floats(lowered)
    with patched(protocols()):
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
        raise unsupported_error(lowered, error) from error


def _export(lowered: LoweredGraph, decomposed: bool) -> ir.Model:
    with patched(*patches(decomposed)), _without_warnings():
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
    """Suppress warnings of torch.onnx about missing packages and node annotations while the block runs."""
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
    """Simplify the model in place by all of :data:`PASSES` and remove metadata about the exporting machine."""
    for rewrite in PASSES:
        rewrite(model)
    model.producer_name = "edgefl"
    model.producer_version = None
    model.ir_version = IR_VERSION
    model.metadata_props.clear()
    model.graph.metadata_props.clear()


def _separate_outputs(graph: ir.Graph) -> None:
    """Give each output of ``graph`` a value of its own, in place, because clean-ups merge equal values and two outputs
    may be equal.
    """
    seen: set[ir.Value] = set()
    for index, value in enumerate(graph.outputs):
        if value in seen or value in graph.inputs:
            copy = ir.node("Identity", [value])
            copy.outputs[0].type, copy.outputs[0].shape = value.type, value.shape
            graph.append(copy)
            graph.outputs[index] = copy.outputs[0]
        seen.add(graph.outputs[index])


def output_names(lowered: LoweredGraph) -> tuple[str, ...]:
    """Return the names of the model's outputs, in the order of the output ports.

    The output of a state port that is also an input gets a suffix, because ONNX names each value of a graph once. Runtimes
    therefore match outputs by position.
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
    """Give inner values short names by position: those of the trace are long and of no use to a device."""
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
    """Raise ExportError if the model violates an invariant of this writer, which is a bug of the compiler."""
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
