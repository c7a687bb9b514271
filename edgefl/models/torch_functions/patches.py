"""Patches of functions in other packages, active only in the threads that are inside of a context manager."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any


class ThreadPatch:
    """Context manager that replaces attributes of modules and classes while at least one thread is inside.

    It replaces functions under the names by which code imports them. An attribute is common to all threads. So a count
    of the threads inside decides when the originals return, and a replaced function checks whether its thread is
    inside::

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
        """Register a replacement of the attribute ``name`` of ``owner`` by ``value``.

        All threads see ``value`` while at least one thread is inside the ``with`` block of the patches.
        """
        self._places.append((owner, name, vars(owner).get(name, getattr(owner, name)), value))

    def replace_function(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        """Register a replacement of the function or method ``name`` of ``owner``.

        Only threads inside the ``with`` block of the patches run ``function``; others run the original.
        """
        self.replace(owner, name, self.dispatch(getattr(owner, name), function))

    def dispatch(self, original: Callable[..., Any], replacement: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that calls ``replacement`` in threads inside the ``with`` block of the patches, else
        ``original``.
        """

        def call(*args: Any, **kwargs: Any) -> Any:
            return (replacement if self.is_active() else original)(*args, **kwargs)

        return call

    def is_active(self) -> bool:
        """Return True if the calling thread is inside the ``with`` block of these patches."""
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
        """Add ``change`` to the number of threads that are inside the ``with`` block of the patches.

        The first thread sets the attributes, the last one restores them.
        """
        with self._lock:
            before, self._threads = self._threads, self._threads + change
            if bool(before) is bool(self._threads):
                return
            for owner, name, original, value in self._places:
                setattr(owner, name, original if before else value)
