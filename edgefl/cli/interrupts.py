"""Ctrl-C at any time of a command: exit code 130, no traceback."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

EXIT_CODE = 130
_RETRY_S = 0.05


def handler(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt; use it as a signal handler.

    During the import of an extension module, wait for its end, because numpy crashes if such an import fails.
    """
    while frame is not None:
        if frame.f_code.co_qualname.rpartition(".")[0].endswith("ExtensionFileLoader") and _raise_later():
            return
        frame = frame.f_back
    raise KeyboardInterrupt


@contextmanager
def exit_on_interrupt() -> Iterator[None]:
    """Open a context that exits with :data:`EXIT_CODE` on Ctrl-C. A process that ignores SIGINT continues to ignore it."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, handler)
    if sys.platform != "win32":
        signal.signal(signal.SIGALRM, handler)
    sys.unraisablehook = _raise_again
    try:
        yield
    except (KeyboardInterrupt, Exception) as error:
        if not follows_interrupt(error):
            raise
        sys.exit(EXIT_CODE)
    finally:
        if sys.platform != "win32":  # by default, a late SIGALRM kills the process
            signal.signal(signal.SIGALRM, signal.SIG_IGN)


def follows_interrupt(error: BaseException | None) -> bool:
    """Return True if a KeyboardInterrupt caused ``error``. Libraries may turn it into other errors, such as ImportError."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _raise_again(ignored: sys.UnraisableHookArgs) -> None:
    """Raise a KeyboardInterrupt again that Python ignored, in ``__del__`` or in a callback of an import lock."""
    if not issubclass(ignored.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(ignored)
    else:
        _raise_later()


def _raise_later() -> bool:
    """Let a timer call :func:`handler` again soon, and return True. Return False on Windows, which has no such timer."""
    if sys.platform == "win32":
        return False
    signal.setitimer(signal.ITIMER_REAL, _RETRY_S)
    return True
