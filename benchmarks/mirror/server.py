"""The server's side, a process: the publisher of a run, with random bytes for weights. Told a Trial as its argument.

It lives until its standard input ends.
"""

from __future__ import annotations

import secrets
import sys
import time
from pathlib import Path

import msgspec
import numpy as np

from benchmarks.mirror.told import FEDERATION, Published, Trial, tell
from edgefl.errors import BrokerError
from edgefl.wire.blobs import BlobRef
from edgefl.wire.limits import Limits
from edgefl.wire.mqtt.address import Address, client_id
from edgefl.wire.mqtt.events import Connected
from edgefl.wire.mqtt.messages import ELSEWHERE, VERSION, Round, encode
from edgefl.wire.mqtt.session import Session
from edgefl.wire.mqtt.topics import Topics
from edgefl_server.publish.kept import MirrorFolder
from edgefl_server.publish.publisher import Publisher

_PATIENCE_S = 3600.0


def publish(trial: Trial) -> Published:
    """Offer the units, then announce them; returns when the broker has all that goes there."""
    limits, by_mirror = Limits(), trial.way == "mirror"
    session = Session(
        Address("127.0.0.1", trial.port),
        client_id(secrets.token_bytes(), "server", FEDERATION),
        limits=limits,
    )
    kept = MirrorFolder(Path(trial.folder)) if by_mirror else None
    publisher = Publisher(session, Topics(FEDERATION), limits.chunk_bytes, kept=kept, by_broker=not by_mirror)
    session.start()
    while not isinstance(session.inbox.get(timeout=_PATIENCE_S), Connected):
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
    if not publisher.wait_delivered(_PATIENCE_S):
        raise BrokerError(f"the broker did not take {trial.nbytes} bytes in {_PATIENCE_S:g} s")
    head = announced.paged(publisher.pages[0]) if publisher.pages else announced
    return Published(
        seconds=time.monotonic() - began,
        message_bytes=len(encode(head)),
        page_bytes=sum(ref.size for ref in publisher.pages),
    )


if __name__ == "__main__":
    tell(publish(msgspec.json.decode(sys.argv[1], type=Trial)))
    sys.stdin.read()
