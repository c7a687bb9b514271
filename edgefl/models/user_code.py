"""What a user's model code raised, as an error that says where: never a traceback through edgefl and torch."""

from __future__ import annotations

import inspect
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from edgefl.wire.errors import EdgeflError, ModelError

_OURS = (Path(torch.__file__).resolve().parent, Path(__file__).resolve().parents[1])
_STANDARD = Path(sysconfig.get_path("stdlib"))


@contextmanager
def blamed(what: str, otherwise: str = "") -> Iterator[None]:
    """Turn what user code raises inside into a ModelError: ``what``, the exception's text, and the innermost line
    of the user's code, or the line ``otherwise`` where torch was given something wrong without any."""
    try:
        yield
    except EdgeflError:
        raise
    except Exception as error:
        source = _innermost(error) or otherwise
        text = " ".join(str(error).split())
        raise ModelError(
            f"{what}: {type(error).__name__}: {text}" + (f" (at {source})" if source else ""), source=source
        ) from error


def defined_at(thing: Callable[..., Any]) -> str:
    """``file:line`` of a function or class; empty if it has no source."""
    try:
        return f"{inspect.getsourcefile(thing)}:{inspect.getsourcelines(thing)[1]}"
    except (OSError, TypeError):
        return ""


def _innermost(error: Exception) -> str:
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if is_user_code(Path(frame.filename)):
            return f"{frame.filename}:{frame.lineno}"
    return ""


def is_user_code(path: Path) -> bool:
    """Whether ``path`` is a file, and neither of edgefl, of torch nor of Python's library."""
    standard = _STANDARD in path.parents and "site-packages" not in path.parts
    return path.is_file() and not standard and not any(room in path.resolve().parents for room in _OURS)
