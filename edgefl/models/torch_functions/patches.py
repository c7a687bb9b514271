"""Patches of functions of other packages, for the threads that are inside of a context manager."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any


class ThreadPatch:
    """Context manager that replaces attributes of modules and classes while any thread is inside.

    It replaces functions under the names by which people import them. An attribute belongs to all threads, so a count
    of the threads inside decides when the originals return, and a replaced function asks whether it runs for one of them::

        patch = ThreadPatch()
        patch.replace_function(torch.inference_mode, "__enter__", enter)
        with patch():
            ...
    """

    def __init__(self) -> None:
        self._places: list[tuple[Any, str, Any, Any]] = []
        self._active: ContextVar[bool] = ContextVar("active", default=False)
        self._lock = threading.Lock()
        self._threads = 0

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Let the attribute ``name`` of ``owner`` be ``value``, for all threads while one is inside."""
        self._places.append((owner, name, vars(owner).get(name, getattr(owner, name)), value))

    def replace_function(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        """Let calls of the function or method ``name`` of ``owner`` run ``function`` for the threads inside."""
        self.replace(owner, name, self.dispatch(getattr(owner, name), function))

    def dispatch(self, original: Callable[..., Any], replacement: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that runs ``replacement`` for threads inside and ``original`` for others."""

        def call(*args: Any, **kwargs: Any) -> Any:
            return (replacement if self.is_active() else original)(*args, **kwargs)

        return call

    def is_active(self) -> bool:
        """Return True if this thread is inside."""
        return self._active.get()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        token = self._active.set(True)
        self._count(1)
        try:
            yield
        finally:
            self._count(-1)
            self._active.reset(token)

    def _count(self, change: int) -> None:
        with self._lock:
            before, self._threads = self._threads, self._threads + change
            if bool(before) is bool(self._threads):
                return
            for owner, name, original, value in self._places:
                setattr(owner, name, original if before else value)
