"""Workers as actors on a Ray cluster, or on a Ray instance that is started here."""

from __future__ import annotations

import logging
import os
import queue
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import Any

from edgefl.errors import ConfigError, EdgeflError
from edgefl.wire.mqtt.events import EventSink
from edgefl_server.workers.protocol import Died, LoopSettings, Stop, no_room

LOCAL = "local"
"""Address of a Ray that is started for one process, on this machine."""
_REACHED_S = 10.0
_STOP_S = 10.0
"""Seconds for an actor to accept the command to stop."""
_POLL_S = 1.0
"""Seconds that an actor waits for messages before it returns none."""
_ANSWER_S = 60.0
"""Seconds for a server's actor to start, or to answer at all: Ray itself waits without limit for a core."""
_MAX_MESSAGES = 256


class WorkerActor:
    """Actor in the cluster that runs a worker's loop on a thread of its own."""

    def __init__(self, settings: LoopSettings) -> None:
        self._messages: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._loop = settings.build(self._messages)
        threading.Thread(target=self._run, name="worker", daemon=True).start()

    def send(self, command: object) -> None:
        """Pass a command to the worker."""
        self._loop.send(command)

    def receive(self) -> list[object]:
        """Wait up to a second for messages of the worker, and return those that have arrived, at most 256.

        The list is empty on timeout.
        """
        messages: list[object] = []
        with suppress(queue.Empty):
            messages.append(self._messages.get(timeout=_POLL_S))
            while len(messages) < _MAX_MESSAGES:
                messages.append(self._messages.get_nowait())
        return messages

    def _run(self) -> None:
        reason = "ended"
        try:
            self._loop.run()
        except BaseException as error:  # a model may call sys.exit()
            reason = f"ended: {type(error).__name__}: {error}"
        self._messages.put(Died(reason))


class RayHandle:
    """Caller's end of one Ray actor. Threads send it commands and pass its messages to ``sink``, :class:`Died` as the
    last.

    Args:
        ray: The module ``ray``.
        actor: Handle of the actor.
        sink: Receives the worker's messages.
        answer_s: Seconds for the actor to start and to answer; None waits without limit.
    """

    def __init__(self, ray: ModuleType, actor: Any, sink: EventSink[Any], answer_s: float | None) -> None:
        self._ray = ray
        self._actor = actor
        self._sink = sink
        self._answer_s = answer_s
        self._commands: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._is_stopped = False
        self._has_died = threading.Lock()
        """Held from the worker's end on: only one thread reports it."""
        threading.Thread(target=self._receive, name="receive-worker", daemon=True).start()
        threading.Thread(target=self._send, name="send-worker", daemon=True).start()

    def send(self, command: object) -> None:
        """Queue a command or an object reference for the actor, in order. If the actor has ended, nothing happens."""
        self._commands.put(command)

    def kill(self) -> None:
        """Kill the actor."""
        self._is_stopped = True
        self._commands.put(None)
        with suppress(Exception):  # the cluster itself may be gone
            self._ray.kill(self._actor)

    def stop(self) -> None:
        """Send the command to stop, wait up to ten seconds until the actor has received it, then kill the actor."""
        self._is_stopped = True
        with suppress(Exception):
            self._ray.get(self._actor.send.remote(Stop()), timeout=_STOP_S)
        self.kill()

    def _send(self) -> None:
        """Send the queued commands one after the other until the actor is killed. Runs on a thread of its own.

        Concurrent calls could change the order of commands. If one cannot be sent, the actor is killed and its end
        reported.
        """
        while (command := self._commands.get()) is not None:
            try:
                self._ray.get(self._actor.send.remote(command))
            except Exception as error:  # a later command must not be handled without this one
                self.kill()
                self._report_end(f"cannot be sent a command ({type(error).__name__})")
                return

    def _receive(self) -> None:
        try:
            while not self._is_stopped:
                for message in self._ray.get(self._actor.receive.remote(), timeout=self._answer_s):
                    if isinstance(message, Died):
                        self._report_end(message.reason)
                        return
                    self._sink.put(message)
        except self._ray.exceptions.GetTimeoutError:
            self._report_end(
                f"did not answer for {self._answer_s:g} s: has the Ray cluster a free core for it?"
            )
        except Exception as error:  # Ray raises many types, and each means that the actor cannot be reached
            self._report_end(f"is out of Ray's reach ({type(error).__name__})")

    def _report_end(self, reason: str) -> None:
        if self._has_died.acquire(blocking=False):
            self._sink.put(Died(reason))


class RayLauncher:
    """Factory of workers that are actors on a Ray cluster, one core each.

    If the process is connected to Ray already, that connection is used; after a lost connection a new one is made.

    Args:
        address: Address of the cluster, or :data:`LOCAL` to start Ray here.
        workers: Number of workers.
        table: Configuration table that sets the number of workers. A server does not wait for cores that others use, but
            tries again.
        gpus: GPUs of each worker.

    Raises:
        ConfigError: If Ray is not installed.
    """

    def __init__(self, address: str, workers: int, table: str = "server", gpus: int = 0) -> None:
        try:
            import ray
            import ray.exceptions
        except ImportError as error:
            what = "workers are to run" if table == "server" else "clients train"
            raise ConfigError(
                f"{what} on Ray, which is not installed: `pip install edgefl-tiers[ray]`, or leave out {table}.ray",
                package="ray",
            ) from error
        self._ray: ModuleType = ray
        self._address = address
        self._workers = workers
        self._table = table
        self._gpus = gpus
        self._owns_connection = False
        self._had_room = False

    def share(self, thing: object) -> object:
        """Return a reference to ``thing`` in Ray's object store.

        Raises:
            EdgeflError: The error of :func:`no_room`, if the cluster is unreachable.
        """
        with self._reaching(Exception):
            self._connect()
        with self._reaching(self._ray.exceptions.RayError, OSError):  # and not what cannot be pickled
            return self._ray.put(thing)

    def launch(self, settings: Any, sink: EventSink[Any]) -> RayHandle:
        """Start an actor with ``settings``, or a reference to them. Its messages go to ``sink``, on another thread.

        Raises:
            EdgeflError: The error of :func:`no_room`, if the cluster is unreachable or has no free core.
        """
        ray, waits = self._ray, self._table != "server"
        with self._reaching(Exception):
            self._connect()
            if not waits and ray.available_resources().get("CPU", 0) < 1:
                cores = int(ray.cluster_resources().get("CPU", 0))
                raise no_room(
                    self._table,
                    f"the Ray cluster at {self._address} has {cores} cores, and all are taken: set server.workers lower, "
                    "add nodes, or wait for other jobs to end",
                    found=cores,
                )
            # The caller replaces a dead worker itself, because Ray would repeat calls on one without its state.
            options = {"max_restarts": 0, "max_task_retries": 0, "max_concurrency": 4}
            actor_class = ray.remote(num_cpus=1, num_gpus=self._gpus, **options)(WorkerActor)
            return RayHandle(ray, actor_class.remote(settings), sink, None if waits else _ANSWER_S)

    def close(self) -> None:
        """Disconnect from Ray, if this launcher connected to it."""
        if self._owns_connection:
            self._ray.shutdown()

    @contextmanager
    def _reaching(self, *kinds: type[Exception]) -> Iterator[None]:
        """Context that turns exceptions of the given classes into the error of :func:`no_room`.

        A connection that this launcher made is closed then.
        """
        try:
            yield
        except EdgeflError:
            raise
        except kinds as error:
            if self._owns_connection:
                with suppress(Exception):
                    self._ray.shutdown()
            raise no_room(
                self._table,
                f"there is no Ray at {self._address} ({' '.join(str(error).split())}): start one (`ray start --head`), "
                f"correct {self._table}.ray, or use {LOCAL!r}",
                address=self._address,
            ) from error

    def _connect(self) -> None:
        """Connect to the cluster if there is no connection, and check that it has enough cores and GPUs for all workers.

        Without the check, Ray would wait for them without limit. A simulation checks only once, so that it can
        continue with fewer workers when a node leaves.

        Raises:
            EdgeflError: The error of :func:`no_room`, if the cluster has too few.
        """
        if not self._ray.is_initialized():
            self._owns_connection = True
            self._initialize()
        if self._had_room and self._table != "server":
            return
        resources = self._ray.cluster_resources()
        for name, what, each in (("CPU", "cores", 1), ("GPU", "GPUs", self._gpus)):
            found = int(resources.get(name, 0))
            if found < each * self._workers:
                raise no_room(
                    self._table,
                    f"the Ray cluster at {self._address} has {found} {what} for {self._workers} workers, which take one "
                    f"each: set {self._table}.workers to at most that, or add nodes",
                    address=self._address,
                    found=found,
                )
        self._had_room = True

    def _initialize(self) -> None:
        """Connect to the cluster. With the address :data:`LOCAL`, start a Ray instance with a core for each worker.

        Raises:
            OSError: If no process listens at the address. Ray itself would retry for minutes and then end this
                process.
        """
        quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
        in_main = threading.current_thread() is threading.main_thread()
        stops = signal.getsignal(signal.SIGTERM) if in_main else None
        if self._address == LOCAL:
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            self._ray.init(LOCAL, num_cpus=self._workers, include_dashboard=False, **quiet)
        else:
            host, _, port = self._address.removeprefix("ray://").rpartition(":")
            if host and port.isdigit():
                socket.create_connection((host.strip("[]"), int(port)), _REACHED_S).close()
            self._ray.init(self._address, **quiet)
        if (
            stops is not None
        ):  # Ray's own handler ends the process with another exit code, and without a message
            signal.signal(signal.SIGTERM, stops)
