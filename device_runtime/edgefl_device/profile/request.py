"""Requests for profiles: one at a time, only while no round is worked on, each answered by its nonce.

A request lasts as long as its offer lies at the broker. One that arrives when nobody waits any more, as after days without
a connection, is dropped without a word, and a measurement whose asker leaves is stopped.

::

    desk = ProfileDesk(work, session, topics, Child(engine="onnx", threads=4).measure, say)
    desk.take(payload)       # a request came
    desk.step(busy=False)    # at each turn of the agent's loop: begins, stops and ends measurements
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import msgspec

from edgefl.errors import BundleError, EdgeflError, IdentityError, RoundAborted, RoundDeclined
from edgefl.wire.blobs import BlobRef
from edgefl.wire.bundle.manifest import Manifest, decode_manifest
from edgefl.wire.bundle.profiles import BundleProfile
from edgefl.wire.mqtt import messages
from edgefl.wire.mqtt.envelope import Seal, peek
from edgefl.wire.mqtt.session import Session
from edgefl.wire.mqtt.topics import Topics
from edgefl_device.link.fetch import Fetcher
from edgefl_device.link.identity import Repeated
from edgefl_device.link.notices import Notices
from edgefl_device.round import bounds
from edgefl_device.round.work import Work

_MOST_WAITING = 4
"""Requests with an offer, and as many without one."""
_MOST_ANSWERS = 4
"""Answers kept for requests that come again; with a profile each takes up to one message."""
_HOUR_S = 3600.0
_SETTLED_S = 1.0
"""How long after a round a measurement begins: rounds that follow at once leave no time for one."""


class Measure(Protocol):
    """Profiles the bundle in a file; stops with RoundAborted when told so."""

    def __call__(
        self, bundle: Path, repeat: int, aborted: Callable[[], bool], until: float
    ) -> BundleProfile: ...


@dataclass
class _Asked:
    """``offered``: somebody waits for the answer, as the broker's retained offer says; ``gone``: nobody does.

    ``why``: details of a decline for the device's own log.
    """

    request: messages.ProfileRequest
    came: float
    most_s: float
    offered: bool = False
    gone: bool = False
    stop: threading.Event = field(default_factory=threading.Event)
    answer: messages.ProfileAnswer | None = None
    why: str = ""

    @property
    def nonce(self) -> str:
        return self.request.nonce

    @property
    def until(self) -> float:
        return self.came + min(self.request.within_s, self.most_s)


@dataclass(eq=False)
class ProfileDesk:
    """``take``, ``deliver``, ``step`` and ``stop`` are called by one thread; a measurement has another."""

    work: Work
    session: Session
    topics: Topics
    measure: Measure
    say: Callable[[str, str], None]
    seal: Seal

    def __post_init__(self) -> None:
        self._mine = self.topics.device(self.work.device)
        self._folder = self.work.folder / "profile"
        self._waiting: list[_Asked] = []
        self._answers: dict[str, messages.ProfileAnswer] = {}
        self._worker: threading.Thread | None = None
        self._idle = threading.Event()
        self._fetcher: Fetcher | None = None
        self._busy_until = -math.inf
        self._taken: deque[float] = deque()
        self._strangers = Notices(self.work.limits.notice_s)
        self._clear()  # of a process that was killed

    @property
    def topic(self) -> str:
        """Where requests come in."""
        return self._mine.profile_requests

    def owns(self, topic: str) -> bool:
        """Whether a message on ``topic`` is for :meth:`deliver`."""
        return topic.startswith(f"{self.topics.root}/profiles/")

    def deliver(self, topic: str, payload: bytes) -> None:
        """A chunk of a bundle arrived, or an offer, which is empty once its asker left."""
        for entry in self._waiting:
            if topic == self._offer(entry.nonce):
                self._offered(entry, there=bool(payload))
                return
        if self._fetcher is not None:
            self._fetcher.deliver(topic, payload)

    def poke(self) -> None:
        """The connection came back."""
        if self._fetcher is not None:
            self._fetcher.poke()

    def take(self, payload: bytes) -> None:
        """A request came, maybe not for the first time. ProtocolError if it is malformed, not the server's, or a copy."""
        try:
            request = self.work.trust.open(messages.ProfileRequest, self.topic, payload)
        except Repeated:
            raise
        except IdentityError:  # whoever asks is told why nothing follows, and a flood is not
            if self._strangers.due(messages.SIGNATURE):
                self._send(
                    messages.declined(peek(messages.ProfileRequest, payload).nonce, messages.SIGNATURE)
                )
            raise
        known = self._answers.get(request.nonce)
        if known is not None:
            self._send(known)
        elif twin := next((entry for entry in self._waiting if entry.nonce == request.nonce), None):
            if twin.offered:
                self._send(messages.ProfileAnswer(nonce=request.nonce, state="taken"))
            else:  # somebody waits, and a slow link takes long to bring the offer
                twin.request, twin.came = request, time.monotonic()
        elif (why := self._refusal(request)) is not None:
            self._send(why)
        elif sum(entry.offered for entry in self._waiting) >= _MOST_WAITING:
            text = f"{_MOST_WAITING} other requests are waiting"
            self._send(self._declined(request.nonce, messages.BUSY, text))
        else:
            self._make_room()
            self._waiting.append(_Asked(request, time.monotonic(), self.work.limits.profile_s))
            self.session.subscribe([self._offer(request.nonce)])

    def _refusal(self, request: messages.ProfileRequest) -> messages.ProfileAnswer | None:
        """Why a request is not taken: more than the device gives, or the owner's rules. These may run a command, so requests
        are counted before they are asked."""
        limits, now = self.work.limits, time.monotonic()
        while self._taken and now - self._taken[0] > _HOUR_S:
            self._taken.popleft()
        if len(self._taken) >= limits.profiles_an_hour:
            text = f"it was asked {limits.profiles_an_hour} times within an hour (limits.profiles_an_hour)"
            return self._declined(request.nonce, messages.BUSY, text)
        self._taken.append(now)
        if request.repeat > limits.profile_repeat:
            text = f"{request.repeat} repetitions, and limits.profile_repeat is {limits.profile_repeat} here"
            return self._declined(request.nonce, messages.TOO_LARGE, text)
        try:
            self.work.rules.check("profile")
        except RoundDeclined as error:
            return self._declined(request.nonce, error.reason, error.message)
        return None

    def _declined(self, nonce: str, reason: str, text: str) -> messages.ProfileAnswer:
        """Return the answer that declines a request. Its details go to the device's own log."""
        self.say("profile", f"declined ({nonce}) {reason}: {text}")
        return messages.declined(nonce, reason)

    def step(self, *, busy: bool) -> None:
        """Go on with what is asked; ``busy``: a round is worked on, or begins now."""
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
        """The agent ends: so does the measurement."""
        if self._worker is not None:
            self._waiting[0].stop.set()
            if self._fetcher is not None:
                self._fetcher.poke()
            self._worker.join(timeout=10.0)

    # -- one request -----------------------------------------------------------------------------------------

    def _offer(self, nonce: str) -> str:
        return self.topics.profile(nonce).offer

    def _offered(self, asked: _Asked, *, there: bool) -> None:
        """The broker has the offer of a request, or has it no more."""
        if not there:
            asked.gone = True
            asked.stop.set()
        elif not asked.offered:
            asked.offered = True
            self._send(messages.ProfileAnswer(nonce=asked.nonce, state="taken"))
            self.say("profile", f"asked for a profile ({asked.nonce})")

    def _drop(self, now: float) -> None:
        """Leave what nobody waits for, and decline what there was no time for."""
        patience = self.work.limits.fetch_timeout_s
        for entry in list(self._waiting):
            if entry.gone or (not entry.offered and now > min(entry.until, entry.came + patience)):
                self._leave(entry)
            elif now > entry.until:
                self._settle(entry, messages.declined(entry.nonce, messages.BUSY))

    def _make_room(self) -> None:
        """A request without an offer, as of an asker that left, keeps no other from being heard: the oldest leaves."""
        stale = [entry for entry in self._waiting if not entry.offered]
        if len(stale) >= _MOST_WAITING:
            self._leave(min(stale, key=lambda entry: entry.came))

    def _leave(self, asked: _Asked) -> None:
        self._forget(asked)
        self.say("profile", f"nobody waits for it any more ({asked.nonce})")

    def _forget(self, asked: _Asked) -> None:
        self._waiting.remove(asked)
        self.session.unsubscribe([self._offer(asked.nonce)])

    def _begin(self, asked: _Asked) -> None:
        asked.stop.clear()
        self._idle.clear()
        topics, work = self.topics.profile(asked.nonce), self.work
        self._fetcher = Fetcher(self.session, topics, work.store, work.limits, asked.stop.is_set)
        self._worker = threading.Thread(
            target=self._measured, args=(asked, self._fetcher), name="profile", daemon=True
        )
        self._worker.start()

    def _attempt(self, asked: _Asked, fetcher: Fetcher) -> None:
        """One measurement. Without an answer at its end the request stays, for when the round is over."""
        nonce = asked.nonce
        try:
            from edgefl_device.profile.answer import answer_with

            profile = self._profile(asked, fetcher)
            asked.answer = answer_with(nonce, profile, self.work.limits.chunk_bytes)
        except RoundAborted:
            self.say("profile", f"stopped ({nonce})" if asked.gone else f"put off ({nonce}): a round begins")
        except RoundDeclined as error:
            asked.answer, asked.why = messages.declined(nonce, error.reason), error.message
        except Exception as error:  # whatever an engine or the system raises must not end the agent
            asked.answer = messages.declined(nonce, messages.PROFILE_FAILED)
            asked.why = (
                error.message if isinstance(error, EdgeflError) else f"{type(error).__name__}: {error}"
            )
        finally:
            self._clear()

    def _measured(self, asked: _Asked, fetcher: Fetcher) -> None:
        """The measuring thread, whose end is known whatever happens in it."""
        try:
            self._attempt(asked, fetcher)
        finally:
            self._idle.set()
            self.session.wake()

    def _clear(self) -> None:
        if self._folder.exists():
            import shutil  # most devices are never asked, and idle ones are to be small

            shutil.rmtree(self._folder, ignore_errors=True)

    def _profile(self, asked: _Asked, fetcher: Fetcher) -> BundleProfile:
        from edgefl.wire.bundle.archive import Bundle, write_bundle

        trusted = self._trusted(asked.request)
        bounds.check_manifest_ref(trusted, self.work.limits)
        manifest = decode_manifest(fetcher.get(trusted))
        self._check(manifest)
        if time.monotonic() > asked.until:
            raise RoundDeclined(
                messages.LATE, "the bundle did not arrive in time: ask with a longer `timeout`"
            )
        self.work.store.make_room_beside(sum({ref.sha256: ref.size for ref in manifest.blobs}.values()))
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / "bundle.efl"
        write_bundle(Bundle(manifest, self._fetched(manifest, fetcher)), path)
        profile = self.measure(path, asked.request.repeat, asked.stop.is_set, asked.until)
        # By the name it was asked for: what is written here leaves out fields of a later release.
        return msgspec.structs.replace(profile, bundle=trusted.sha256)

    def _fetched(self, manifest: Manifest, fetcher: Fetcher) -> dict[str, bytes]:
        """The graphs, and where their nodes come from, as they travel: compressed or not, a bundle's file has them so."""
        refs = {ref.sha256: ref for ref in manifest.blobs}
        for _ in fetcher.get_all(list(refs.values())):
            pass  # each is checked as it is read
        return {sha256: self.work.store.blob(ref) for sha256, ref in refs.items()}

    def _trusted(self, request: messages.ProfileRequest) -> BlobRef:
        """The bundle for this device's engine; RoundDeclined if there is none, or it is not signed as it has to be."""
        kind = self.work.engine.format
        if kind not in request.bundles:
            offered = ", ".join(sorted(request.bundles))[:100] or "none"
            text = (
                f"this device runs {kind}, offered are {offered}: `edgefl export --format {kind}` makes one"
            )
            raise RoundDeclined(messages.NO_BUNDLE, text)
        ref = request.bundles[kind]
        try:
            self.work.trust.check_bundle(ref.sha256, request.signatures.get(kind, b""), kind)
        except BundleError as error:
            raise RoundDeclined(messages.SIGNATURE, error.message) from error
        return ref

    def _check(self, manifest: Manifest) -> None:
        """Raise RoundDeclined if the bundle is for another engine or a newer runtime, or needs more memory than offered."""
        wrong = {graph.format for graph in manifest.graphs} - {self.work.engine.format}
        if wrong:
            text = f"the bundle holds {', '.join(sorted(wrong))} graphs, this device runs {self.work.engine.format}"
            raise RoundDeclined(messages.NO_BUNDLE, text)
        bounds.check_runtime(manifest, self.work.engine)
        self.work.check_memory(manifest, manifest.graphs)

    def _settle(self, asked: _Asked, answer: messages.ProfileAnswer) -> None:
        self._forget(asked)
        self._answers[asked.nonce] = answer
        while len(self._answers) > _MOST_ANSWERS:
            del self._answers[next(iter(self._answers))]
        self._send(answer)
        message = f"{answer.state} ({answer.nonce}) {answer.reason} {asked.why}"
        self.say("profile", " ".join(message.split()))

    def _send(self, answer: messages.ProfileAnswer) -> None:
        with suppress(ValueError):  # paho's own limit on what waits while the broker is away
            self.session.publish(self._mine.profiles, self.seal(self._mine.profiles, answer))
