"""Audit log of the rounds: chained JSON lines in ``audit.jsonl`` of the run's folder.

Each line has a number, a time, an event, the hash of the line before, and its own hash::

    {"n":7,"at":1700000000.5,"event":{"event":"updateaccepted","round":1,...},"before":"<sha256>","hash":"<sha256>"}

``hash`` is the SHA-256 of the bytes of the line before the hash. A changed, removed or added line breaks the chain
from there on. If the whole chain is rewritten, its last hash differs. Store that elsewhere (`edgefl audit verify`
prints it) to detect it.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from edgefl.errors import DataError
from edgefl.system.clock import Clock
from edgefl_server import events
from edgefl_server.events import Event, RoundClosed, Warned

HISTORY_NAME = "history.jsonl"


class HistoryWriter:
    """Writer of ``history.jsonl`` in ``folder``, with one line per closed round.

    A round that a killed server reports again has two lines.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / HISTORY_NAME

    def take(self, event: Event) -> Warned | None:
        """Append a line if ``event`` is a closed round, durable before this returns. Other events are ignored.

        Returns:
            A warning if the file cannot be written, else None.
        """
        if not isinstance(event, RoundClosed):
            return None
        try:
            with self._path.open("ab") as file:
                file.write(b"\n" + msgspec.json.encode(event) + b"\n")  # begins anew behind half a line
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            text = (
                f"round {event.round} is missing in {self._path} ({error.strerror or error}): free some space"
            )
            return Warned(tier="", text=text)
        return None


def rounds_of(folder: Path) -> tuple[RoundClosed, ...]:
    """Return the closed rounds in the history of the run in ``folder``, sorted by number; empty without a history.

    If a round was reported twice, the first line counts. A line that a killed server left incomplete is ignored; the
    resumed server reports that round again.
    """
    path = folder / HISTORY_NAME
    rounds: dict[int, RoundClosed] = {}
    for line in path.read_bytes().splitlines() if path.exists() else ():
        with suppress(ValueError):
            row = msgspec.json.decode(line, type=RoundClosed)
            rounds.setdefault(row.round, row)
    return tuple(rounds[number] for number in sorted(rounds))


NAME = "audit.jsonl"
BEGINNING = "0" * 64
"""Hash that the first line has as the hash of the line before."""
MOST_REJECTED = 16
"""Number of refusals that are logged per device and round. Refusals of devices without a task are not logged."""

_RECORDED = (
    *(
        events.Started,
        events.RoundOpened,
        events.UpdateAccepted,
        events.ParticipationDeclined,
        events.RoundEnded,
    ),
    *(events.RoundClosed, events.Refused, events.Stopped, events.Finished, events.Ordered),
)
_SYNCED = (
    *(events.RoundEnded, events.RoundClosed, events.Finished, events.Refused, events.Stopped),
    events.Ordered,
)
"""Events after which the file is synced to disk."""
_HASH = b',"hash":"'


@dataclass
class _ChainState:
    """State at the end of the audit log, from which it continues.

    Attributes:
        lines: Number of lines.
        head: Hash of the last line.
        size: Size of the file in bytes.
        run: Identifier of the run.
        accepted: (run, round, device, nonce) of each accepted update of the last round, so that none is logged twice.
    """

    lines: int = 0
    head: str = BEGINNING
    size: int = 0
    run: str = ""
    accepted: set[tuple[str, ...]] = field(default_factory=set)


class AuditLog:
    """Writer of the audit log, a file of chained JSON lines in ``folder``."""

    def __init__(self, folder: Path, clock: Clock = time.time) -> None:
        self._path = folder / NAME
        self._clock = clock
        self._tail: _ChainState | None = None
        self._rejected: Counter[str] = Counter()
        self._devices: frozenset[str] = frozenset()

    def take(self, event: Event) -> Warned | None:
        """Append an event, if it is of a kind that the log records.

        An update that a killed server accepted twice is appended once.

        Returns:
            A warning if the file cannot be written, else None.
        """
        try:
            self._tail = self._tail or _repair(self._path)
            if self._is_recorded(event, self._tail):
                self._append(event, self._tail)
        except OSError as error:
            text = f"{self._path} lacks {type(event).__name__} ({error.strerror or error}): free some space"
            self._tail = None  # half a line may be there
            return Warned(tier="", text=text)
        return None

    def _is_recorded(self, event: Event, tail: _ChainState) -> bool:
        match event:
            case events.Started():
                tail.run = event.run
            case events.RoundOpened():
                self._devices, self._rejected = frozenset(event.devices), Counter()
                # A finished round accepts no update, so the keys of earlier rounds are not needed.
                tail.accepted = {key for key in tail.accepted if key[:2] == (tail.run, str(event.round))}
            case events.UpdateAccepted():
                key = tail.run, str(event.round), event.device, event.nonce
                if key in tail.accepted:
                    return False
                tail.accepted.add(key)
            case events.Rejected():
                if event.device not in self._devices:
                    return False
                self._rejected[event.device] += 1
                return self._rejected[event.device] <= MOST_REJECTED
        return isinstance(event, _RECORDED)

    def _append(self, event: Event, tail: _ChainState) -> None:
        entry = {"n": tail.lines + 1, "at": self._clock(), "event": event, "before": tail.head}
        text = msgspec.json.encode(entry)[:-1]
        head = hashlib.sha256(text).hexdigest()
        line = text + _HASH + head.encode() + b'"}\n'
        with self._path.open("ab") as file:
            file.write(line)
            file.flush()
            if isinstance(event, _SYNCED):
                os.fsync(file.fileno())
        tail.lines, tail.head, tail.size = tail.lines + 1, head, tail.size + len(line)


class AuditVerification(msgspec.Struct, frozen=True, kw_only=True):
    """Result of the verification of an audit log.

    Attributes:
        lines: Number of lines.
        head: Hash of the last line, to compare with a stored one.
        rounds: Number of closed rounds.
        updates: Number of accepted updates.
        problems: Descriptions of faulty lines and missing rounds; empty if the log is valid.
    """

    lines: int
    head: str
    rounds: int
    updates: int
    problems: tuple[str, ...]


def verify(folder: Path) -> AuditVerification:
    """Verify every line of the audit log in ``folder``, and compare its rounds with ``history.jsonl``.

    Faults do not raise; they are in ``problems`` of the result.

    Raises:
        DataError: If there is no log.
    """
    path = folder / NAME
    if not path.is_file():
        raise DataError(f"{folder} has no {NAME}: name the folder of a server, its `out`", path=str(folder))
    head, problems, weights, updates = BEGINNING, list[str](), dict[str, str](), 0
    lines = path.read_bytes().splitlines()
    for number, line in enumerate(lines, 1):
        entry, problem = _read(line, number, head)
        if problem:
            problems.append(f"line {number}: {problem}")
        head = _own_hash(line) or head
        event = _event(entry)
        updates += event.get("event") == "updateaccepted"
        if event.get("event") == "roundclosed":
            weights[str(event.get("round"))] = str(event.get("weights_sha256"))
    for row in rounds_of(folder):
        if (found := weights.get(str(row.round), "nothing")) != row.weights_sha256:
            problems.append(
                f"round {row.round}: history.jsonl has weights {row.weights_sha256[:12]}, the log has {found[:12]}"
            )
    return AuditVerification(
        lines=len(lines), head=head, rounds=len(weights), updates=updates, problems=tuple(problems)
    )


def _read(line: bytes, number: int, before: str) -> tuple[dict[str, Any], str]:
    """Return (line as a dict, description of its fault), where the line should be number ``number`` after the hash
    ``before``.

    The description is empty if the line is valid; the dict is empty if it is not JSON.
    """
    try:
        entry = msgspec.json.decode(line, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return {}, "it is no JSON object"
    text, _, _ = line.rpartition(_HASH)
    if hashlib.sha256(text).hexdigest() != entry.get("hash"):
        return entry, "its hash is not that of its words: it was changed"
    if entry.get("before") != before:
        return entry, "it does not follow the line before: lines were removed, added or moved"
    if entry.get("n") != number:
        return entry, f"it has number {entry.get('n')}"
    return entry, ""


def _event(entry: dict[str, Any]) -> dict[str, Any]:
    """Return the event of a decoded line; an empty dict if it has none."""
    event = entry.get("event")
    return event if isinstance(event, dict) else {}


def _own_hash(line: bytes) -> str:
    _, found, rest = line.rpartition(_HASH)
    return rest.removesuffix(b'"}').decode("ascii", "replace") if found else ""


def _repair(path: Path) -> _ChainState:
    """Return the state at the end of the log file ``path``. An incomplete last line, left by a killed server, is cut
    off.
    """
    tail = _ChainState()
    if not path.exists():
        return tail
    line = b"\n"
    with path.open("rb") as file:
        for line in file:  # one at a time: a long run's log is larger than memory
            if line.endswith(b"\n"):
                _advance(tail, line.rstrip(b"\n"))
                tail.size += len(line)
    if not line.endswith(b"\n"):
        with path.open("r+b") as file:
            file.truncate(tail.size)
    return tail


def _advance(tail: _ChainState, line: bytes) -> None:
    """Advance the state ``tail`` in place by one line of the log. The line is not verified."""
    entry, _ = _read(line, tail.lines + 1, tail.head)
    tail.lines, tail.head = tail.lines + 1, _own_hash(line) or tail.head
    event = _event(entry)
    number, device, nonce = (str(event.get(name)) for name in ("round", "device", "nonce"))
    match event.get("event"):
        case "started":
            tail.run = str(event.get("run"))
        case "roundopened":
            tail.accepted = {key for key in tail.accepted if key[:2] == (tail.run, number)}
        case "updateaccepted":
            tail.accepted.add((tail.run, number, device, nonce))
