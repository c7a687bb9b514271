"""All cases against one agent: groups beside each other, the cases of a group one after the other."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from edgefl.errors import ConfigError, EdgeflError
from edgefl_conformance.case import Case
from edgefl_conformance.catalog import chosen
from edgefl_conformance.play.broker import running_broker
from edgefl_conformance.play.seat import Setup
from edgefl_conformance.play.stage import Stage
from edgefl_conformance.verdict import Failed, Outcome, Verdict

JOBS = 4


@dataclass(frozen=True, kw_only=True)
class Campaign:
    """``command`` starts the agent, by the options of `edgefl device`. ``engine``: what runs its graphs, ``onnx`` or
    ``executorch``. ``only``: names of cases or groups; none: all. ``jobs``: agents that run at a time. ``patience``
    multiplies every wait, ``websocket`` gives the agent a ``ws://`` URL as its broker. ``folder`` keeps what agents said;
    else it goes."""

    command: Sequence[str]
    engine: str = "onnx"
    only: tuple[str, ...] = ()
    jobs: int = JOBS
    patience: float = 1.0
    websocket: bool = False
    folder: Path | None = None

    def run(self, told: Callable[[Verdict], None] = lambda _: None) -> list[Verdict]:
        """The verdicts in the order of the catalogue; ``told`` gets each when it is known.

        ConfigError if there is no such case, or no command."""
        cases = chosen(self.only)
        if not self.command:
            raise ConfigError(
                "there is no agent to try: name its command behind --, such as `-- edgefl device`"
            )
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            return self._within(self.folder, cases, told)
        with tempfile.TemporaryDirectory(prefix="edgefl-conformance-") as folder:
            return self._within(Path(folder), cases, told)

    def _within(self, folder: Path, cases: Sequence[Case], told: Callable[[Verdict], None]) -> list[Verdict]:
        verdicts: dict[str, Verdict] = {}
        with (
            running_broker(folder) as broker,
            ThreadPoolExecutor(self.jobs, thread_name_prefix="cases") as pool,
        ):
            if self.websocket and not broker.websocket_port:
                raise ConfigError("the embedded broker has no WebSocket: install mosquitto")
            setup = Setup(self.command, self.engine, broker, folder, self.patience, self.websocket)
            playing = [pool.submit(_played, setup, part, told) for part in _parts(cases)]
            try:
                for each in as_completed(playing):
                    verdicts |= {verdict.name: verdict for verdict in each.result()}
            except BaseException:  # nobody waits for the rest
                setup.stopping.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return [verdicts[case.name] for case in cases]


def _parts(cases: Sequence[Case]) -> list[list[Case]]:
    """Return lists of cases to run in sequence: those of a group that share an agent, longest first, and each other case."""
    rows: dict[str, list[Case]] = {}
    for case in cases:
        if not case.alone:
            rows.setdefault(case.group, []).append(case)
    shared = sorted(rows.values(), key=len, reverse=True)
    return shared + [[case] for case in cases if case.alone]


def _played(setup: Setup, cases: Sequence[Case], told: Callable[[Verdict], None]) -> list[Verdict]:
    stage: Stage | None = None
    verdicts = []
    try:
        for case in cases:
            if setup.stopping.is_set():
                break
            begun = time.monotonic()
            outcome, expected, found = _untried(setup, case)
            if not outcome:
                stage = stage or Stage(setup, case.group)
                outcome, expected, found = _tried(stage, case)
                if setup.stopping.is_set():  # what was cut short says nothing of the agent
                    break
                if outcome != "passed":  # the next case begins with an agent that has nothing on its mind
                    stage.end()
                    stage = None
            took, named = time.monotonic() - begun, (case.name, case.group, case.says)
            verdict = Verdict(*named, outcome, case.optional, expected, found, took)
            told(verdict)
            verdicts.append(verdict)
    finally:
        if stage is not None:
            stage.end()
    return verdicts


def _untried(setup: Setup, case: Case) -> tuple[Outcome | None, str, str]:
    """The verdict where it is of no use to play the case; else None."""
    if setup.engine not in case.engines:
        return "skipped", "", f"it means nothing for {setup.engine}"
    if setup.gave_up:
        return (
            "failed",
            "an agent that says Hello",
            f"none that did, so this was not tried: start {' '.join(setup.command)!r} by hand with the options of "
            f"docs/conformance.md. In place of a Hello came {setup.mute[0]}",
        )
    return None, "", ""


def _tried(stage: Stage, case: Case) -> tuple[Outcome, str, str]:
    try:
        case.script(stage)
    except Failed as failed:
        return "missing" if case.optional else "failed", failed.expected, failed.found
    except ConfigError:
        raise
    except EdgeflError as error:
        return "failed", "a case that can be played", error.message
    finally:
        with suppress(EdgeflError):
            stage.relay.release()
            stage.relay.open_door()
    return "passed", "", ""
