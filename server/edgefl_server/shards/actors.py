"""Workers as actors on a Ray cluster, or on a Ray that is started here.

The actors reach the broker, the journal's database and the updates' store by themselves. Commands and messages of the
server go through Ray.
"""

from __future__ import annotations

import queue
import threading
from contextlib import suppress
from types import ModuleType
from typing import Any

from edgefl.errors import StoreError
from edgefl.wire.mqtt.events import EventSink
from edgefl_server.shards import ray_cluster
from edgefl_server.shards.messages import Command, Died, Stop, WorkerMessage, WorkerSettings
from edgefl_server.shards.worker import AggregationWorker

_STOP_S = 10.0
"""Seconds for an actor to accept the command to stop."""
_POLL_S = 1.0
"""Seconds that an actor waits for messages before it returns none."""
_ANSWER_S = 60.0
"""Seconds for an actor to start, or to answer at all: Ray itself waits without limit for a core that others use."""
_MAX_MESSAGES = 256


class AggregationActor:
    """Process in the cluster: a :class:`AggregationWorker` on a thread of its own, controlled by calls."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._messages: queue.SimpleQueue[WorkerMessage] = queue.SimpleQueue()
        self._worker = AggregationWorker(settings, self._messages)
        threading.Thread(target=self._run, name="worker", daemon=True).start()

    def send(self, command: Command) -> None:
        """Pass a command to the worker."""
        self._worker.send(command)

    def receive(self) -> list[WorkerMessage]:
        """Return the worker's messages so far, or an empty list on timeout."""
        messages: list[WorkerMessage] = []
        with suppress(queue.Empty):
            messages.append(self._messages.get(timeout=_POLL_S))
            while len(messages) < _MAX_MESSAGES:
                messages.append(self._messages.get_nowait())
        return messages

    def _run(self) -> None:
        reason = "ended"
        try:
            self._worker.run()
        except Exception as error:
            reason = f"ended: {type(error).__name__}: {error}"
        self._messages.put(Died(reason))


class RayWorkerHandle:
    """Server's end of one actor.

    Args:
        ray: The module ``ray``.
        actor: Handle of the actor.
        name: Name of the threads.
        sink: Receives the worker's messages, on a thread; :class:`Died` is the last one.
    """

    def __init__(self, ray: ModuleType, actor: Any, name: str, sink: EventSink[WorkerMessage]) -> None:
        self._ray = ray
        self._actor = actor
        self._sink = sink
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._is_stopped = False
        threading.Thread(target=self._receive, name=f"receive-{name}", daemon=True).start()
        threading.Thread(target=self._send, name=f"send-{name}", daemon=True).start()

    def send(self, command: Command) -> None:
        """Queue a command. A worker that is gone receives nothing; its :class:`Died` message reports that."""
        self._commands.put(command)

    def kill(self) -> None:
        """End the worker at once. Updates that it did not journal are lost."""
        self._is_stopped = True
        self._commands.put(None)
        with suppress(Exception):  # the cluster itself may be gone
            self._ray.kill(self._actor)

    def stop(self) -> None:
        """Stop the worker, and wait until it has accepted the command."""
        self._is_stopped = True
        with suppress(Exception):
            self._ray.get(self._actor.send.remote(Stop()), timeout=_STOP_S)
        self.kill()

    def _send(self) -> None:
        """Send the commands from one thread: calls from several might overtake each other."""
        while (command := self._commands.get()) is not None:
            with suppress(Exception):  # the other thread notices that the actor is gone
                self._ray.get(self._actor.send.remote(command))

    def _receive(self) -> None:
        try:
            while not self._is_stopped:
                for message in self._ray.get(self._actor.receive.remote(), timeout=_ANSWER_S):
                    self._sink.put(message)
                    if isinstance(message, Died):
                        return
        except self._ray.exceptions.GetTimeoutError:
            self._sink.put(
                Died(f"did not answer for {_ANSWER_S:g} s: has the Ray cluster a free core for it?")
            )
        except Exception as error:  # Ray raises many types, and each means that the actor cannot be reached
            self._sink.put(Died(f"is out of Ray's reach ({type(error).__name__})"))


class RayLauncher:
    """Factory of workers that are actors on a Ray cluster, one core each.

    If the process is connected to Ray already, that connection is used; after a lost connection a new one is made.

    Args:
        address: Address of the cluster, or :data:`~edgefl_server.shards.ray_cluster.LOCAL` to start Ray here.
        workers: Number of workers.

    Raises:
        ConfigError: If Ray is not installed.
    """

    def __init__(self, address: str, workers: int) -> None:
        self._address = address
        self._workers = workers
        self._ray = ray_cluster.import_ray("workers are to run", "server")

    def launch(self, settings: WorkerSettings, sink: EventSink[WorkerMessage]) -> RayWorkerHandle:
        """Start a worker. Raises StoreError if the cluster is away or full: the server tries again."""
        ray = self._ray
        try:
            if not ray.is_initialized():
                ray_cluster.connect(ray, self._address, self._workers)
            found = ray_cluster.check_room(ray, self._address, self._workers, "server", StoreError)
            if ray.available_resources().get("CPU", 0) < 1:
                raise StoreError(
                    f"the Ray cluster at {self._address} has {found} cores, and all are taken: set server.workers lower, "
                    "add nodes, or wait for other jobs to end",
                    found=found,
                )
            actor_class = ray.remote(num_cpus=1, max_restarts=0, max_task_retries=0, max_concurrency=4)(
                AggregationActor
            )
            actor = actor_class.remote(settings)
        except StoreError:
            raise
        except Exception as error:
            with suppress(Exception):
                ray.shutdown()
            raise StoreError(
                f"there is no Ray at {self._address} ({' '.join(str(error).split())}): start one (`ray start --head`), "
                f"correct server.ray, or use {ray_cluster.LOCAL!r}",
                address=self._address,
            ) from error
        return RayWorkerHandle(ray, actor, f"worker-{settings.worker}", sink)
