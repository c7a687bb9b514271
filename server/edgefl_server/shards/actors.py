"""Workers as actors on a Ray cluster, or on a Ray that is started here: the same worker, on whatever machine has room.

They reach the broker, the journal's database and the place of the updates by themselves; the server tells them of rounds,
and hears of them, through Ray.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from types import ModuleType
from typing import Any

from edgefl.errors import StoreError
from edgefl_server.shards import ray_cluster
from edgefl_server.shards.messages import Died, News, Order, Stop, Told
from edgefl_server.shards.worker import Worker

_TOLD_S = 10.0
"""For an actor to take the order to stop."""
_HEARD_S = 1.0
"""That an actor waits for news before it answers that there are none."""
_ANSWER_S = 60.0
"""For an actor to come up, or to answer at all: Ray itself waits for ever for a core that others have."""
_MOST_NEWS = 256


class Actor:
    """What runs in the cluster: a :class:`Worker` on a thread of its own, told and heard by calls."""

    def __init__(self, told: Told) -> None:
        self._news: queue.SimpleQueue[News] = queue.SimpleQueue()
        self._worker = Worker(told, self._news.put)
        threading.Thread(target=self._run, name="worker", daemon=True).start()

    def tell(self, *orders: Order) -> None:
        """What the server says, in its order."""
        for order in orders:
            self._worker.tell(order)

    def hear(self) -> list[News]:
        """What there is to say by now; nothing, after a while without news."""
        news: list[News] = []
        with suppress(queue.Empty):
            news.append(self._news.get(timeout=_HEARD_S))
            while len(news) < _MOST_NEWS:
                news.append(self._news.get_nowait())
        return news

    def _run(self) -> None:
        why = "ended"
        try:
            self._worker.run()
        except Exception as error:
            why = f"ended: {type(error).__name__}: {error}"
        self._news.put(Died(why))


class ActorHand:
    """The server's end. ``deliver`` gets what the worker says, on a thread of its own; :class:`Died` is its last word."""

    def __init__(self, ray: ModuleType, actor: Any, name: str, deliver: Callable[[News], None]) -> None:
        self._ray = ray
        self._actor = actor
        self._deliver = deliver
        self._orders: queue.SimpleQueue[Order | None] = queue.SimpleQueue()
        self._gone = False
        threading.Thread(target=self._hear, name=f"hear-{name}", daemon=True).start()
        threading.Thread(target=self._tell, name=f"tell-{name}", daemon=True).start()

    def tell(self, order: Order) -> None:
        """A worker that is gone hears nothing, which is told elsewhere."""
        self._orders.put(order)

    def kill(self) -> None:
        """At once; whatever it did not journal is lost."""
        self._gone = True
        self._orders.put(None)
        with suppress(Exception):  # of a cluster that is gone itself
            self._ray.kill(self._actor)

    def end(self) -> None:
        """Let it leave the broker, and wait for that."""
        self._gone = True
        with suppress(Exception):
            self._ray.get(self._actor.tell.remote(Stop()), timeout=_TOLD_S)
        self.kill()

    def _tell(self) -> None:
        """One after the other: calls of several threads might overtake each other."""
        while (order := self._orders.get()) is not None:
            with suppress(Exception):  # who is gone is noticed by the other thread
                self._ray.get(self._actor.tell.remote(order))

    def _hear(self) -> None:
        try:
            while not self._gone:
                for news in self._ray.get(self._actor.hear.remote(), timeout=_ANSWER_S):
                    self._deliver(news)
                    if isinstance(news, Died):
                        return
        except self._ray.exceptions.GetTimeoutError:
            self._deliver(
                Died(f"did not answer for {_ANSWER_S:g} s: has the Ray cluster a free core for it?")
            )
        except Exception as error:  # Ray has many, and each of them means that the worker is out of reach
            self._deliver(Died(f"is out of Ray's reach ({type(error).__name__})"))


class Actors:
    """Hires workers on the cluster at ``address``, a core each. A Ray that the process is connected to already is used as it
    is; so is one that was lost and is there again. ConfigError where Ray is not installed."""

    def __init__(self, address: str, workers: int) -> None:
        self._address = address
        self._workers = workers
        self._ray = ray_cluster.import_ray("workers are to run", "server")

    def __call__(self, told: Told, deliver: Callable[[News], None]) -> ActorHand:
        """StoreError where there is no cluster, or no room in it: the server tries again."""
        try:
            if not self._ray.is_initialized():
                ray_cluster.connect(self._ray, self._address, self._workers)
            self._check_room()
            hired = self._ray.remote(num_cpus=1, max_restarts=0, max_task_retries=0, max_concurrency=4)(Actor)
            actor = hired.remote(told)
        except StoreError:
            raise
        except Exception as error:
            self._disconnect()
            raise StoreError(
                f"there is no Ray at {self._address} ({' '.join(str(error).split())}): start one (`ray start --head`), "
                f"correct server.ray, or use {ray_cluster.LOCAL!r}",
                address=self._address,
            ) from error
        return ActorHand(self._ray, actor, f"worker-{told.worker}", deliver)

    def _check_room(self) -> None:
        found = ray_cluster.check_room(self._ray, self._address, self._workers, "server", StoreError)
        if self._ray.available_resources().get("CPU", 0) < 1:
            raise StoreError(
                f"the Ray cluster at {self._address} has {found} cores, and all are taken: set server.workers lower, add "
                "nodes, or wait for other jobs to end",
                found=found,
            )

    def _disconnect(self) -> None:
        with suppress(Exception):
            self._ray.shutdown()
