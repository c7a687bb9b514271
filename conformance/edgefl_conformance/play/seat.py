"""An agent at its seat: its process, its line to the broker, and a server that hears it, in a federation of their own."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from edgefl.lab.processes import AgentProcess
from edgefl.wire.mqtt.messages import Hello, Status
from edgefl.wire.tensors import Array
from edgefl.wire.text import printable
from edgefl_conformance.material.bundles import samples
from edgefl_conformance.play.broker import Broker
from edgefl_conformance.play.relay import Relay
from edgefl_conformance.play.said import Said
from edgefl_conformance.play.server import Server
from edgefl_conformance.verdict import Failed

_MOST_PRINTED = 300
HEARD_S = 0.3
"""What an agent that has nothing to do needs to hear something and write it down."""
_LOOK_S = 0.5
"""How often it is looked whether an agent that is waited for still runs."""
_LAST_S = 1.0
"""What an agent said before it ended comes within that."""
_MUTE = 2
"""So many agents that never said Hello, where none did, are enough."""


@dataclass(frozen=True)
class Setup:
    """Settings and shared state of a campaign. ``command`` starts the agent, ``engine`` names the bundle format that it
    runs, ``patience`` multiplies every wait (1: for a fast machine), ``websocket``: the agent is given a URL of MQTT
    through WebSocket. ``stopping``: no case begins any more, and nothing is waited for. ``greeted``: an agent said Hello.
    ``mute``: what came in place of a Hello, of agents that were given nothing unusual. ``paces``: seconds from a task to
    its update, where that was seen."""

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


class Seat:
    """A federation of its own. The agent's store lies in ``folder``; a new stage has a new one."""

    def __init__(self, setup: Setup, name: str) -> None:
        self.setup = setup
        self.federation = f"kit-{name}-{secrets.token_hex(3)}"
        self.device = "agent-1"
        self.folder = setup.folder / self.federation
        self.folder.mkdir(parents=True)
        self.data = samples()
        self.server = Server(setup.broker.address, self.federation, self.device, self.folder)
        port = setup.broker.websocket_port if setup.websocket else setup.broker.port
        self.relay = Relay(port, reads=not setup.websocket)
        self.agent: AgentProcess | None = None
        self._options: list[str] = []
        self._usual = True

    def patient(self, seconds: float) -> float:
        """So many seconds, or more where the campaign is patient."""
        return seconds * self.setup.patience

    def write_data(self, x: Array, y: Array) -> None:
        """Write the data that the agent trains on from its next start."""
        self.data = (x, y)
        np.savez(self.folder / "data.npz", x=x, y=y)

    def start(self, *options: str, known: bool = True, ready: bool = True) -> AgentProcess:
        """Start the agent with these options beside those that it always has, and wait for its hello. ``known``: it is given
        the server's key."""
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
        """Kill the agent, if it runs, when it has heard what was said, and start it again as it was started."""
        if self.agent is not None:
            time.sleep(self.patient(HEARD_S))
            self.agent.kill()
        return self.start_again()

    def kill(self) -> None:
        """Kill the agent, now."""
        if self.agent is not None:
            self.agent.kill()

    def restart_before(self, announcement: bytes) -> None:
        """Kill the agent, and start it again where this is the announcement that it meets."""
        time.sleep(self.patient(HEARD_S))
        self.kill()
        self.server.publish(self.server.topics.current_round, announcement, retain=True)
        self.start_again()

    def start_again(self, *, ready: bool = True) -> AgentProcess:
        """Start the agent that was killed again, as it was started."""
        mark = self.server.log.mark()
        self.agent = AgentProcess([*self.setup.command, *self._options], self.folder / "agent.log")
        if ready:
            self.hello(mark)
        return self.agent

    def ensure(self) -> None:
        """Have an agent run with the options that it always has. Failed if the one that ran has ended by itself."""
        if self.agent is None:
            self.start()
        code = self.agent.exit_code if self.agent is not None else None
        if code is not None:
            raise Failed(
                "an agent that goes on", f"one that ended with exit code {code}; {self.last_words()}"
            )

    def hello(self, mark: int, within_s: float = 30.0) -> Hello:
        """Return the Hello of the agent after ``mark``."""
        said = self.heard(mark, "hello", within_s, lambda each: each.message is not None)
        if said is None:
            instead = self.instead(mark)
            if self._usual:
                self.setup.mute.append(instead)
            raise Failed(f"a Hello on devices/{self.device}/hello", instead)
        self.setup.greeted.set()
        assert isinstance(said.message, Hello)
        return said.message

    def heard(self, mark: int, leaf: str, within_s: float, test: Callable[[Said], bool]) -> Said | None:
        """The first message of its kind after ``mark`` that passes ``test``; None if none comes, or the agent ends."""
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

    def status(self, mark: int, online: bool, within_s: float = 15.0) -> Said:
        """The next status that says so."""

        def such(said: Said) -> bool:
            return isinstance(said.message, Status) and said.message.online == online

        said = self.server.log.wait(mark, "status", self.patient(within_s), such)
        if said is None:
            raise Failed(f"Status{{online: {str(online).lower()}}}", self.instead(mark))
        return said

    def end(self) -> None:
        """End the agent, if it runs, and everything else."""
        if self.agent is not None:
            self.agent.kill()
        self.relay.close()
        self.server.stop()
