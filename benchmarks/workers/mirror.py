"""The two sides of the benchmark ``mirror``: ``python -m benchmarks.workers.mirror server|device TRIAL``.

The argument is a :class:`MirrorTrial` as JSON, and the output one line of JSON. The server runs until its standard input
ends. Each side imports its own half of the product, because the memory of its process is measured.
"""

from __future__ import annotations

import secrets
import sys
import threading
import time
from pathlib import Path
from typing import Literal

import msgspec

FEDERATION = "bench-mirror"
Route = Literal["broker", "mirror"]
_TIMEOUT_S = 3600.0


class MirrorTrial(msgspec.Struct, frozen=True, kw_only=True):
    """One transfer of ``nbytes`` in units of ``unit_bytes``.

    ``mirror`` is a URL, or empty. ``folder`` holds the mirror's files, or the device's store.
    """

    way: Route
    port: int
    nbytes: int
    unit_bytes: int
    folder: str
    mirror: str = ""

    @property
    def units(self) -> list[int]:
        """Bytes of each unit."""
        whole, rest = divmod(self.nbytes, self.unit_bytes)
        return [self.unit_bytes] * whole + ([rest] if rest else [])


class PublishReport(msgspec.Struct, frozen=True, kw_only=True):
    """Time in which the server published everything, and the sizes of the announcement and of its page."""

    seconds: float
    message_bytes: int
    page_bytes: int


class FetchReport(msgspec.Struct, frozen=True, kw_only=True):
    """Time from the announcement until the device had read everything, and the bytes of each route."""

    seconds: float
    broker_bytes: int
    mirror_bytes: int
    peak_bytes: int


def publish(trial: MirrorTrial) -> PublishReport:
    """Publish random units and announce them. Returns when the broker has its part."""
    import numpy as np

    from edgefl.errors import BrokerError
    from edgefl.wire.blobs import BlobRef
    from edgefl.wire.limits import Limits
    from edgefl.wire.mqtt.address import Address, client_id
    from edgefl.wire.mqtt.events import Connected
    from edgefl.wire.mqtt.messages import ELSEWHERE, VERSION, Round, encode
    from edgefl.wire.mqtt.session import Session
    from edgefl.wire.mqtt.topics import Topics
    from edgefl_server.publish.blob_store import MirrorFolder
    from edgefl_server.publish.publisher import Publisher

    limits, by_mirror = Limits(), trial.way == "mirror"
    session = Session(
        Address("127.0.0.1", trial.port),
        client_id(secrets.token_bytes(), "server", FEDERATION),
        limits=limits,
    )
    kept = MirrorFolder(Path(trial.folder)) if by_mirror else None
    publisher = Publisher(
        session, Topics(FEDERATION), limits.chunk_bytes, store=kept, by_broker=not by_mirror
    )
    session.start()
    while not isinstance(session.inbox.get(timeout=_TIMEOUT_S), Connected):
        pass
    publisher.connected()
    began = time.monotonic()
    refs: dict[str, tuple[BlobRef, ...]] = {}
    for number, nbytes in enumerate(trial.units):
        refs[f"unit{number}"] = (publisher.offer(np.random.default_rng(number).bytes(nbytes)),)
    announced = Round(
        v=ELSEWHERE if by_mirror else VERSION,
        run="run",
        round=1,
        state="open",
        model_version="random",
        offers={},
        units=refs,
        hyper={},
        base=0,
        deadline=0.0,
        mirrors=(trial.mirror,) if by_mirror else (),
        mirrors_only=by_mirror,
    )
    publisher.announce(announced)
    if not publisher.wait_delivered(_TIMEOUT_S):
        raise BrokerError(f"the broker did not accept {trial.nbytes} bytes in {_TIMEOUT_S:g} s")
    head = announced.paged(publisher.pages[0]) if publisher.pages else announced
    return PublishReport(
        seconds=time.monotonic() - began,
        message_bytes=len(encode(head)),
        page_bytes=sum(ref.size for ref in publisher.pages),
    )


def fetch(trial: MirrorTrial) -> FetchReport:
    """Fetch all announced units into the store, then read them one by one, like the graphs of a round."""
    from edgefl.wire.limits import Limits
    from edgefl.wire.mqtt.address import Address, client_id
    from edgefl.wire.mqtt.envelope import peek
    from edgefl.wire.mqtt.events import IncomingMessage
    from edgefl.wire.mqtt.messages import Round
    from edgefl.wire.mqtt.session import Session
    from edgefl.wire.mqtt.topics import Topics
    from edgefl_device.host import peak_bytes
    from edgefl_device.link.fetch import Fetcher
    from edgefl_device.link.mirrors import Mirrors
    from edgefl_device.round.executor import with_page
    from edgefl_device.store.database import Store

    # Limits of an owner who has such a model.
    limits, topics = Limits(store_bytes=2 * trial.nbytes + (64 << 20)), Topics(FEDERATION)
    session = Session(
        Address("127.0.0.1", trial.port),
        client_id(secrets.token_bytes(), "device", FEDERATION, "one"),
        limits=limits,
    )
    store = Store(Path(trial.folder), limit_bytes=limits.store_bytes, history_rounds=1)
    fetcher = Fetcher(session, topics, store, limits, Mirrors(limits))
    announcements: list[Round] = []
    arrived = threading.Event()

    def read_messages() -> None:
        while True:
            event = session.inbox.get(timeout=_TIMEOUT_S)
            if not isinstance(event, IncomingMessage):
                continue
            if event.topic == topics.current_round:
                announcements.append(peek(Round, event.payload))
                arrived.set()
            else:
                fetcher.deliver(event.topic, event.payload)

    session.subscribe([topics.current_round])
    session.start()
    threading.Thread(target=read_messages, daemon=True).start()
    arrived.wait(_TIMEOUT_S)
    began = time.monotonic()
    fetcher.mirrors.use_announced(announcements[-1])
    whole = with_page(announcements[-1], fetcher, limits)
    for data in fetcher.get_all([ref for line in whole.units.values() for ref in line]):
        del data
    return FetchReport(
        seconds=time.monotonic() - began,
        broker_bytes=fetcher.received_bytes,
        mirror_bytes=fetcher.mirrors.fresh_bytes,
        peak_bytes=peak_bytes(),
    )


def main(side: str, text: str) -> None:
    """Run one side and print its report."""
    if side == "device":
        from edgefl_device.host import return_memory_early

        return_memory_early()
    trial = msgspec.json.decode(text, type=MirrorTrial)
    report = publish(trial) if side == "server" else fetch(trial)
    sys.stdout.write(msgspec.json.encode(report).decode() + "\n")
    sys.stdout.flush()
    if side == "server":
        sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
