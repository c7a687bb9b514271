"""Steps of the cases: open a round, wait for the update, judge it, answer it."""

from __future__ import annotations

import hashlib
import re
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec

from edgefl.errors import ProtocolError
from edgefl.wire.blobs import BlobRef
from edgefl.wire.bundle.manifest import Manifest
from edgefl.wire.mqtt.messages import (
    FAILED,
    Ack,
    Decline,
    Offer,
    Progress,
    Round,
    Task,
    Update,
    UpdateChunk,
    decode,
)
from edgefl.wire.tensors import Arrays
from edgefl_conformance.material.bundles import Material, material, unit_bytes
from edgefl_conformance.material.compare import TOLERANCES, check_fields, check_update
from edgefl_conformance.material.reference import expected
from edgefl_conformance.play.said import Said
from edgefl_conformance.play.seat import Seat, Setup
from edgefl_conformance.play.server import CHUNK_BYTES
from edgefl_conformance.verdict import Failed, expect, expect_equal

FAR_S = 3600.0
"""Deadlines of rounds: this far ahead."""
_QUIET_S = 30.0
_CODE = re.compile(r"[a-z -]{1,32}")
"""Nothing that must not come is waited for longer than that."""
_TIMER_S = 17.0
"""Sooner than an agent sends an update again by itself (`ack_timeout_s`, 20 s): what comes within that was asked for."""


@dataclass(frozen=True)
class Play:
    """A task that was given: its round's announcement, and what the update has to be made of."""

    announced: Round
    task: Task
    material: Material
    mark: int
    hyper: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Received:
    """An update that came whole. ``chunks`` are its messages in the order in which they came."""

    update: Update
    encoded: bytes
    sha256: str
    chunks: tuple[Said, ...]
    round: int
    nonce: str


class Stage(Seat):
    """An agent at its seat, and the rounds that it is given. Each case may begin a run of its own (``run``); rounds are
    numbered on."""

    def __init__(self, setup: Setup, name: str) -> None:
        super().__init__(setup, name)
        self.run = f"run-{secrets.token_hex(4)}"
        self.number = 0
        self.usual_s = max(setup.paces, default=0.0)
        """From a task to its update, last time; first, the longest that another stage saw."""
        self.published: list[Manifest] = []
        """The manifests that were offered."""

    def ensure(self) -> None:
        """Have an agent run, and know how long its rounds take: what must not come is waited for by that."""
        fresh = self.agent is None
        super().ensure()
        if fresh and not self.usual_s:
            begun, play = time.monotonic(), self.open()
            received = self.update_or_none(play.task, 30.0, play.mark)
            self._took(time.monotonic() - begun if received else 1.0)
            if received:
                self.answer(received)

    def _took(self, seconds: float) -> None:
        self.usual_s = seconds
        self.setup.paces.append(seconds)

    # -- rounds ----------------------------------------------------------------------------------------------------

    def material(self, name: str = "plain") -> Material:
        """The kit's bundle of that name, in the format of the agent's engine."""
        return material(name, self.setup.engine)

    def offer(
        self, what: Material, *, chunk: int = CHUNK_BYTES, zstd: bool = False, but: str = ""
    ) -> tuple[Offer, dict[str, tuple[BlobRef, ...]]]:
        """Publish the blobs of a bundle and its weights, ``but`` those of one unit; gives what is said of it."""
        manifest = what.manifest
        graphs = tuple(
            msgspec.structs.replace(
                graph, blob=self.server.put(what.bundle.graph_bytes(graph.name), chunk, zstd=zstd)
            )
            for graph in manifest.graphs
        )
        published = msgspec.structs.replace(manifest, graphs=graphs)
        self.published.append(published)
        units: dict[str, tuple[BlobRef, ...]] = {
            name: (self.server.put(unit_bytes(part), chunk, zstd=zstd),)
            for name, part in what.units.items()
            if name != but
        }
        return self.offered(manifest.tier, published, chunk), units

    def offered(self, tier: str, manifest: object, chunk: int = CHUNK_BYTES) -> Offer:
        """Publish a manifest, of whatever form, and return the offer of it, signed."""
        ref = self.server.put(msgspec.msgpack.encode(manifest), chunk)
        return Offer(bundles={tier: ref}, signatures={tier: self.server.sign_bundle(ref)})

    def line(self, what: Material, unit: str) -> tuple[BlobRef, ...]:
        """Publish the weights of a unit; gives what an announcement says of them."""
        return (self.server.put(unit_bytes(what.units[unit])),)

    def announcement(
        self, offer: Offer, units: Mapping[str, tuple[BlobRef, ...]], hyper: Mapping[str, float] | None = None
    ) -> Round:
        """Return the announcement of the next round, open."""
        self.number += 1
        return Round(
            run=self.run,
            round=self.number,
            state="open",
            model_version=hashlib.sha256(f"{self.run}/{self.number}".encode()).hexdigest(),
            offers={self.setup.engine: offer},
            units=dict(units),
            hyper=dict(hyper or {}),
            base=self.number - 1,
            deadline=time.time() + FAR_S,
        )

    def prepare(self, hyper: Mapping[str, float] | None = None) -> tuple[Material, Round]:
        """Have an agent run and publish the plain bundle; return it with the announcement of the next round, unsent."""
        self.ensure()
        what = self.material()
        return what, self.announcement(*self.offer(what), hyper)

    def task(self, announced: Round, what: Material, *, seed: int = 7, samples: int = 0) -> Task:
        """One for the agent in this round, with a nonce of its own."""
        return Task(
            run=announced.run,
            round=announced.round,
            tier=what.manifest.tier,
            seed=seed,
            nonce=secrets.token_hex(8),
            samples=samples,
        )

    def open(
        self,
        what: Material | None = None,
        *,
        seed: int = 7,
        samples: int = 0,
        hyper: Mapping[str, float] | None = None,
        chunk: int = CHUNK_BYTES,
        zstd: bool = False,
        change: Callable[[Round], Round] = lambda announced: announced,
        change_task: Callable[[Task], Task] = lambda task: task,
    ) -> Play:
        """Publish, announce and give the task."""
        self.ensure()
        what = what or self.material()
        offer, units = self.offer(what, chunk=chunk, zstd=zstd)
        announced = change(self.announcement(offer, units, hyper))
        task = change_task(self.task(announced, what, seed=seed, samples=samples))
        return self.give(announced, task, what, hyper)

    def close(self, play: Play) -> None:
        """The round is over."""
        self.server.say(
            msgspec.structs.replace(play.announced, state="closed", offers={}, units={}, deadline=0.0)
        )

    # -- updates ---------------------------------------------------------------------------------------------------

    def update(self, play: Play, within_s: float = 30.0, *, since: int | None = None) -> Received:
        """The whole update for a task, of what came after ``since``; Failed if it does not come."""
        received = self.update_or_none(play.task, within_s, play.mark if since is None else since)
        if received is None:
            raise Failed(f"an update for round {play.task.round}", self.instead(play.mark))
        return received

    def update_or_none(self, task: Task, within_s: float, since: int) -> Received | None:
        """The same; None if it does not come, or the agent ends."""
        parts: dict[str, dict[int, Said]] = {}
        until, mark = time.monotonic() + self.patient(within_s), since
        leaf = "updates" if isinstance(task.shard, msgspec.UnsetType) else "shards"
        while True:
            left = (until - time.monotonic()) / self.setup.patience
            said = self.heard(mark, leaf, left, lambda each: chunk_of(each, task) is not None)
            if said is None:
                return None
            mark = said.place + 1
            chunk = chunk_of(said, task)
            assert chunk is not None
            have = parts.setdefault(chunk.sha256, {})
            have[chunk.index] = said
            if len(have) == chunk.count and (chunk.data or not chunk.size):
                return self._joined(task, chunk, have)

    def _joined(self, task: Task, last: UpdateChunk, parts: dict[int, Said]) -> Received:
        pieces = [parts[index].message for index in sorted(parts)]
        encoded = b"".join(piece.data for piece in pieces if isinstance(piece, UpdateChunk))
        expect_equal("bytes of the joined update", last.size, len(encoded))
        expect_equal("SHA-256 of the joined update", last.sha256, hashlib.sha256(encoded).hexdigest())
        try:
            update = decode(Update, encoded)
        except ProtocolError as error:
            raise Failed("an encoded Update in the chunks", error.message) from error
        ordered = tuple(sorted(parts.values(), key=lambda said: said.place))
        return Received(update, encoded, last.sha256, ordered, task.round, task.nonce)

    def judge(self, received: Received, play: Play, carry: Arrays | None = None) -> Arrays:
        """Failed unless the update is that of its task, with the expected bytes; gives the carry that it leaves."""
        update, task = received.update, play.task
        check_fields(received.encoded)
        for name, value in (
            ("run", task.run),
            ("round", task.round),
            ("nonce", task.nonce),
            ("tier", task.tier),
            ("device", self.device),
            ("model_version", play.announced.model_version),
            ("codec", play.material.manifest.codec),
            ("codec_version", play.material.manifest.codec_version),
        ):
            expect_equal(f"update.{name}", value, getattr(update, name))
        wanted = expected(
            play.material,
            self.data,
            self.setup.engine,
            seed=task.seed,
            samples=task.samples,
            hyper=play.hyper,
            carry=carry,
        )
        check_update(update, wanted, TOLERANCES[self.setup.engine])
        return wanted.carry

    def answer(self, received: Received, status: str = "accepted", **fields: object) -> None:
        """Acknowledge an update, signed."""
        ack = Ack(round=received.round, nonce=received.nonce, status="accepted", sha256=received.sha256)
        self.server.say(msgspec.structs.replace(ack, status=status, **fields))

    def judged(
        self, play: Play, carry: Arrays | None = None, within_s: float = 30.0, *, since: int | None = None
    ) -> Received:
        """Wait for the update of a task as :meth:`update` does, and judge it."""
        received = self.update(play, within_s, since=since)
        self.judge(received, play, carry)
        return received

    def settle(self, play: Play, carry: Arrays | None = None, within_s: float = 30.0) -> Received:
        """Wait for the update of a task, judge it, and accept it."""
        received = self.judged(play, carry, within_s)
        self.answer(received)
        return received

    def give(
        self, announced: Round, task: Task, what: Material, hyper: Mapping[str, float] | None = None
    ) -> Play:
        """Publish both."""
        mark = self.server.log.mark()
        self.server.say(announced)
        self.server.say(task)
        return Play(announced, task, what, mark, dict(hyper or {}))

    def good_round(self, what: Material | None = None, **options: object) -> Received:
        """A whole round, from the announcement to the acknowledgement; Failed unless its update is right."""
        self.ensure()
        play = self.open(what, **options)  # type: ignore[arg-type]
        begun = time.monotonic()
        received = self.update(play)
        self._took(time.monotonic() - begun)
        self.judge(received, play)
        self.answer(received)
        return received

    def chunks(self, play: Play, mark: int, wanted: set[int], within_s: float = 10.0) -> None:
        """Wait for these chunks of a task's update after ``mark``; Failed if they do not come."""
        for index in sorted(wanted):

            def its(said: Said, index: int = index) -> bool:
                chunk = chunk_of(said, play.task)
                return chunk is not None and chunk.index == index and bool(chunk.data)

            if self.server.log.wait(mark, "updates", self.patient(within_s), its) is None:
                raise Failed(f"chunk {index} of the update, once more", self.instead(mark))

    def sent_again(self, play: Play, before: Received) -> Received:
        """Give the task once more; Failed unless the same update comes, whole."""
        mark = self.server.log.mark()
        self.server.say(play.task)
        again = self.update_or_none(play.task, min(10.0, _TIMER_S / self.setup.patience), mark)
        if again is None:
            raise Failed("the update, once more", self.instead(mark))
        expect_equal("SHA-256 of the update", before.sha256, again.sha256)
        return again

    def under_way(self, play: Play, seconds: float) -> None:
        """Wait until the agent has trained a third, by what it says of its progress, or is done; so many seconds where it
        never said anything."""
        if not self.server.log.since(0, "progress"):
            time.sleep(seconds)
            return

        def trains(said: Said) -> bool:
            message = said.message
            return (
                isinstance(message, Progress)
                and message.stage == "train"
                and message.step >= message.steps / 3
            )

        until = time.monotonic() + self.patient(10.0)
        while time.monotonic() < until:
            done = any(chunk_of(said, play.task) for said in self.server.log.since(play.mark, "updates"))
            if done or self.server.log.wait(play.mark, "progress", 0.1, trains):
                return

    # -- what does not come ----------------------------------------------------------------------------------------

    def quiet(self, mark: int, what: str, task: Task | None = None, seconds: float = 0.0) -> None:
        """Raise Failed if an update comes (of ``task``, or any) within three times the usual time of a round.

        Raise Failed also if the agent ends, or if its progress gives more than a code for a failure.
        """
        wait = self.patient(seconds or min(_QUIET_S, 0.5 + 3 * (self.usual_s or 1.0)))
        said = self.server.log.wait(
            mark, "updates", wait, lambda each: task is None or chunk_of(each, task) is not None
        )
        expect(said is None, what, f"an update on {said.topic}" if said else "")
        for each in self.server.log.since(mark, "progress"):
            stage = each.message.stage if isinstance(each.message, Progress) else ""
            code = stage.removeprefix(FAILED)
            expect(
                stage == code or _CODE.fullmatch(code) is not None, "a code behind 'failed: '", repr(stage)
            )
        self.ensure()

    def decline(self, play: Play, within_s: float = 15.0, since: int | None = None) -> Decline:
        """The decline of a task."""
        mark = play.mark if since is None else since

        def its(said: Said) -> bool:
            return isinstance(said.message, Decline) and said.message.nonce == play.task.nonce

        said = self.heard(mark, "declines", within_s, its)
        if said is None:
            raise Failed(f"a Decline of round {play.task.round}", self.instead(mark))
        assert isinstance(said.message, Decline)
        expect_equal("decline.round", play.task.round, said.message.round)
        expect_equal("decline.text", "", said.message.text)
        return said.message


def chunk_of(said: Said, task: Task) -> UpdateChunk | None:
    """Return the message if it is a chunk of the task's update, else None."""
    chunk = said.message
    return chunk if isinstance(chunk, UpdateChunk) and chunk.nonce == task.nonce else None
