"""Read-only client of a federation: reads its announcement and blobs, publishes nothing and takes no task."""

from __future__ import annotations

import queue
import secrets
import threading
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from edgefl.errors import BrokerError, ConfigError, ProtocolError, StoreError
from edgefl.wire.limits import Limits
from edgefl.wire.mqtt.address import Address, client_id
from edgefl.wire.mqtt.events import Connected, Disconnected, Event, IncomingMessage, Refusal
from edgefl.wire.mqtt.messages import Round
from edgefl.wire.mqtt.session import Session
from edgefl.wire.mqtt.topics import Topics
from edgefl_device.config import DeviceLog
from edgefl_device.link.fetch import Fetcher
from edgefl_device.link.identity import ServerTrust, copy_trust
from edgefl_device.link.mirrors import Mirrors
from edgefl_device.round.executor import with_page
from edgefl_device.round.job import Job
from edgefl_device.store.database import Store

_POLL_S = 0.1
_REFUSED = b""
"""Replaces an announcement that the broker denies us."""


class ReadOnlyClient:
    """Connection to a federation that only reads: it sends nothing and takes no task. A context manager.

    The device's agent may run meanwhile.

    ::

        with ReadOnlyClient("demo", "phone-7", address, folder, limits) as client:
            job = job_of(client.announced(), tier="")
            data = client.blobs.get(job.bundle)

    Args:
        federation: Name of the federation.
        device: Name of the device.
        broker: Address of the broker.
        folder: Storage of blobs for the next time.
        limits: Sizes and timeouts.
        server_keys: Trusted keys of the server. Without any, those of the agent's store count, else the first one seen.
        agent: Folder of the agent's store; None if there is none.
        log: Receives changes of trust and problems of mirrors.
    """

    def __init__(
        self,
        federation: str,
        device: str,
        broker: Address,
        folder: Path,
        limits: Limits,
        server_keys: tuple[bytes, ...] = (),
        *,
        agent: Path | None = None,
        log: DeviceLog | None = None,
    ) -> None:
        self._federation, self._broker, self._limits = federation, broker, limits
        self._topics = Topics(federation)
        # Not the agent's client id: a broker would end its connection for ours.
        name = client_id(secrets.token_bytes(), "guest", federation, device, style=broker.client_ids)
        self._session = Session(broker, name, limits=limits, clean=True)
        log = log or DeviceLog(lambda _: None)
        self._store = Store(
            folder,
            limit_bytes=limits.store_bytes,
            history_rounds=limits.history_rounds,
            federation=federation,
            device=device,
        )
        try:
            if agent is not None and not server_keys:
                copy_trust(self._store, agent)
        except StoreError:
            self._store.close()
            raise
        self.trust = ServerTrust(self._store, server_keys, log)
        mirrors = Mirrors(limits, ca_file=broker.ca_file, log=log)
        self.blobs = Fetcher(self._session, self._topics, self._store, limits, mirrors)
        self._rounds: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._ending = threading.Event()
        self._trouble = ""
        self._reader = threading.Thread(target=self._read, name="read-only", daemon=True)

    def __enter__(self) -> ReadOnlyClient:
        self._session.subscribe([self._topics.current_round])
        self._session.start()
        self._reader.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The broker keeps our session: without a subscription nothing piles up in it.
        self._session.unsubscribe([self._topics.current_round])
        self._session.stop()
        self._ending.set()
        self._reader.join()
        self._store.close()

    def announced(self) -> Round:
        """Wait for the retained announcement of a round, open or not, and return it with the bundles of all tiers and
        formats.

        Raises:
            BrokerError: No announcement arrives in time.
            IdentityError: The announcement is not signed by the server.
        """
        timeout_s = self._limits.fetch_timeout_s * self._limits.fetch_retries
        try:
            payload = self._rounds.get(timeout=timeout_s)
            if not payload:
                raise BrokerError(self._trouble, federation=self._federation)
            announced = self.trust.open(Round, self._topics.current_round, payload)
            self.blobs.mirrors.use_announced(announced)
            return with_page(announced, self.blobs, self._limits)
        except queue.Empty:
            why = self._trouble or "no round was ever announced there"
            raise BrokerError(
                f"nothing is known of federation {self._federation!r} at {self._broker} after {timeout_s:g} s: {why}; is "
                "the server up, and is this the federation's name?",
                federation=self._federation,
            ) from None

    def _read(self) -> None:
        while not self._ending.is_set():
            with suppress(queue.Empty):
                self._take(self._session.inbox.get(timeout=_POLL_S))

    def _take(self, event: Event) -> None:
        if isinstance(event, Connected):
            self._trouble = ""
            self.blobs.poke()
        elif isinstance(event, Disconnected):
            self._trouble = event.reason
        elif isinstance(event, Refusal):
            self._trouble = event.text(self._broker)
            self._rounds.put(_REFUSED)
        elif not isinstance(event, IncomingMessage):
            return
        elif event.topic == self._topics.current_round:
            if event.payload:
                self._rounds.put(event.payload)
        else:
            with suppress(ProtocolError):
                self._topics.parse_blob(event.topic)
                self.blobs.deliver(event.topic, event.payload)


def job_of(announced: Round, tier: str, format: str = "onnx") -> Job:
    """Return a job (task with the round's bundle and weights) for ``tier`` on the announced model, without a task of
    the server.

    Args:
        announced: The announcement with all that it offers.
        tier: Name of the tier; "" if there is only one.
        format: Format that the engine runs.

    Raises:
        ConfigError: There is no such tier, or none in this format; the text lists the existing ones.
    """
    offer = announced.offer(format)
    offered = sorted(offer.bundles)
    others = sorted(name for name, other in announced.offers.items() if other.bundles)
    if not offered and others:
        raise ConfigError(
            f"round {announced.round} offers nothing in format {format}, but in {', '.join(others)}: choose another "
            f'`engine`, or have the server export it (formats = ["{format}"] in [export])',
            format=format,
            offered=others,
        )
    chosen = tier or (offered[0] if len(offered) == 1 else "")
    if chosen not in offered:
        problem = f"no tier {tier!r}" if tier else "several tiers"
        raise ConfigError(
            f"round {announced.round} offers {problem} in format {format}: choose one of {', '.join(offered) or 'none'} by "
            "`tier`",
            tier=tier,
            offered=offered,
        )
    return Job(
        run=announced.run,
        round=announced.round,
        tier=chosen,
        seed=0,
        nonce="",
        samples=0,
        model_version=announced.model_version,
        bundle=offer.bundles[chosen],
        units=announced.units,
        hyper=announced.hyper,
        signature=offer.signatures.get(chosen, b""),
        format=format,
    )
