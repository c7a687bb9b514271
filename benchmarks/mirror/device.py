"""The device's side, a process: what an agent fetches by, and its store. Told a Trial as its argument, whose folder is the
store's."""

from __future__ import annotations

import secrets
import sys
import threading
import time
from pathlib import Path

import msgspec

from benchmarks.mirror.told import FEDERATION, Fetched, Trial, tell
from edgefl.wire.limits import Limits
from edgefl.wire.mqtt.address import Address, client_id
from edgefl.wire.mqtt.envelope import peek
from edgefl.wire.mqtt.events import IncomingMessage
from edgefl.wire.mqtt.messages import Round
from edgefl.wire.mqtt.session import Session
from edgefl.wire.mqtt.topics import Topics
from edgefl_device.link.fetch import Fetcher
from edgefl_device.link.mirrors import Mirrors
from edgefl_device.memory import peak_bytes, return_memory_early
from edgefl_device.round.pages import whole_of
from edgefl_device.store.database import Store

_PATIENCE_S = 3600.0


class _Device:
    def __init__(self, trial: Trial) -> None:
        # As an owner with such a model has them.
        self._limits = Limits(store_bytes=2 * trial.nbytes + (64 << 20))
        self._topics = Topics(FEDERATION)
        self._session = Session(
            Address("127.0.0.1", trial.port),
            client_id(secrets.token_bytes(), "device", FEDERATION, "one"),
            limits=self._limits,
        )
        self._store = Store(Path(trial.folder), limit_bytes=self._limits.store_bytes, history_rounds=1)
        self._fetcher = Fetcher(
            self._session, self._topics, self._store, self._limits, lambda: False, Mirrors(self._limits)
        )
        self._announced: Round | None = None
        self._heard = threading.Event()
        self._session.subscribe([self._topics.current_round])
        self._session.start()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        while True:
            event = self._session.inbox.get(timeout=_PATIENCE_S)
            if not isinstance(event, IncomingMessage):
                continue
            if event.topic == self._topics.current_round:
                self._announced = peek(Round, event.payload)
                self._heard.set()
            else:
                self._fetcher.deliver(event.topic, event.payload)

    def fetch(self) -> Fetched:
        """All units, brought into the store and then read one by one, as the graphs of a round do."""
        self._heard.wait(_PATIENCE_S)
        assert self._announced is not None
        began = time.monotonic()
        self._fetcher.mirrors.announced(self._announced)
        whole = whole_of(self._announced, self._fetcher, self._limits)
        for data in self._fetcher.get_all([ref for line in whole.units.values() for ref in line]):
            del data
        return Fetched(
            seconds=time.monotonic() - began,
            broker_bytes=self._fetcher.received_bytes,
            mirror_bytes=self._fetcher.mirrors.fresh_bytes,
            peak_bytes=peak_bytes(),
        )


if __name__ == "__main__":
    return_memory_early()
    tell(_Device(msgspec.json.decode(sys.argv[1], type=Trial)).fetch())
