"""Test harness of one agent: its process, its connection to the broker, a scripted server, and the rounds that it gets."""

from __future__ import annotations

import hashlib
import re
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from edgefl.errors import ProtocolError
from edgefl.lab.processes import AgentProcess
from edgefl.wire.blobs import BlobRef
from edgefl.wire.bundle.manifest import Manifest
from edgefl.wire.mqtt.messages import (
    FAILED,
    Ack,
    Decline,
    Hello,
    Offer,
    Progress,
    Round,
    Status,
    Task,
    Update,
    UpdateChunk,
    decode,
)
from edgefl.wire.tensors import Array, Arrays
from edgefl.wire.text import printable
from edgefl_conformance.material.bundles import Material, material, samples, unit_bytes
from edgefl_conformance.material.compare import TOLERANCES, check_fields, check_update, expected
from edgefl_conformance.play.broker import Broker
from edgefl_conformance.play.messages import AgentMessage
from edgefl_conformance.play.relay import PacketRelay
from edgefl_conformance.play.server import CHUNK_BYTES, ScriptedServer
from edgefl_conformance.results import CaseFailed, expect, expect_equal

_MOST_PRINTED = 300
HEARD_S = 0.3
"""Time in which an idle agent receives and stores a message."""
_LOOK_S = 0.5
"""Interval of checks whether the agent still runs."""
_LAST_S = 1.0
"""Time in which the last messages of an ended agent arrive."""
_MUTE = 2
"""Number of agents without Hello after which the campaign gives up."""


_FEW, _MANY = 300, 200_000
_TELLING_S = 0.5
"""Seconds of a round beyond a usual one, so that steps are most of it."""


@dataclass(frozen=True)
class CampaignState:
    """Settings and shared state of a campaign.

    Attributes:
        command: starts the agent.
        engine: bundle format that the agent runs.
        patience: factor of every wait (1: for a fast machine).
        websocket: give the agent a URL of MQTT through WebSocket.
        stopping: set when no case begins any more and all waits end.
        greeted: set when an agent has sent Hello.
        mute: messages of agents with usual options that sent no Hello.
        paces: seconds from a task to its update.
    """

    command: Sequence[str]
    engine: str
    broker: Broker
    folder: Path
    patience: float = 1.0
    websocket: bool = False
    stopping: threading.Event = field(default_factory=threading.Event)
    greeted: threading.Event = field(default_factory=threading.Event)
    mute: list[str] = field(default_factory=list)
    paces: list[float] = field(default_factory=list)

    @property
    def gave_up(self) -> bool:
        """True if it is of no use to start the agent again."""
        return len(self.mute) >= _MUTE and not self.greeted.is_set()


class AgentHarness:
    """One agent in a federation of its own, with its store in ``folder``, a relay and a scripted server."""

    def __init__(self, setup: CampaignState, name: str) -> None:
        self.setup = setup
        self.federation = f"kit-{name}-{secrets.token_hex(3)}"
        self.device = "agent-1"
        self.folder = setup.folder / self.federation
        self.folder.mkdir(parents=True)
        self.data = samples()
        self.server = ScriptedServer(setup.broker.address, self.federation, self.device, self.folder)
        port = setup.broker.websocket_port if setup.websocket else setup.broker.port
        self.relay = PacketRelay(port, reads=not setup.websocket)
        self.agent: AgentProcess | None = None
        self._options: list[str] = []
        self._usual = True

    def patient(self, seconds: float) -> float:
        """Return the seconds times the campaign's patience."""
        return seconds * self.setup.patience

    def write_data(self, x: Array, y: Array) -> None:
        """Write the data that the agent trains on from its next start."""
        self.data = (x, y)
        np.savez(self.folder / "data.npz", x=x, y=y)

    def start(self, *options: str, known: bool = True, ready: bool = True) -> AgentProcess:
        """Start the agent and wait for its hello.

        Args:
            options: options beside the usual ones.
            known: pass the server's key.
            ready: wait for the hello.
        """
        if not (self.folder / "data.npz").exists():
            self.write_data(*self.data)
        place = f"{'ws://' if self.setup.websocket else ''}127.0.0.1:{self.relay.port}"
        given = ["--id", self.device, "--broker", place, "--federation", self.federation]
        given += ["--data", str(self.folder / "data.npz"), "--store", str(self.folder / "store")]
        given += ["--engine", self.setup.engine, *options]
        given += ["--server-key", self.server.key] if known else []
        self._options, self._usual = given, not options
        return self.start_again(ready=ready)

    def restart(self) -> AgentProcess:
        """Kill the agent after it has received all messages, and start it again with its options."""
        if self.agent is not None:
            time.sleep(self.patient(HEARD_S))
            self.agent.kill()
        return self.start_again()

    def kill(self) -> None:
        """Kill the agent, now."""
        if self.agent is not None:
            self.agent.kill()

    def restart_before(self, announcement: bytes) -> None:
        """Kill the agent, and start it again with this announcement on the broker."""
        time.sleep(self.patient(HEARD_S))
        self.kill()
        self.server.publish(self.server.topics.current_round, announcement, retain=True)
        self.start_again()

    def start_again(self, *, ready: bool = True) -> AgentProcess:
        """Start the killed agent again with its options."""
        mark = self.server.log.mark()
        self.agent = AgentProcess([*self.setup.command, *self._options], self.folder / "agent.log")
        if ready:
            self.hello(mark)
        return self.agent

    def ensure(self) -> None:
        """Start an agent with the usual options if none runs. Raises CaseFailed if it has ended by itself."""
        if self.agent is None:
            self.start()
        code = self.agent.exit_code if self.agent is not None else None
        if code is not None:
            raise CaseFailed(
                "an agent that still runs", f"one that ended with exit code {code}; {self.last_words()}"
            )

    def hello(self, mark: int, within_s: float = 30.0) -> Hello:
        """Return the Hello of the agent after ``mark``."""
        said = self.heard(mark, "hello", within_s, lambda each: each.message is not None)
        if said is None:
            instead = self.instead(mark)
            if self._usual:
                self.setup.mute.append(instead)
            raise CaseFailed(f"a Hello on devices/{self.device}/hello", instead)
        self.setup.greeted.set()
        assert isinstance(said.message, Hello)
        return said.message

    def heard(
        self, mark: int, leaf: str, within_s: float, test: Callable[[AgentMessage], bool]
    ) -> AgentMessage | None:
        """Wait for the first message of a kind after ``mark`` that passes ``test``; None on timeout or the agent's end."""
        until = time.monotonic() + self.patient(within_s)
        while True:
            ended = self.agent is None or self.agent.exit_code is not None
            left = self.patient(_LAST_S) if ended else min(_LOOK_S, until - time.monotonic())
            said = self.server.log.wait(mark, leaf, max(0.0, left), test)
            if said is not None or ended or left <= 0 or self.setup.stopping.is_set():
                return said

    def instead(self, mark: int) -> str:
        """Describe the messages after ``mark``, for an error about one that did not arrive."""
        counts: dict[str, int] = {}
        for said in self.server.log.since(mark):
            word = said.leaf + (f" that cannot be taken ({said.problem})" if said.problem else "")
            counts[word] = counts.get(word, 0) + 1
        came = ", ".join(f"{count} {word}" for word, count in counts.items()) or "nothing"
        code = self.agent.exit_code if self.agent is not None else None
        ended = "" if code is None else f"; the agent ended with exit code {code}"
        return f"{came}{ended}; {self.last_words()}"

    def last_words(self) -> str:
        """Quote the last line that the agent printed."""
        log = self.folder / "agent.log"
        lines = log.read_text(errors="replace").split("\n") if log.exists() else []
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f"the last that it printed: {printable(last, _MOST_PRINTED)}" if last else "it printed nothing"

    def status(self, mark: int, online: bool, within_s: float = 15.0) -> AgentMessage:
        """Wait for the next status with this value. Raises CaseFailed on timeout."""

        def such(said: AgentMessage) -> bool:
            return isinstance(said.message, Status) and said.message.online == online

        said = self.server.log.wait(mark, "status", self.patient(within_s), such)
        if said is None:
            raise CaseFailed(f"Status{{online: {str(online).lower()}}}", self.instead(mark))
        return said

    def end(self) -> None:
        """Stop agent, relay and server."""
        if self.agent is not None:
            self.agent.kill()
        self.relay.close()
        self.server.stop()


FAR_S = 3600.0
"""Seconds until the deadlines of rounds."""
_QUIET_S = 30.0
"""Longest wait for messages that must not arrive."""
_CODE = re.compile(r"[a-z -]{1,32}")
_TIMER_S = 17.0
"""Time before an agent sends an update again by itself (`ack_timeout_s`, 20 s)."""


@dataclass(frozen=True)
class Play:
    """A published task, its round's announcement, and the inputs of the update."""

    announced: Round
    task: Task
    material: Material
    mark: int
    hyper: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Received:
    """A complete update. ``chunks`` are its messages in the order of their arrival."""

    update: Update
    encoded: bytes
    sha256: str
    chunks: tuple[AgentMessage, ...]
    round: int
    nonce: str


class RoundHarness(AgentHarness):
    """Harness of one agent with rounds. A case may begin a run of its own (``run``); round numbers continue."""

    def __init__(self, setup: CampaignState, name: str) -> None:
        super().__init__(setup, name)
        self.run = f"run-{secrets.token_hex(4)}"
        self.number = 0
        self.usual_s = max(setup.paces, default=0.0)
        """Seconds from a task to its update in the last round; at first the longest of another harness."""
        self.published: list[Manifest] = []
        """Manifests that were offered."""

    def ensure(self) -> None:
        """Start an agent if none runs, and measure how long its rounds take, for waits in which nothing must arrive."""
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

    def material(self, name: str = "plain") -> Material:
        """Return the kit's bundle of that name, in the format of the agent's engine."""
        return material(name, self.setup.engine)

    def offer(
        self, what: Material, *, chunk: int = CHUNK_BYTES, zstd: bool = False, but: str = ""
    ) -> tuple[Offer, dict[str, tuple[BlobRef, ...]]]:
        """Publish the blobs of a bundle and its weights, except those of the unit ``but``; return offer and references."""
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
        """Publish the weights of a unit; return their references."""
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
        """Start an agent, publish the plain bundle, and return it with the unsent announcement of the next round."""
        self.ensure()
        what = self.material()
        return what, self.announcement(*self.offer(what), hyper)

    def task(self, announced: Round, what: Material, *, seed: int = 7, samples: int = 0) -> Task:
        """Return a task for the agent in this round, with a new nonce."""
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
        """Publish a bundle, announce the next round, and publish the task."""
        self.ensure()
        what = what or self.material()
        offer, units = self.offer(what, chunk=chunk, zstd=zstd)
        announced = change(self.announcement(offer, units, hyper))
        task = change_task(self.task(announced, what, seed=seed, samples=samples))
        return self.give(announced, task, what, hyper)

    def close(self, play: Play) -> None:
        """Announce the end of the round."""
        self.server.say(
            msgspec.structs.replace(play.announced, state="closed", offers={}, units={}, deadline=0.0)
        )

    def update(self, play: Play, within_s: float = 30.0, *, since: int | None = None) -> Received:
        """Wait for the whole update of a task after ``since``. Raises CaseFailed on timeout."""
        received = self.update_or_none(play.task, within_s, play.mark if since is None else since)
        if received is None:
            raise CaseFailed(f"an update for round {play.task.round}", self.instead(play.mark))
        return received

    def update_or_none(self, task: Task, within_s: float, since: int) -> Received | None:
        """Wait for the whole update of a task; None on timeout or the agent's end."""
        parts: dict[str, dict[int, AgentMessage]] = {}
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

    def _joined(self, task: Task, last: UpdateChunk, parts: dict[int, AgentMessage]) -> Received:
        pieces = [parts[index].message for index in sorted(parts)]
        encoded = b"".join(piece.data for piece in pieces if isinstance(piece, UpdateChunk))
        expect_equal("bytes of the joined update", last.size, len(encoded))
        expect_equal("SHA-256 of the joined update", last.sha256, hashlib.sha256(encoded).hexdigest())
        try:
            update = decode(Update, encoded)
        except ProtocolError as error:
            raise CaseFailed("an encoded Update in the chunks", error.message) from error
        ordered = tuple(sorted(parts.values(), key=lambda said: said.place))
        return Received(update, encoded, last.sha256, ordered, task.round, task.nonce)

    def judge(self, received: Received, play: Play, carry: Arrays | None = None) -> Arrays:
        """Raise CaseFailed unless the update has its task's fields and the expected values; return the new carry."""
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
        """Publish announcement and task."""
        mark = self.server.log.mark()
        self.server.say(announced)
        self.server.say(task)
        return Play(announced, task, what, mark, dict(hyper or {}))

    def good_round(self, what: Material | None = None, **options: object) -> Received:
        """Play a whole round to the acknowledgement. Raises CaseFailed unless its update is correct."""
        self.ensure()
        play = self.open(what, **options)  # type: ignore[arg-type]
        begun = time.monotonic()
        received = self.update(play)
        self._took(time.monotonic() - begun)
        self.judge(received, play)
        self.answer(received)
        return received

    def steps_that_take(self, what: Material, seconds: float) -> int:
        """Return how many steps of ``what`` take the agent about so long, by timed rounds."""
        self.good_round(what)  # what is fetched and loaded once takes its time, too
        steps, took = _FEW, 0.0
        while took < _TELLING_S:
            # A busy machine slows a round's messages as much as its steps: the difference of two rounds are the steps.
            took = max(1e-6, self._timed_round(what.with_steps(steps)) - self._timed_round(what))
            if took < _TELLING_S:
                if steps >= _MANY:
                    break
                steps = min(_MANY, 8 * steps)
        return max(_FEW, min(_MANY, int(seconds * steps / took)))

    def _timed_round(self, what: Material) -> float:
        """Return the seconds of a whole round. Its values are not judged, because engines differ more with each step."""
        begun = time.monotonic()
        self.ensure()
        self.answer(self.update(self.open(what)))
        return time.monotonic() - begun

    def chunks(self, play: Play, mark: int, wanted: set[int], within_s: float = 10.0) -> None:
        """Wait for these chunks of a task's update after ``mark``. Raises CaseFailed on timeout."""
        for index in sorted(wanted):

            def its(said: AgentMessage, index: int = index) -> bool:
                chunk = chunk_of(said, play.task)
                return chunk is not None and chunk.index == index and bool(chunk.data)

            if self.server.log.wait(mark, "updates", self.patient(within_s), its) is None:
                raise CaseFailed(f"chunk {index} of the update, once more", self.instead(mark))

    def sent_again(self, play: Play, before: Received) -> Received:
        """Publish the task again. Raises CaseFailed unless the same update arrives, whole."""
        mark = self.server.log.mark()
        self.server.say(play.task)
        again = self.update_or_none(play.task, min(10.0, _TIMER_S / self.setup.patience), mark)
        if again is None:
            raise CaseFailed("the update, once more", self.instead(mark))
        expect_equal("SHA-256 of the update", before.sha256, again.sha256)
        return again

    def under_way(self, play: Play, seconds: float) -> None:
        """Wait until the agent has reported a third of its steps, or is done; ``seconds`` if it reports no progress."""
        if not self.server.log.since(0, "progress"):
            time.sleep(seconds)
            return

        def trains(said: AgentMessage) -> bool:
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

    def quiet(self, mark: int, what: str, task: Task | None = None, seconds: float = 0.0) -> None:
        """Raise CaseFailed if an update comes (of ``task``, or any) within three times the usual time of a round.

        Raise CaseFailed also if the agent ends, or if its progress gives more than a code for a failure.
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
                stage == code or _CODE.fullmatch(code) is not None,
                "a code behind 'failed: '",
                repr(stage),
            )
        self.ensure()

    def decline(self, play: Play, within_s: float = 15.0, since: int | None = None) -> Decline:
        """Wait for the decline of a task. Raises CaseFailed on timeout."""
        mark = play.mark if since is None else since

        def its(said: AgentMessage) -> bool:
            return isinstance(said.message, Decline) and said.message.nonce == play.task.nonce

        said = self.heard(mark, "declines", within_s, its)
        if said is None:
            raise CaseFailed(f"a Decline of round {play.task.round}", self.instead(mark))
        assert isinstance(said.message, Decline)
        expect_equal("decline.round", play.task.round, said.message.round)
        expect_equal("decline.text", "", said.message.text)
        return said.message


def chunk_of(said: AgentMessage, task: Task) -> UpdateChunk | None:
    """Return the message if it is a chunk of the task's update, else None."""
    chunk = said.message
    return chunk if isinstance(chunk, UpdateChunk) and chunk.nonce == task.nonce else None
