"""Workers as actors on a Ray cluster, or on a local Ray."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from types import ModuleType
from typing import Any

from edgefl.errors import ConfigError
from edgefl.simulator.trainers.pool import RemoteWorker, WorkerLost
from edgefl.simulator.trainers.worker import Method, TrainingWorker
from edgefl_server.shards import ray_cluster


class RayWorker:
    """Worker in a Ray ``actor``."""

    def __init__(self, ray: ModuleType, actor: Any) -> None:
        self._ray = ray
        self._actor = actor
        self.due: deque[Any] = deque()

    def call(self, method: Method, *given: object) -> None:
        self.due.append(self._actor.answer.remote(method, *given))

    def answer(self) -> object:
        errors = self._ray.exceptions
        try:
            return self._ray.get(self.due.popleft())
        except (errors.RayActorError, errors.WorkerCrashedError, errors.ObjectLostError) as error:
            raise WorkerLost from error

    def close(self) -> None:
        self._ray.kill(self._actor)


class RayWorkers:
    """Factory of workers on the cluster at ``address``.

    A Ray that the process is already connected to is used.

    Args:
        address: Address of the cluster.
        workers: Number of workers, each of which takes a core.
        gpus: GPUs of each worker.

    Raises:
        ConfigError: Ray is not installed, cannot be reached, or has too few resources.
    """

    def __init__(self, address: str, workers: int, gpus: int = 0) -> None:
        self._ray = ray_cluster.import_ray("clients train", "simulation")
        self._own = not self._ray.is_initialized()
        if self._own:
            self._connect(address, workers)
        try:
            ray_cluster.check_room(self._ray, address, workers, "simulation", ConfigError, gpus)
        except ConfigError:
            self.close()
            raise
        # The pool replaces a dead worker itself, because Ray would repeat calls on one without its state.
        options = {"num_cpus": 1, "num_gpus": gpus, "max_restarts": 0, "max_task_retries": 0}
        self._hired = self._ray.remote(**options)(TrainingWorker)

    def hire(self) -> RayWorker:
        return RayWorker(self._ray, self._hired.remote())

    def share(self, thing: object) -> object:
        return self._ray.put(thing)

    def ready(self, workers: Collection[RemoteWorker]) -> RemoteWorker:
        by_due = {worker.due[0]: worker for worker in workers if isinstance(worker, RayWorker)}
        (first,), _ = self._ray.wait(list(by_due), num_returns=1)
        return by_due[first]

    def close(self) -> None:
        if self._own:
            self._ray.shutdown()

    def _connect(self, address: str, workers: int) -> None:
        try:
            ray_cluster.connect(self._ray, address, workers)
        except (OSError, RuntimeError, ValueError) as error:
            raise ConfigError(
                f"there is no Ray at {address}: {error}; start one (`ray start --head`), correct the address, or use "
                f"{ray_cluster.LOCAL!r}",
                address=address,
            ) from error
