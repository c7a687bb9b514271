"""All cases against one agent: groups in parallel, the cases of a group one after the other."""

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
from edgefl_conformance.play.harness import CampaignState, RoundHarness
from edgefl_conformance.results import CaseFailed, CaseResult, Outcome

JOBS = 4


@dataclass(frozen=True, kw_only=True)
class Campaign:
    """Cases to play against an agent.

    Attributes:
        command: starts the agent; the options of `edgefl device` are appended.
        engine: runtime of its graphs, ``onnx`` or ``executorch``.
        only: names of cases or groups; none: all.
        jobs: agents that run at a time.
        patience: factor of every wait.
        websocket: give the agent a ``ws://`` URL as its broker.
        folder: keeps the agents' output and stores; None: a temporary folder.
    """

    command: Sequence[str]
    engine: str = "onnx"
    only: tuple[str, ...] = ()
    jobs: int = JOBS
    patience: float = 1.0
    websocket: bool = False
    folder: Path | None = None

    def run(self, report: Callable[[CaseResult], None] = lambda _: None) -> list[CaseResult]:
        """Play the cases and return their results in the order of the catalog.

        Args:
            report: receives each result at once.

        Raises:
            ConfigError: there is no such case, or no command.
        """
        cases = chosen(self.only)
        if not self.command:
            raise ConfigError(
                "expected an agent's command, found none; name it behind --, such as `-- edgefl device`"
            )
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            return self._within(self.folder, cases, report)
        with tempfile.TemporaryDirectory(prefix="edgefl-conformance-") as folder:
            return self._within(Path(folder), cases, report)

    def _within(
        self, folder: Path, cases: Sequence[Case], told: Callable[[CaseResult], None]
    ) -> list[CaseResult]:
        verdicts: dict[str, CaseResult] = {}
        with (
            running_broker(folder) as broker,
            ThreadPoolExecutor(self.jobs, thread_name_prefix="cases") as pool,
        ):
            if self.websocket and not broker.websocket_port:
                raise ConfigError(
                    "--websocket expects mosquitto, found the embedded broker; install mosquitto"
                )
            setup = CampaignState(self.command, self.engine, broker, folder, self.patience, self.websocket)
            playing = [pool.submit(_played, setup, part, told) for part in _parts(cases)]
            try:
                for each in as_completed(playing):
                    verdicts |= {verdict.name: verdict for verdict in each.result()}
            except BaseException:  # the other cases would run in vain
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


def _played(
    setup: CampaignState, cases: Sequence[Case], told: Callable[[CaseResult], None]
) -> list[CaseResult]:
    harness: RoundHarness | None = None
    verdicts = []
    try:
        for case in cases:
            if setup.stopping.is_set():
                break
            begun = time.monotonic()
            outcome, expected, found = _untried(setup, case)
            if not outcome:
                harness = harness or RoundHarness(setup, case.group)
                outcome, expected, found = _tried(harness, case)
                if setup.stopping.is_set():  # an interrupted case says nothing about the agent
                    break
                if outcome != "passed":  # the next case begins with a new agent
                    harness.end()
                    harness = None
            took, named = time.monotonic() - begun, (case.name, case.group, case.says)
            verdict = CaseResult(*named, outcome, case.optional, expected, found, took)
            told(verdict)
            verdicts.append(verdict)
    finally:
        if harness is not None:
            harness.end()
    return verdicts


def _untried(setup: CampaignState, case: Case) -> tuple[Outcome | None, str, str]:
    """Return the result of a case that cannot be played, or None as its outcome."""
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


def _tried(harness: RoundHarness, case: Case) -> tuple[Outcome, str, str]:
    try:
        case.script(harness)
    except CaseFailed as failed:
        return "missing" if case.optional else "failed", failed.expected, failed.found
    except ConfigError:
        raise
    except EdgeflError as error:
        return "failed", "a case that can be played", error.message
    finally:
        with suppress(EdgeflError):
            harness.relay.release()
            harness.relay.open_door()
    return "passed", "", ""
