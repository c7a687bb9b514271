"""Errors in a user's model code, reported with the line of that code instead of a traceback through edgefl and torch."""

from __future__ import annotations

import inspect
import re
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from edgefl.errors import EdgeflError, ModelError
from edgefl.system.distribution import PACKAGES, folders

if TYPE_CHECKING:
    from torch import fx

_STANDARD = Path(sysconfig.get_path("stdlib"))
# Errors of tensors without values whose values code reads.
_VALUELESS = re.compile(r"on meta tensors|register_meta function")
# A gradient inside of forward: autograd is off there, or belongs to the training step around it.
_GRADIENT = re.compile(
    r"does not require grad\b|Tensor\.requires_grad_\(\)|create_graph"
    r"|appears to not have been used in the graph|Trying to backward through the graph"
    r"|backward\(\) called inside a functorch transform"
)
# A write to a tensor that is no input of the function whose gradient is taken.
_CAPTURED = re.compile(r"mutate a captured Tensor|mutating directly with `?\.data")
_NO_GRADIENT = (
    "expected code without autograd, found a gradient computed by torch.autograd.grad, backward() or requires_grad_(); "
    "compute it by torch.func.grad or torch.func.vjp, and stack weights by torch.stack instead of stack_module_state"
)
_NO_WRITE = (
    "expected forward to write only to buffers and to tensors that it made, found a write to a tensor that the module does "
    "not know; register the tensor by register_buffer, and keep modules in attributes or an nn.ModuleList"
)
NO_VALUES = (
    "Neither values of tensors nor the batch size may steer Python or be read by it; write that with torch.where and "
    "sizes of -1"
)
"""Remedy for code that reads a value that no graph has."""


def cause_of(text: str) -> str:
    """Return cause and remedy for two kinds of torch's error texts: a gradient inside of forward, and a write to an
    outside tensor.

    Return "" for any other error text.
    """
    if _GRADIENT.search(text):
        return _NO_GRADIENT
    return _NO_WRITE if _CAPTURED.search(text) else ""


@contextmanager
def user_errors(action: str, otherwise: str = "") -> Iterator[None]:
    """Convert exceptions of user code in the ``with`` block to ModelError.

    The message contains the innermost line of that code.

    Errors of edgefl pass unchanged. SystemExit is converted, too; KeyboardInterrupt is not.

    Args:
        action: Beginning of the message, such as "cannot load model 'a.py:net'".
        otherwise: ``file:line`` to report if the exception comes from no line of user code.

    Raises:
        ModelError: The block raised an exception.
    """
    try:
        yield
    except EdgeflError:
        raise
    except (Exception, SystemExit, GeneratorExit) as error:
        source = user_line_of(error) or otherwise
        at = f" (at {source})" if source else ""
        text = f"{type(error).__name__}: {' '.join(str(error).split())}{at}"
        if isinstance(error, SystemExit):
            reason = f" ({' '.join(error.code.split())})" if isinstance(error.code, str) else ""
            text = f'it exits or parses arguments{reason}{at}; put that below `if __name__ == "__main__":`'
        if _VALUELESS.search(text):
            text = f"it asks for the values of a tensor{at}. {NO_VALUES}"
        elif cause := cause_of(text):
            text = f"{cause}{at}"
        raise ModelError(f"{action}: {text}", source=source) from error


def defined_at(thing: Callable[..., Any]) -> str:
    """Return ``file:line`` of the definition of a function or class, or "" if it has no source."""
    try:
        return f"{inspect.getsourcefile(thing)}:{inspect.getsourcelines(thing)[1]}"
    except (OSError, TypeError):
        return ""


def user_line_of(error: BaseException) -> str:
    """Return ``file:line`` of the innermost user code that raised ``error``, or "" if there is none.

    If a traced graph raised it, the line is the one from which the operation was traced.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        node = node_at(frame, line)
        if node is not None and source_of(node):
            return source_of(node)
        if is_user_code(Path(frame.f_code.co_filename)):
            return f"{frame.f_code.co_filename}:{line}"
    return ""


def node_at(frame: FrameType, line: int) -> fx.Node | None:
    """Return the fx node whose generated code is at ``line`` of the frame, or None if the frame runs no generated code."""
    from torch import fx

    module = frame.f_locals.get("self")
    if not isinstance(module, fx.GraphModule) or frame.f_code is not type(module).forward.__code__:
        return None
    index = (module._lineno_map or {}).get(line - module._prologue_start)
    return None if index is None else list(module.graph.nodes)[index]


def source_of(node: fx.Node) -> str:
    """Return ``file:line`` of the innermost user code that called the operation of ``node``, or "" if it is unknown."""
    places = re.findall(r'File "(.+)", line (\d+)', node.meta.get("stack_trace") or "")
    return next((f"{file}:{line}" for file, line in reversed(places) if is_user_code(Path(file))), "")


def is_user_code(path: Path) -> bool:
    """Return True if ``path`` is an existing file that belongs neither to edgefl nor to torch nor to Python's library.

    Other installed packages count as the user's code.
    """
    standard = _STANDARD in path.parents and "site-packages" not in path.parts
    return path.is_file() and not standard and not any(room in path.resolve().parents for room in _ours())


@cache
def _ours() -> tuple[Path, ...]:
    """Return the folders of edgefl's packages and of torch."""
    return folders("torch", *PACKAGES)


def at_line() -> str:
    """Return `` (at file:line)`` of the innermost user code on the stack, or "" if there is none."""
    frames = ((frame.f_code.co_filename, line) for frame, line in traceback.walk_stack(None))
    return next((f" (at {file}:{line})" for file, line in frames if is_user_code(Path(file))), "")
