"""Profile requests of the server: handled one at a time, only while no round runs, each answered with its nonce.

A request is valid while its offer is retained at the broker. One that arrives later, such as after days without a
connection, is dropped silently. A measurement whose requester leaves is stopped.

::

    service = ProfileService(executor, session, topics, ProfilerProcess(engine="onnx", threads=4))
    service.handle_request(payload)
    service.step(busy=False)    # at each turn of the agent's loop: begins, stops and ends measurements
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import msgspec

from edgefl.errors import BundleError, EdgeflError, IdentityError, RoundAborted, RoundDeclined
from edgefl.wire.blobs import BlobRef
from edgefl.wire.bundle import profiles
from edgefl.wire.bundle.manifest import Manifest, decode_manifest
from edgefl.wire.bundle.profiles import BundleProfile, MemoryTimeline
from edgefl.wire.mqtt import messages
from edgefl.wire.mqtt.envelope import peek
from edgefl.wire.mqtt.messages import ENVELOPE_BYTES, TOO_LARGE, ProfileAnswer, decline_profile
from edgefl.wire.mqtt.topics import Topics
from edgefl_device.link.fetch import Fetcher
from edgefl_device.link.identity import DuplicateMessageError, SignedSession
from edgefl_device.link.presence import NoticeLimiter
from edgefl_device.profile.measure.meters import thinned
from edgefl_device.round.executor import RoundExecutor, check_manifest_ref, check_runtime

_MOST_WAITING = 4
"""Requests with an offer, and as many without one."""
_MOST_ANSWERS = 4
"""Answers kept for requests that come again; with a profile each takes up to one message."""
_HOUR_S = 3600.0
_SETTLED_S = 1.0
"""Time after a round before a measurement begins: rounds that follow at once leave no time for one."""


class BundleProfiler(Protocol):
    """Interface of a profiler of bundle files."""

    def measure(self, bundle: Path, repeat: int, cancelled: threading.Event, until: float) -> BundleProfile:
        """Return the profile of the file ``bundle``, with ``repeat`` measured calls of each graph.

        Raises:
            RoundAborted: ``cancelled`` was set.
            RoundDeclined: ``time.monotonic()`` exceeds ``until``.
        """


@dataclass
class _ActiveRequest:
    """Request that waits or is being measured.

    Attributes:
        request: The message.
        came: Time of its arrival (``time.monotonic``).
        most_s: Longest duration from its arrival.
        offered: True if its offer is retained at the broker.
        gone: True if the requester has left.
        stop: Event that ends the measurement.
        answer: The answer, once there is one.
        details: Details of a decline for the device's own log.
    """

    request: messages.ProfileRequest
    came: float
    most_s: float
    offered: bool = False
    gone: bool = False
    stop: threading.Event = field(default_factory=threading.Event)
    answer: messages.ProfileAnswer | None = None
    details: str = ""

    @property
    def nonce(self) -> str:
        return self.request.nonce

    @property
    def until(self) -> float:
        return self.came + min(self.request.within_s, self.most_s)


class ProfileService:
    """Handler of the server's requests to measure a bundle on this device (profile requests).

    One thread calls its methods; a measurement runs on another thread.

    Args:
        executor: Provides the device's engine, store, rules and limits.
        session: Session that publishes answers.
        topics: Topics of the federation.
        profiler: Measures a bundle.
    """

    def __init__(
        self, executor: RoundExecutor, session: SignedSession, topics: Topics, profiler: BundleProfiler
    ) -> None:
        config = executor.config
        self.profiler = profiler
        self._executor = executor
        self._limits = config.limits
        self._log = executor.log
        self._session = session
        self._topics = topics
        self._mine = topics.device(config.device)
        self._folder = config.folder / "profile"
        self._waiting: list[_ActiveRequest] = []
        self._answers: dict[str, messages.ProfileAnswer] = {}
        self._worker: threading.Thread | None = None
        self._idle = threading.Event()
        self._fetcher: Fetcher | None = None
        self._busy_until = -math.inf
        self._taken: deque[float] = deque()
        self._strangers = NoticeLimiter(self._limits.notice_s)
        self._clear()  # the folder of a process that was killed

    @property
    def topic(self) -> str:
        """Topic on which requests arrive."""
        return self._mine.profile_requests

    def owns(self, topic: str) -> bool:
        """Return True if a message on ``topic`` is for :meth:`deliver`."""
        return topic.startswith(f"{self._topics.root}/profiles/")

    def deliver(self, topic: str, payload: bytes) -> None:
        """Handle a message for a waiting request: a chunk of its bundle, or its offer. An empty offer shows that the
        requester has left.
        """
        for entry in self._waiting:
            if topic == self._offer(entry.nonce):
                self._note_offer(entry, there=bool(payload))
                return
        if self._fetcher is not None:
            self._fetcher.deliver(topic, payload)

    def poke(self) -> None:
        """Request missing chunks again, on a new connection."""
        if self._fetcher is not None:
            self._fetcher.poke()

    def handle_request(self, payload: bytes) -> None:
        """Handle a request, which may arrive repeatedly: accept it, or send an answer that declines.

        Raises:
            ProtocolError: The request is malformed, not signed by the server, or a copy.
        """
        try:
            request = self._executor.trust.open(messages.ProfileRequest, self.topic, payload)
        except DuplicateMessageError:
            raise
        except IdentityError:  # the requester gets an answer, a flood does not
            if self._strangers.is_due(messages.SIGNATURE):
                self._send(
                    messages.decline_profile(peek(messages.ProfileRequest, payload).nonce, messages.SIGNATURE)
                )
            raise
        known = self._answers.get(request.nonce)
        if known is not None:
            self._send(known)
        elif twin := next((entry for entry in self._waiting if entry.nonce == request.nonce), None):
            if twin.offered:
                self._send(messages.ProfileAnswer(nonce=request.nonce, state="taken"))
            else:  # the requester waits, and a slow link takes long to bring the offer
                twin.request, twin.came = request, time.monotonic()
        elif (refusal := self._refusal(request)) is not None:
            self._send(refusal)
        elif sum(entry.offered for entry in self._waiting) >= _MOST_WAITING:
            text = f"{_MOST_WAITING} other requests are waiting"
            self._send(self._decline(request.nonce, messages.BUSY, text))
        else:
            # The oldest without an offer leaves if there are too many, so that others can be handled.
            stale = [entry for entry in self._waiting if not entry.offered]
            if len(stale) >= _MOST_WAITING:
                self._leave(min(stale, key=lambda entry: entry.came))
            self._waiting.append(_ActiveRequest(request, time.monotonic(), self._limits.profile_s))
            self._session.session.subscribe([self._offer(request.nonce)])

    def _refusal(self, request: messages.ProfileRequest) -> messages.ProfileAnswer | None:
        """Return the answer that declines a request because of a limit or the owner's rules; None if it is accepted.

        Requests are counted before the rules are checked, because rules may run a command.
        """
        limits, now = self._limits, time.monotonic()
        while self._taken and now - self._taken[0] > _HOUR_S:
            self._taken.popleft()
        if len(self._taken) >= limits.profiles_an_hour:
            text = f"it was asked {limits.profiles_an_hour} times within an hour (limits.profiles_an_hour)"
            return self._decline(request.nonce, messages.BUSY, text)
        self._taken.append(now)
        if request.repeat > limits.profile_repeat:
            text = f"{request.repeat} repetitions, and limits.profile_repeat is {limits.profile_repeat} here"
            return self._decline(request.nonce, messages.TOO_LARGE, text)
        try:
            self._executor.rules.check("profile")
        except RoundDeclined as error:
            return self._decline(request.nonce, error.reason, error.message)
        return None

    def _decline(self, nonce: str, reason: str, text: str) -> messages.ProfileAnswer:
        """Log the reason and its details ``text``, and return the answer that declines a request with the reason alone."""
        self._log.event("profile", f"declined ({nonce}) {reason}: {text}")
        return messages.decline_profile(nonce, reason)

    def step(self, *, busy: bool) -> None:
        """Begin, stop or end measurements as due.

        Args:
            busy: True if a round runs or begins now.
        """
        now = time.monotonic()
        self._busy_until = now if busy else self._busy_until
        if self._worker is not None:
            if busy:
                self._waiting[0].stop.set()
            if not self._idle.is_set():
                return
            self._worker.join()
            self._worker, self._fetcher = None, None
            if (answer := self._waiting[0].answer) is not None:
                self._settle(self._waiting[0], answer)
        self._drop(now)
        self._waiting.sort(key=lambda asked: not asked.offered)
        settled = not busy and now - self._busy_until >= _SETTLED_S
        if settled and self._waiting and self._waiting[0].offered:
            self._begin(self._waiting[0])

    def stop(self) -> None:
        """Stop a running measurement, and wait up to 10 seconds for its thread."""
        if self._worker is not None:
            self._waiting[0].stop.set()
            if self._fetcher is not None:
                self._fetcher.poke()
            self._worker.join(timeout=10.0)

    # -- one request -----------------------------------------------------------------------------------------

    def _offer(self, nonce: str) -> str:
        return self._topics.profile(nonce).offer

    def _note_offer(self, asked: _ActiveRequest, *, there: bool) -> None:
        """Record that a request's offer appeared at the broker (``there``) or was removed, which stops its measurement."""
        if not there:
            asked.gone = True
            asked.stop.set()
        elif not asked.offered:
            asked.offered = True
            self._send(messages.ProfileAnswer(nonce=asked.nonce, state="taken"))
            self._log.event("profile", f"asked for a profile ({asked.nonce})")

    def _drop(self, now: float) -> None:
        """Drop requests whose requester has left, and decline those whose time is over."""
        timeout = self._limits.fetch_timeout_s
        for entry in list(self._waiting):
            if entry.gone or (not entry.offered and now > min(entry.until, entry.came + timeout)):
                self._leave(entry)
            elif now > entry.until:
                self._settle(entry, messages.decline_profile(entry.nonce, messages.BUSY))

    def _leave(self, asked: _ActiveRequest) -> None:
        self._forget(asked)
        self._log.event("profile", f"nobody waits for it any more ({asked.nonce})")

    def _forget(self, asked: _ActiveRequest) -> None:
        self._waiting.remove(asked)
        self._session.session.unsubscribe([self._offer(asked.nonce)])

    def _begin(self, asked: _ActiveRequest) -> None:
        asked.stop.clear()
        self._idle.clear()
        topics = self._topics.profile(asked.nonce)
        self._fetcher = Fetcher(
            self._session.session, topics, self._executor.store, self._limits, cancelled=asked.stop
        )
        self._worker = threading.Thread(
            target=self._attempt, args=(asked, self._fetcher), name="profile", daemon=True
        )
        self._worker.start()

    def _attempt(self, asked: _ActiveRequest, fetcher: Fetcher) -> None:
        """Measure the bundle of a request once, on the worker thread, and set the request's answer.

        If the measurement stops because a round begins, no answer is set; it is tried again after the round.
        """
        nonce = asked.nonce
        try:
            profile = self._profile(asked, fetcher)
            asked.answer = answer_with(nonce, profile, self._limits.chunk_bytes)
        except RoundAborted:
            self._log.event(
                "profile", f"stopped ({nonce})" if asked.gone else f"put off ({nonce}): a round begins"
            )
        except RoundDeclined as error:
            asked.answer, asked.details = messages.decline_profile(nonce, error.reason), error.message
        except Exception as error:  # whatever an engine or the system raises must not end the agent
            asked.answer = messages.decline_profile(nonce, messages.PROFILE_FAILED)
            asked.details = (
                error.message if isinstance(error, EdgeflError) else f"{type(error).__name__}: {error}"
            )
        finally:
            try:
                self._clear()
            finally:  # its end is known whatever happens
                self._idle.set()
                self._session.wake()

    def _clear(self) -> None:
        if self._folder.exists():
            import shutil  # most devices get no request, and an idle one has to be small

            shutil.rmtree(self._folder, ignore_errors=True)

    def _profile(self, asked: _ActiveRequest, fetcher: Fetcher) -> BundleProfile:
        from edgefl.wire.bundle.archive import BundleArchive, write_bundle

        trusted = self._find_trusted(asked.request)
        check_manifest_ref(trusted, self._limits)
        manifest = decode_manifest(fetcher.get(trusted))
        self._check(manifest)
        if time.monotonic() > asked.until:
            raise RoundDeclined(
                messages.LATE, "the bundle did not arrive in time: ask with a longer `timeout`"
            )
        self._executor.store.make_room_beside(sum({ref.sha256: ref.size for ref in manifest.blobs}.values()))
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / "bundle.efl"
        write_bundle(BundleArchive(manifest, self._fetch_blobs(manifest, fetcher)), path)
        profile = self.profiler.measure(path, asked.request.repeat, asked.stop, asked.until)
        # Under the requested name: the file written here lacks fields of a later release.
        return msgspec.structs.replace(profile, bundle=trusted.sha256)

    def _fetch_blobs(self, manifest: Manifest, fetcher: Fetcher) -> dict[str, bytes]:
        """Download the graphs and their sources; return the bytes by digest, still compressed, as in a bundle file."""
        refs = {ref.sha256: ref for ref in manifest.blobs}
        for _ in fetcher.get_all(list(refs.values())):
            pass  # each is checked as it is read
        return {sha256: self._executor.store.blob(ref) for sha256, ref in refs.items()}

    def _find_trusted(self, request: messages.ProfileRequest) -> BlobRef:
        """Return the reference of the request's bundle in this engine's format. RoundDeclined if there is none or its
        signature is wrong.
        """
        kind = self._executor.engine.format
        if kind not in request.bundles:
            offered = ", ".join(sorted(request.bundles))[:100] or "none"
            text = (
                f"this device runs {kind}, offered are {offered}: `edgefl export --format {kind}` makes one"
            )
            raise RoundDeclined(messages.NO_BUNDLE, text)
        ref = request.bundles[kind]
        try:
            self._executor.trust.check_bundle(ref.sha256, request.signatures.get(kind, b""), kind)
        except BundleError as error:
            raise RoundDeclined(messages.SIGNATURE, error.message) from error
        return ref

    def _check(self, manifest: Manifest) -> None:
        """Raise RoundDeclined if the bundle is for another engine or a newer runtime, or needs more memory than offered."""
        wrong = {graph.format for graph in manifest.graphs} - {self._executor.engine.format}
        if wrong:
            text = f"the bundle holds {', '.join(sorted(wrong))} graphs, this device runs {self._executor.engine.format}"
            raise RoundDeclined(messages.NO_BUNDLE, text)
        check_runtime(manifest, self._executor.engine)
        self._executor.check_memory(manifest, manifest.graphs)

    def _settle(self, asked: _ActiveRequest, answer: messages.ProfileAnswer) -> None:
        self._forget(asked)
        self._answers[asked.nonce] = answer
        while len(self._answers) > _MOST_ANSWERS:
            del self._answers[next(iter(self._answers))]
        self._send(answer)
        message = f"{answer.state} ({answer.nonce}) {answer.reason} {asked.details}"
        self._log.event("profile", " ".join(message.split()))

    def _send(self, answer: messages.ProfileAnswer) -> None:
        with suppress(ValueError):  # paho's own limit on messages that wait while the broker is away
            self._session.publish(self._mine.profiles, answer)


def answer_with(nonce: str, profile: BundleProfile, limit: int) -> ProfileAnswer:
    """Return the answer with ``profile``, shortened until it fits.

    Args:
        nonce: Nonce of the request.
        profile: The measured profile.
        limit: Largest size of the message in bytes. If even the shortest profile exceeds it, the answer declines.
    """
    room = max(limit // 2, limit - ENVELOPE_BYTES)
    for shorter in _shorter(profile):
        data = profiles.encode(shorter)
        if len(data) <= room:
            return ProfileAnswer(nonce=nonce, state="done", profile=data)
    return decline_profile(nonce, TOO_LARGE)


def _shorter(profile: BundleProfile) -> Iterator[BundleProfile]:
    """Yield ``profile`` with less and less detail: fewer memory samples, then fewer ops, then no I/O of the forward
    pass.
    """
    yield profile
    for most in (100, 50, 20):
        timeline = msgspec.structs.replace(profile.timeline, moments=thinned(profile.timeline.moments, most))
        yield msgspec.structs.replace(profile, timeline=timeline)
    bare = msgspec.structs.replace(profile, timeline=MemoryTimeline(moments=(), spans=()))
    for most in (12, 6, 3, 0):
        graphs = tuple(msgspec.structs.replace(graph, ops=graph.ops[:most]) for graph in bare.graphs)
        yield msgspec.structs.replace(bare, graphs=graphs)
    yield msgspec.structs.replace(bare, graphs=graphs, io=())
