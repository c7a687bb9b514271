"""Refusals of functions that cannot be compiled: each op or type is named with its module, its source line and a remedy."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from edgefl.contract.algorithm import Function
from edgefl.errors import ExportError
from edgefl.models.spec import CONSTANT
from edgefl.models.user_code import cause_of, user_line_of
from edgefl_export.capture.graph import LoweredGraph
from edgefl_export.capture.locate import is_compiler, locate, locate_type, refusal
from edgefl_export.capture.nodes import schema_arguments
from edgefl_export.operators import AFTER, aten_ops

# Replacements to suggest for ops that no engine can run: the last sentence of a refusal.

_DETERMINANT = (
    "For a matrix with a determinant in closed form, such as a triangular one, write the sum of the logarithms of its "
    "diagonal; write determinants of 2x2 and 3x3 matrices out"
)
DECOMPOSITION = (
    "Compute the decomposition once outside of the model and pass it as a buffer, or parametrize the model by its "
    "factors"
)
_GAMMA = (
    "Write Stirling's series, for x above 7 (x - 0.5) * x.log() - x + 0.918939 + 1 / (12 * x), and below it "
    "lgamma(x) = lgamma(x + 1) - log(x)"
)
_SAMPLING = (
    "Write the interpolation by gather: positions below and above with floor(), their weights as products; or detach the "
    "image and the grid, so that nothing before them is trained"
)
_SPECIAL = "Write the series or the approximation that the model needs"

FORMLESS = {
    "_ctc_loss": "Use loss=edgefl.losses.CTC(length) with labels padded by its blank, instead of F.ctc_loss in a "
    "loss of your own",
    "grid_sampler_2d_backward": _SAMPLING,
    "grid_sampler_3d_backward": _SAMPLING,
    "lgamma": _GAMMA,
    "digamma": _GAMMA.replace("lgamma(x) = lgamma(x + 1) - log(x)", "its derivative"),
    **dict.fromkeys(("polygamma", "igamma", "igammac", "erfinv", "i0", "special_i0e"), _SPECIAL),
    "special_log_ndtr": "Write log(0.5 * erfc(-x / sqrt(2))) for x above -5 and -x * x / 2 - log(-x) - 0.918939 below",
    "_linalg_slogdet": _DETERMINANT,
    "_linalg_det": _DETERMINANT,
    "linalg_matrix_exp": "Write the series I + A + A @ A / 2 + ... for A / 2^k, and square the result k times",
    **dict.fromkeys(
        ("linalg_lu_solve", "linalg_lu_factor_ex", "linalg_inv_ex", "_linalg_solve_ex"), DECOMPOSITION
    ),
    **dict.fromkeys(("linalg_cholesky_ex", "linalg_qr", "_linalg_svd", "_linalg_eigh"), DECOMPOSITION),
    **dict.fromkeys(("linalg_eig", "linalg_lstsq", "linalg_pinv"), DECOMPOSITION),
}
"""By the name of an op without overload: ops without a form for any engine."""

_FOURIER = (
    "Transform frames of at most 2,048 samples, or write the transform as products with constant matrices: of n samples to "
    "k frequencies, real and imaginary part are x @ torch.cos(a) and -(x @ torch.sin(a)) with a[n, k] = 2 pi n k / len(x)"
)
_OTHERS = {
    "_fft_r2c": _FOURIER,
    "_fft_c2r": _FOURIER,
    "_fft_c2c": _FOURIER,
    "embedding_renorm": "Leave max_norm out and divide the rows that are read: e / (e.norm(dim=-1, keepdim=True) / max_norm)"
    ".clamp_min(1)",
    "mode": "Count equal entries with comparisons and take the most frequent one by argmax",
}


def name_of(op: object) -> str:
    """Return the ``name`` part of an op ``aten.<name>.<overload>``."""
    parts = str(op).split(".")
    return parts[1] if len(parts) > 1 else parts[0]


def instead_of(op: object, otherwise: str) -> str:
    """Return advice for users of ``op``, which engines cannot run, or ``otherwise`` if there is no advice for this op."""
    name = name_of(op)
    return FORMLESS.get(name) or _OTHERS.get(name.removesuffix("_"), otherwise)


# Checks of traced functions. Each refused op is named with its module and source line.

# A tensor found in the closure of a function is a constant only while it is clearly no weight.
MAX_CONSTANT_ELEMENTS = 4096
# Masks and tables of positions are no weights, but they make the artifact larger.
MAX_INTEGER_CONSTANT_ELEMENTS = 2**20

_aten = torch.ops.aten
_READS = frozenset({_aten.index.Tensor})
_ADDS = aten_ops("index_put index_put_ _unsafe_index_put _index_put_impl_")


def check_ops(function: Function, joint: fx.GraphModule) -> None:
    """Check the ops of a trace.

    Raises:
        ExportError: if an op draws random numbers, if no engine can run it, or if the shape of its result depends on
            values, so that the trace would hold only for the example.
    """
    for node in joint.graph.nodes:
        if node.op != "call_function":
            continue
        tags = getattr(node.target, "tags", ())
        if torch.Tag.nondeterministic_seeded in tags and not _is_inference_call(node):
            raise _refusal(
                function,
                node,
                "draws random numbers; make them of torch.rand, in a model under `if self.training:` alone, or "
                "in an algorithm "
                "an input (role noise)",
            )
        if remedy := FORMLESS.get(name_of(node.target)):
            place = locate(function, str(node.target))
            raise refusal(function, node.target, place, "has no form for any engine", f". {remedy}")
        if _has_shape_of_values(node, tags):
            raise _refusal(
                function,
                node,
                "gives a result whose shape depends on values; a graph has static shapes. Use torch.where, a product "
                "with the mask, or integer positions",
            )


def _is_inference_call(node: fx.Node) -> bool:
    """Return True if the op has an argument ``training`` or ``train`` that is False, so that it draws nothing."""
    arguments = dict(zip((a.name for a in schema_arguments(node)), node.args, strict=False)) | node.kwargs
    return arguments.get("training", arguments.get("train")) is False


def _has_shape_of_values(node: fx.Node, tags: object) -> bool:
    masked = any(_is_mask(item) for item in _items(node.args[1])) if len(node.args) > 1 else False
    if node.target in _READS:
        return masked  # the tag is on it always
    if node.target in _ADDS:
        return masked and True in node.args[3:4]
    return torch.Tag.dynamic_output_shape in tags  # type: ignore[operator]


def _is_mask(item: object) -> bool:
    value = item.meta.get("val") if isinstance(item, fx.Node) else None
    return isinstance(value, Tensor) and value.dtype in (torch.bool, torch.uint8)


def _items(argument: object) -> Iterator[object]:
    yield from argument if isinstance(argument, list | tuple) else [argument]


def _refusal(function: Function, node: fx.Node, reason: str) -> ExportError:
    place = locate(function, str(node.target))
    return ExportError(
        f"op {node.target} in function {function.name!r} {reason} ({place})",
        function=function.name,
        op=str(node.target),
        place=str(place),
    )


def drop_outside_writes(function: Function, module: fx.GraphModule) -> None:
    """Remove in-place updates of tensors that are not arguments, such as batch norm's counter, from ``module``.

    Raises:
        ExportError: if the function reads such a tensor.
    """
    writes = {
        node for node in module.graph.nodes if any(_base(item).op == "get_attr" for item in written_by(node))
    }
    for node in writes:
        for constant in (_base(item) for item in written_by(node)):
            same = [n for n in module.graph.find_nodes(op="get_attr") if n.target == constant.target]
            if not all(_is_only_written(item, writes) for item in same):
                raise ExportError(
                    f"function {function.name!r} changes a tensor that is not among its inputs ({node.target}, shape "
                    f"{tuple(getattr(module, str(constant.target)).shape)}) and reads it; make it an input and return the "
                    "new value",
                    function=function.name,
                )
    before = len(module.graph.nodes)
    for node in reversed(list(module.graph.nodes)):
        if node in writes or (is_view(node) and not node.users):
            module.graph.erase_node(node)
    if len(module.graph.nodes) < before:
        module.recompile()


def _is_only_written(node: fx.Node, writes: set[fx.Node]) -> bool:
    inside = (user for user in node.users if user not in writes)
    return all(is_view(user) or _is_copy(user) for user in inside) and all(
        _is_only_written(user, writes) for user in node.users
    )


def _is_copy(node: fx.Node) -> bool:
    """Return True if ``node`` only copies a constant, such as the counter of batch norm, which every loss function
    copies.
    """
    return node.target is _aten.clone.default and node.args[0].op == "get_attr"  # type: ignore[union-attr]


def written_by(node: fx.Node) -> list[fx.Node]:
    """Return the arguments that an op writes to."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    values = {**dict(zip((a.name for a in schema.arguments), node.args, strict=False)), **node.kwargs}
    written = [values.get(a.name) for a in schema.arguments if a.alias_info and a.alias_info.is_write]
    return [item for item in pytree.tree_leaves(written) if isinstance(item, fx.Node)]


def _base(node: fx.Node) -> fx.Node:
    """Return the node that owns the memory of ``node``, behind views and in-place ops."""
    while True:
        if is_view(node) or _is_copy(node):
            node = node.args[0]  # type: ignore[assignment]
        elif written := written_by(node):
            node = written[0]
        else:
            return node


def is_view(node: fx.Node) -> bool:
    return node.op == "call_function" and getattr(node.target, "is_view", False)


def check_constants(function: Function, joint: fx.GraphModule, core: fx.GraphModule) -> None:
    """Check the tensors that a function reads though they are not among its inputs.

    Small tensors and buffers outside of the state are accepted as constants; a weight must be an input.

    Args:
        function: the function.
        joint: graph of the first pass; its constants are those of the user.
        core: graph of the second pass; other constants in it come from rules of the compiler and are accepted.

    Raises:
        ExportError: if a constant is a parameter, requires a gradient, or is too large.
    """
    constants = [getattr(joint, node.target) for node in joint.graph.find_nodes(op="get_attr")]
    own = {_memory(each) for each in constants}
    buffers = {_memory(each) for each in constants if getattr(each, CONSTANT, False)}
    for node in core.graph.find_nodes(op="get_attr"):
        value = getattr(core, node.target)
        if _memory(value) not in own:
            continue
        # One number for each class or token weighs a loss; a matrix of that many entries is rather a weight.
        floats = (value.is_floating_point() or value.is_complex()) and value.dim() != 1
        limit = MAX_CONSTANT_ELEMENTS if floats else MAX_INTEGER_CONSTANT_ELEMENTS
        large = value.numel() > limit and not function.fixed and _memory(value) not in buffers
        if isinstance(value, torch.nn.Parameter) or value.requires_grad or large:
            raise ExportError(
                f"function {function.name!r} reads a tensor of shape {tuple(value.shape)} ({value.dtype}, at most "
                f"{limit} entries may be a constant) that is not among its inputs; a weight must be an input, or "
                "every device would train a copy of the value at export",
                function=function.name,
                shape=tuple(value.shape),
            )


def _memory(value: Tensor) -> int:
    return value.untyped_storage().data_ptr()


def untraceable(function: Function, error: Exception) -> ExportError:
    """Return an ExportError for ``error``, raised while ``function`` was traced, with source line and remedy.

    May run ``function`` again to find the line.
    """
    text = str(error).strip().split("\n")[0]
    if "_local_scalar_dense" in str(error) or "value out of a tracing tensor" in str(error):
        place = str(locate(function, "aten._local_scalar_dense.default"))
        text = "a Python value is taken out of a tensor (.item(), int(tensor), if tensor:)"
        remedy = (
            "a graph computes with tensors only; use torch.where, or make the value an input (role hyper)"
        )
    elif cause := cause_of(str(error)):
        place = _line(error)
        text, _, remedy = cause.partition("; ")
    elif isinstance(error, torch.linalg.LinAlgError):  # type: ignore[attr-defined]
        name, place = _decomposition(function, error)
        text = f"op {name} has no form for any engine"
        remedy = FORMLESS.get(name, DECOMPOSITION)
    else:
        place = _line(error)
        text = f"{type(error).__name__}: {text}"
        remedy = "a function of an algorithm is made of torch ops on its inputs, with static shapes"
    return ExportError(
        f"function {function.name!r} cannot be traced: {text} ({place}); {remedy}",
        function=function.name,
        place=place,
    )


def _decomposition(function: Function, error: Exception) -> tuple[str, str]:
    """Run ``function`` again and return (name, place) of the matrix decomposition that failed on a singular matrix."""
    for name in (each for each in FORMLESS if "linalg" in each):
        found = locate(function, f"aten.{name}.default")
        if name_of(found.op) == name:
            return name, str(found)
    return "linalg", _line(error)


def _line(error: Exception) -> str:
    """Return a text with the innermost line of user code in the traceback of ``error``.

    Without such a line, take the innermost one outside torch and the compiler, or "place unknown".
    """
    if source := user_line_of(error):
        return f"at {source}"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if path.exists() and not is_compiler(path):
            return f"at {frame.filename}:{frame.lineno}"
    return "place unknown"


# Errors for functions without an ONNX form: the op or the type that has none, its module and its source line.

FLOATS = (torch.float32, torch.float64)
"""Float types that a graph computes in. Kernels for narrower floats are missing, and their sums are too inexact to verify.

float16 may leave a graph, as an output that is rounded to it for the way to the server, and wait in one for the backward
pass.
"""

_TYPES = {each for each in vars(torch).values() if isinstance(each, torch.dtype) and each.is_floating_point}
_NARROW = _TYPES - {*FLOATS}
_NODE = re.compile(r"target=torch\.ops\.([\w.]+)")


def check_floats(lowered: LoweredGraph) -> None:
    """Check that a graph computes in no float type narrower than float32. float16 may be stored and returned.

    Raises:
        ExportError: for the first such input or op, with the source line of the op.
    """
    nodes = (each for each in lowered.module.graph.nodes if _narrow_types(each))
    node = next((each for each in nodes if not _is_stored_as_float16(each)), None)
    if node is None:
        return
    remedy = "Only float32 and float64 can be exported, training in narrower floats is not supported:"
    dtype = str(_narrow_types(node)[0]).removeprefix("torch.")
    if node.op == "placeholder":
        names = dict(zip(lowered.module.graph.find_nodes(op="placeholder"), lowered.inputs, strict=True))
        name = names[node]
        raise ExportError(
            f"input {name!r} of function {lowered.name!r} is {dtype}. {remedy} declare the port as float32",
            function=lowered.name,
            input=name,
        )
    place = locate_type(lowered.function, _NARROW)
    rest = f". {remedy} leave out the conversion or autocast"
    raise refusal(lowered.function, node.target, place, f"makes a {dtype} tensor", rest)


def unsupported_error(lowered: LoweredGraph, error: BaseException) -> ExportError:
    """Return the ExportError for ``error``, raised by torch.onnx; it names the op and its source line if they are known."""
    texts = _texts(error)
    match = _NODE.search("\n".join(texts))
    if match is None:
        return ExportError(
            f"function {lowered.name!r} has no ONNX form: {texts[-1]}. Express it with other ops, or add a rule in "
            "exporters/edgefl_export/decompositions",
            function=lowered.name,
        )
    remedy = instead_of(
        match[1],
        "Use other ops there, or add a rule that rewrites it to core ops in exporters/edgefl_export/decompositions",
    )
    place = locate(lowered.function, match[1])
    return refusal(lowered.function, match[1], place, "has no ONNX form", f". {remedy}")


def _texts(error: BaseException) -> list[str]:
    """Return the messages of ``error`` and of its chain of causes, the original cause last."""
    texts = []
    cause: BaseException | None = error
    while cause is not None:
        texts.append(str(cause))
        cause = cause.__cause__
    return texts


def _is_stored_as_float16(node: fx.Node) -> bool:
    """Return True if the node's only narrow result is float16, and is only returned or converted, never computed with."""
    halves = _narrow_types(node) == [torch.float16]
    return halves and node.op == "call_function" and all(map(_stores, node.users))


def _stores(user: fx.Node) -> bool:
    return user.op == "output" or user.target in (AFTER, torch.ops.aten._to_copy.default)


def _narrow_types(node: fx.Node) -> list[torch.dtype]:
    """Return the dtypes of those results of ``node`` that are floats narrower than float32."""
    values = pytree.tree_leaves(node.meta.get("val"))
    return [value.dtype for value in values if isinstance(value, Tensor) and value.dtype in _NARROW]
