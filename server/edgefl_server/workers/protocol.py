"""Interfaces of a worker and its caller, which exchange messages over a private connection.

Processes and Ray actors run the same loops. Commands arrive in order. All messages of a worker go to one sink, on one
thread; :class:`Died` is the last.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from edgefl.errors import ConfigError, EdgeflError, StoreError
from edgefl.wire.mqtt.events import EventSink


class Stop(msgspec.Struct, frozen=True):
    """Command: stop the worker."""


class Died(msgspec.Struct, frozen=True):
    """Last message of a worker: it has ended. ``reason`` continues the sentence "the worker", as in "was killed by
    signal 9".
    """

    reason: str


class WorkerLoop(Protocol):
    """Program of a worker, in the worker's process.

    Attributes:
        stop_s: Seconds for it to stop before its process ends anyway.
    """

    stop_s: float

    def send(self, command: Any) -> None:
        """Queue a command. May be called from any thread."""

    def run(self) -> None:
        """Handle commands until :class:`Stop`. Blocks until then."""


class LoopSettings(Protocol):
    """Settings of a worker. They are sent to it before any command, and build its program there."""

    def build(self, sink: EventSink[Any]) -> WorkerLoop:
        """Return the worker's loop, which sends its messages to ``sink``."""


class WorkerHandle(Protocol):
    """Caller's end of one worker."""

    def send(self, command: object) -> None:
        """Send a command, or a reference that :meth:`WorkerLauncher.share` returned.

        If the worker has ended, nothing happens; :class:`Died` reports that.
        """

    def kill(self) -> None:
        """End the worker at once, without waiting for its work."""

    def stop(self) -> None:
        """Send the worker the command to stop, wait some seconds for it, and then end it."""


class WorkerLauncher(Protocol):
    """Factory of workers, as processes of this machine or as Ray actors."""

    def share(self, thing: object) -> object:
        """Return a reference to ``thing`` that :meth:`WorkerHandle.send` accepts.

        The object is copied once for all workers of a machine.
        """

    def launch(self, settings: Any, sink: EventSink[Any]) -> WorkerHandle:
        """Start a worker, whose messages go to ``sink``, and return the caller's end.

        ``settings`` are :class:`LoopSettings`, or a shared reference to them.

        Raises:
            EdgeflError: The error of :func:`no_room`, if no worker can be started at present.
        """

    def close(self) -> None:
        """Release the shared objects."""


def no_room(table: str, text: str, **details: object) -> EdgeflError:
    """Return the error for a lack of resources to start workers.

    It is a StoreError for a server, which waits for them, and a ConfigError for a simulation.

    Args:
        table: Configuration table that sets the number of workers: ``server`` or ``simulation``.
        text: Message of the error.
        details: Values of the message.
    """
    return (StoreError if table == "server" else ConfigError)(text, **details)
