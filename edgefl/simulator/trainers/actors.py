"""Workers as actors on a Ray cluster, or on a Ray that is started here."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections import deque
from collections.abc import Collection
from types import ModuleType
from typing import Any

from edgefl.simulator.trainers.pool import Hand, Lost
from edgefl.simulator.trainers.worker import Done, Method, Worker
from edgefl.wire.errors import ConfigError

LOCAL = "local"
"""The address of a Ray that is started for one simulation, on this machine."""
_REACHED_S = 10.0


class ActorHand:
    """A worker in an ``actor``."""

    def __init__(self, ray: ModuleType, actor: Any) -> None:
        self._ray = ray
        self._actor = actor
        self.due: deque[Any] = deque()

    def call(self, method: Method, *given: object) -> None:
        self.due.append(self._actor.answer.remote(method, *given))

    def answer(self) -> object:
        errors = self._ray.exceptions
        try:
            answer = self._ray.get(self.due.popleft())
        except (errors.RayActorError, errors.WorkerCrashedError, errors.ObjectLostError) as error:
            raise Lost from error
        return answer.value if isinstance(answer, Done) else answer

    def close(self) -> None:
        self._ray.kill(self._actor)


class Actors:
    """:class:`~edgefl.simulator.trainers.pool.Crew` on the cluster at ``address``, for so many ``workers``, each of which
    takes a core and ``gpus``. A Ray that the process is connected to already is used as it is.

    ConfigError where Ray is not installed, is not there, or has less than they take.
    """

    def __init__(self, address: str, workers: int, gpus: int = 0) -> None:
        self._ray = _ray()
        self._own = not self._ray.is_initialized()
        if self._own:
            self._connect(address, workers)
        self._check_room(address, workers, gpus)
        # A new one is hired in place of one that died: Ray would call methods again that were told something before.
        options = {"num_cpus": 1, "num_gpus": gpus, "max_restarts": 0, "max_task_retries": 0}
        self._hired = self._ray.remote(**options)(Worker)

    def _check_room(self, address: str, workers: int, gpus: int) -> None:
        """Ray would wait for nodes that nobody adds."""
        there = self._ray.cluster_resources()
        for name, what, each in (("CPU", "cores", 1), ("GPU", "GPUs", gpus)):
            found = int(there.get(name, 0))
            if found < each * workers:
                self.close()
                raise ConfigError(
                    f"the Ray cluster at {address} has {found} {what} for {workers} workers, which take one each: set "
                    "simulation.workers to at most that, or add nodes",
                    address=address,
                    found=found,
                )

    def hire(self) -> ActorHand:
        return ActorHand(self._ray, self._hired.remote())

    def share(self, thing: object) -> object:
        return self._ray.put(thing)

    def ready(self, hands: Collection[Hand]) -> Hand:
        by_due = {hand.due[0]: hand for hand in hands if isinstance(hand, ActorHand)}
        (first,), _ = self._ray.wait(list(by_due), num_returns=1)
        return by_due[first]

    def close(self) -> None:
        if self._own:
            self._ray.shutdown()

    def _connect(self, address: str, workers: int) -> None:
        quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
        stops = signal.getsignal(signal.SIGTERM)
        try:
            if address == LOCAL:
                os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
                self._ray.init(LOCAL, num_cpus=workers, include_dashboard=False, **quiet)
            else:
                _reach(address)
                self._ray.init(address, **quiet)
        except (OSError, RuntimeError, ValueError) as error:
            raise ConfigError(
                f"there is no Ray at {address}: {error}; start one (`ray start --head`), correct the address, or use "
                f"{LOCAL!r}",
                address=address,
            ) from error
        if stops is not None and threading.current_thread() is threading.main_thread():
            signal.signal(
                signal.SIGTERM, stops
            )  # Ray's own ends the process with another code, and without a word


def _reach(address: str) -> None:
    """OSError where nobody listens: Ray itself tries that for minutes, and then ends the process."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), _REACHED_S).close()


def _ray() -> ModuleType:
    try:
        import ray
        import ray.exceptions
    except ImportError as error:
        raise ConfigError(
            "clients train on Ray, which is not installed: `pip install edgefl-tiers[ray]`, or leave out simulation.ray"
        ) from error
    module: ModuleType = ray
    return module
