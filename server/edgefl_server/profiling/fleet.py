"""Profiler of a fleet: requests measurements of bundles from devices over MQTT, beside a running federation.

::

    offered = by_tier([read_bundle(Path("weak.efl"))])
    report = FleetProfiler(Address("localhost"), ProfilingOptions(federation="demo", offered=offered)).run()

It only reads the topics of the federation. Its own blobs are published under a separate name and cleared at the end.
"""

from __future__ import annotations

import queue
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from edgefl.errors import BrokerError, BundleError, IdentityError, ProtocolError
from edgefl.system.clock import Clock
from edgefl.wire.blobs import BlobRef, describe, split
from edgefl.wire.bundle import profiles
from edgefl.wire.bundle.archive import Signer
from edgefl.wire.limits import Limits
from edgefl.wire.mqtt.address import Address, client_id
from edgefl.wire.mqtt.broker_limits import check_features
from edgefl.wire.mqtt.connection import Delivery
from edgefl.wire.mqtt.envelope import MessageCounter, MessageSigner, open_message, unsigned
from edgefl.wire.mqtt.events import Connected, Disconnected, Event, IncomingMessage, Refusal, check_limit
from edgefl.wire.mqtt.messages import (
    AnyMessage,
    Hello,
    ProfileAnswer,
    ProfileOffer,
    ProfileRequest,
    Status,
    decode,
    encode,
)
from edgefl.wire.mqtt.reasons import reason_text
from edgefl.wire.mqtt.session import Session
from edgefl.wire.mqtt.topics import Topics
from edgefl.wire.text import printable
from edgefl_server.profiling.reports import DeviceProfileState, DeviceReport, FleetReport, Offered, tier_for

_POLL_S = 0.2
_FAREWELL_S = 5.0
_LEFTOVER_S = 3600.0
"""Seconds after its end at which another profiler's offer counts as abandoned. It allows for differences of clocks."""
_MOST_CHUNKS = 1 << 20
_MOST_REASON, _MOST_TEXT = 32, 400


@dataclass(frozen=True, kw_only=True)
class ProfilingOptions:
    """Settings of a :class:`FleetProfiler`. Times are in seconds.

    Attributes:
        federation: Name of the federation.
        offered: Bundles to measure, by tier and format.
        devices: Names of the devices to ask; empty for all that are online.
        repeat: Number of measured steps.
        timeout_s: Longest duration of the whole profile.
        connect_s: Longest wait for the broker.
        settle_s: Time for further devices to appear.
        answer_s: Longest wait for the first answer of a device.
        grace_s: Wait for a device that went offline.
        again_s: Time between repeated requests.
        limits: Limits of the federation.
    """

    federation: str
    offered: Offered
    devices: frozenset[str] = frozenset()
    repeat: int = 20
    timeout_s: float = 300.0
    connect_s: float = 5.0
    settle_s: float = 3.0
    answer_s: float = 30.0
    grace_s: float = 10.0
    again_s: float = 5.0
    limits: Limits = field(default_factory=Limits)


class FleetProfiler:
    """Profiler of a fleet: asks devices over MQTT to measure bundles, and collects their profiles.

    :meth:`run` does all of it; :meth:`stop` ends it early.

    Args:
        address: Address of the broker.
        options: Settings of the profile.
        signer: Key that signs the requests and the bundles; None to leave them unsigned.
        clock: Monotonic clock in seconds.
    """

    def __init__(
        self,
        address: Address,
        options: ProfilingOptions,
        *,
        signer: Signer | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self._options = options
        self._address = address
        self._clock = clock
        self._nonce = secrets.token_hex(8)
        self._topics = Topics(options.federation)
        self._own_topics = self._topics.profile(self._nonce)
        secret = secrets.token_bytes()
        name = client_id(secret, "profiler", options.federation, self._nonce, style=address.client_ids)
        self._session = Session(address, name, limits=options.limits, clean=True)
        self._probe_nonce = secrets.token_hex(8)
        self._probe_id = client_id(
            secret, "profiler", options.federation, self._probe_nonce, style=address.client_ids
        )
        # An asker begins anew each time, and lives by the clock.
        self._seal = MessageSigner(signer.keys, MessageCounter()).seal if signer else unsigned
        self._keys: dict[str, bytes] = {}
        self._rows: dict[str, DeviceProfileState] = {}
        self._blobs: dict[str, tuple[BlobRef, bytes]] = {}
        self._refs: dict[str, dict[str, BlobRef]] = {
            tier: {kind: self._add(bundle.encoded) for kind, bundle in bundles.items()}
            for tier, bundles in options.offered.items()
        }
        self._signatures = {
            tier: {kind: signer.sign(ref.sha256) for kind, ref in refs.items()} if signer else {}
            for tier, refs in self._refs.items()
        }
        for bundle in (bundle for bundles in options.offered.values() for bundle in bundles.values()):
            for ref in bundle.manifest.blobs:  # cut as the manifest says
                self._blobs[ref.sha256] = (ref, bundle.blobs[ref.sha256])
        self._started_at = clock()
        self._up_since: float | None = None
        self._trouble = ""
        self._stopped = False

    def _add(self, data: bytes) -> BlobRef:
        ref = describe(data, self._options.limits.chunk_bytes)
        self._blobs[ref.sha256] = (ref, data)
        return ref

    def stop(self) -> None:
        """End :meth:`run` soon with the profiles so far. May be called from a signal handler."""
        self._stopped = True

    # -- the loop --------------------------------------------------------------------------------------------

    def run(self, progress: Callable[[FleetReport], None] = lambda _: None) -> FleetReport:
        """Send the requests and wait until every device has answered or the time is over. Return the report.

        Everything that was published is cleared from the broker at the end.

        Args:
            progress: Called with the report so far after each change.

        Raises:
            BrokerError: If the broker cannot be reached, refuses a topic, or lacks a feature.
        """
        self._started_at = self._clock()
        for device in self._options.devices:
            self._row(device)
        self._session.subscribe(self._topics.profile_filters)
        self._session.start()
        try:
            while not self._stopped and not self._is_over():
                self._next(progress)
            self._conclude()
        finally:
            self._leave()
        return self.report()

    def report(self) -> FleetReport:
        """Return the report so far, with the devices sorted by name. May be called while :meth:`run` is running."""
        return FleetReport(
            federation=self._options.federation,
            seconds=round(self._clock() - self._started_at, 3),
            devices=tuple(self._rows[name].report for name in sorted(self._rows)),
        )

    def _next(self, progress: Callable[[FleetReport], None]) -> None:
        before = self.report().devices
        with suppress(queue.Empty):
            self._handle(self._session.inbox.get(timeout=_POLL_S))
        for name, row in self._rows.items():
            self._ask_if_due(name, row)
        if self.report().devices != before:
            progress(self.report())

    def _handle(self, event: Event) -> None:
        check_limit(event, self._address)
        match event:
            case Connected():
                if self._up_since is None:
                    version, topic = self._session.version, self._topics.profile(self._probe_nonce).offer
                    filters = self._topics.profile_filters
                    check_features(self._address, version, self._probe_id, topic, filters[-1])
                self._publish_offer()
            case Disconnected():
                self._trouble = event.reason
            case Refusal():
                raise BrokerError(event.text(self._address), topic=event.topic, reason=event.reason)
            case IncomingMessage(payload=payload) if payload:
                with suppress(ProtocolError, BundleError):  # an invalid message is not an answer
                    self._incoming(event)

    def _publish_offer(self) -> None:
        """Publish the bundles as retained messages, and mark all requests to be sent again.

        It runs after each connection, because the broker may have lost them.
        """
        self._up_since = self._up_since or self._clock()
        until = time.time() + self._seconds_left()
        offer = ProfileOffer(until=until, blobs=tuple(ref for ref, _ in self._blobs.values()))
        expires_s = self._seconds_left() + _LEFTOVER_S  # where a killed command left it, the broker clears it
        self._session.publish(self._own_topics.offer, encode(offer), retain=True, expires_s=expires_s)
        for ref, data in self._blobs.values():
            for index, piece in enumerate(split(data, ref.chunk)):
                topic = self._own_topics.blob_chunk(ref.sha256, index)
                self._session.publish(topic, piece, retain=True, expires_s=expires_s)
        for row in self._rows.values():
            row.asked_last = 0.0

    def _seconds_left(self) -> float:
        return max(1.0, self._started_at + self._options.timeout_s - self._clock())

    def _is_over(self) -> bool:
        now = self._clock()
        if self._up_since is None:
            if now - self._started_at > self._options.connect_s:
                raise BrokerError(
                    f"no connection to the broker at {self._address} in {self._options.connect_s:g} s: "
                    f"{self._trouble or 'it does not answer'}",
                    address=str(self._address),
                )
            return False
        if now - self._started_at > self._options.timeout_s:
            return True
        settled = now - self._up_since > self._options.settle_s
        return settled and all(self._is_settled(name, row, now) for name, row in self._rows.items())

    def _is_settled(self, name: str, row: DeviceProfileState, now: float) -> bool:
        """Return True if the profiler need not wait for this device any longer.

        A device that the options name may still connect, so the profiler waits for it while it is offline.
        """
        if row.final:
            return True
        if not row.online:
            gone = row.offline_since is None or now - row.offline_since > self._options.grace_s
            return gone and name not in self._options.devices
        # One that is online and says no hello that we can read is never asked.
        since = row.asked_first if row.has_hello else row.online_since
        return not row.has_answered and since is not None and now - since > self._options.answer_s

    # -- messages --------------------------------------------------------------------------------------------

    def _incoming(self, message: IncomingMessage) -> None:
        if message.topic.startswith(f"{self._topics.root}/profiles/"):
            self._clear_forgotten(self._topics.parse_offer(message.topic), message.payload)
            return
        device, leaf, numbers = self._topics.parse_device(message.topic)
        if numbers or (self._options.devices and device not in self._options.devices):
            return
        if leaf == "hello":
            self._hello(device, self._open_message(Hello, device, message))
        elif leaf == "status":
            self._status(self._row(device), self._open_message(Status, device, message).online)
        elif leaf == "profiles":
            self._answer(self._row(device), self._open_message(ProfileAnswer, device, message))

    def _open_message(self, kind: type[AnyMessage], device: str, message: IncomingMessage) -> AnyMessage:
        """Verify and return a device's message. The first key that signs for a device is trusted while this command
        runs.

        Raises:
            IdentityError: If another key signed it.
            ProtocolError: If the message is malformed or its signature is invalid.
        """
        opened = open_message(kind, message.topic, message.payload)
        if self._keys.setdefault(device, opened.key) != opened.key:
            raise IdentityError("wrong-key", f"two keys speak for {device}", device=device)
        return opened.message

    def _row(self, device: str) -> DeviceProfileState:
        return self._rows.setdefault(device, DeviceProfileState(DeviceReport(device=device)))

    def _status(self, row: DeviceProfileState, online: bool) -> None:
        if row.online and not online:
            row.offline_since = self._clock()
        if online and not row.online:
            row.asked_last = 0.0  # what it was asked before may be lost
            row.online_since = self._clock()
        row.online = online

    def _hello(self, device: str, hello: Hello) -> None:
        row = self._row(device)
        row.has_hello = True
        row.update(
            agent=printable(hello.agent, 64),
            engines={printable(name, 32): printable(version, 32) for name, version in hello.engines.items()},
            memory_bytes=hello.memory_bytes,
            cores=hello.cores,
        )
        if row.asked_first is None and not row.final:
            self._choose(device, row, hello)

    def _choose(self, device: str, row: DeviceProfileState, hello: Hello) -> None:
        tier = tier_for(self._options.offered, device, hello)
        if tier:
            row.update(tier=tier)
            return
        request = f"it is of tier {printable(hello.tier, 64)!r}" if hello.tier else "it names no tier"
        offered = ", ".join(self._options.offered)
        row.update(
            state="skipped", reason="no-tier", text=f"{request}, offered are {offered}: name one by `tier`"
        )

    def _answer(self, row: DeviceProfileState, answer: ProfileAnswer) -> None:
        if answer.nonce != self._nonce or row.final:
            return
        row.has_answered = row.online = True
        if answer.state == "taken":
            row.update(state="measuring")
        elif answer.state == "declined":
            reason, text = (
                printable(answer.reason, _MOST_REASON),
                reason_text(answer.reason, answer.text)[:_MOST_TEXT],
            )
            row.update(state="declined", reason=reason or "other", text=text)
        else:
            self._store_profile(row, answer.profile)

    def _store_profile(self, row: DeviceProfileState, data: bytes) -> None:
        """Store an encoded profile in the device's row, as state ``done``.

        If it is malformed, or of a bundle that was not requested, the device is stored as ``declined``.
        """
        try:
            profile = profiles.decode(data)
        except ProtocolError as error:
            row.update(state="declined", reason="malformed", text=error.message[:_MOST_TEXT])
            return
        digests = {ref.sha256 for ref in self._refs.get(row.report.tier, {}).values()}
        if profile.bundle not in digests:
            text = f"it profiled bundle {printable(profile.bundle, 12)!r}, which it was not asked for"
            row.update(state="declined", reason="wrong-bundle", text=text)
            return
        row.update(state="done", profile=profile)

    def _clear_forgotten(self, nonce: str, payload: bytes) -> None:
        """Clear the retained blobs of the profiler ``nonce`` from the broker, if its offer ended over an hour ago.

        Such a profiler was killed before it could clear them. ``payload`` is its encoded offer.

        Raises:
            ProtocolError: If the offer is malformed.
        """
        offer = decode(ProfileOffer, payload)
        if nonce == self._nonce or time.time() < offer.until + _LEFTOVER_S:
            return
        for ref in offer.blobs:
            ref.check(self._options.limits.max_blob_bytes)
        if sum(ref.count for ref in offer.blobs) <= _MOST_CHUNKS:
            self._clear(nonce, offer.blobs)

    # -- asking, and leaving ---------------------------------------------------------------------------------

    def _ask_if_due(self, device: str, row: DeviceProfileState) -> None:
        now, ready = self._clock(), row.has_hello and row.online and self._session.connected
        if not ready or row.final or not row.report.tier:
            return
        # Once it took the request, it is asked again only because its answer may be lost.
        pause = self._options.again_s * (6 if row.has_answered else 1)
        if row.asked_last and now - row.asked_last < pause:
            return
        request = ProfileRequest(
            nonce=self._nonce,
            bundles=self._refs[row.report.tier],
            within_s=self._seconds_left(),
            repeat=self._options.repeat,
            signatures=self._signatures[row.report.tier],
        )
        topic = self._topics.device(device).profile_requests
        self._session.publish(topic, self._seal(topic, request), expires_s=request.within_s)
        row.asked_last = now
        row.asked_first = row.asked_first or now

    def _conclude(self) -> None:
        """Set the final state and its explanation for each device without a profile."""
        options = self._options
        for row in (row for row in self._rows.values() if not row.final):
            if not row.has_hello and not row.online:
                text = f"no device of this name ever said hello in federation {options.federation}"
                row.update(state="unknown", text=text)
            elif not row.online:
                row.update(state="offline", text="its agent does not run, or has no connection")
            elif not row.has_hello:
                text = "it is online, and its hello is missing or of another version: install the same edgefl there"
                row.update(state="silent", text=text)
            elif row.has_answered and self._stopped:
                row.update(
                    state="late", text="it took the request, and the command was stopped before it was done"
                )
            elif row.has_answered:
                text = f"it took the request and was not done in {options.timeout_s:g} s: ask with a longer `timeout`"
                row.update(state="late", text=text)
            else:
                text = (
                    "no answer: its edgefl knows no profiles, the broker's access rules keep the request from it, "
                    "or its connection is slow"
                )
                row.update(state="silent", text=text)

    def _leave(self) -> None:
        """Clear everything that this profiler published at the broker, wait for the confirmation, and disconnect."""
        if self._session.connected:
            last = self._clear(self._nonce, tuple(ref for ref, _ in self._blobs.values()))
            last.wait(_FAREWELL_S)
        self._session.stop()

    def _clear(self, nonce: str, blobs: tuple[BlobRef, ...]) -> Delivery:
        topics = self._topics.profile(nonce)
        for ref in blobs:
            for index in range(ref.count):
                self._session.publish(topics.blob_chunk(ref.sha256, index), b"", retain=True)
        return self._session.publish(topics.offer, b"", retain=True)
