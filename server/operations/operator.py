"""Carries out an operator's orders, between two rounds where that matters. Each one's fate is told, and audited."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from edgefl.wire.errors import StoreError
from edgefl.wire.printable import printable
from server import events
from server.coordinator import machine as coordinator
from server.coordinator.machine import State
from server.operations.mailbox import AnyOrder, Drain, Mailbox, Pause, Resume, RollBack

_MOST_BY = 64


@dataclass(frozen=True)
class Given:
    """Put into the service's inbox: an order, and the file in which it came. None for what cannot be read."""

    path: Path
    order: AnyOrder | None


class Course(Protocol):
    """The run that orders are about."""

    state: State

    def advance(self, event: coordinator.Event) -> None: ...

    def halt(self) -> None:
        """End the service; the run can be taken up later."""


class Models(Protocol):
    """The models of the run: ``go_back`` makes one after an earlier round the current one, ``refusal`` says why that cannot
    be, or nothing."""

    def refusal(self, state: State, to: int) -> str: ...

    def go_back(self, state: State, to: int) -> State: ...


class Operator:
    """Takes orders out of ``mailbox``."""

    def __init__(
        self, mailbox: Mailbox, course: Course, models: Models, emit: Callable[[events.Event], None]
    ) -> None:
        self._mailbox = mailbox
        self._course = course
        self._models = models
        self._emit = emit
        self._due: list[Given] = []

    @property
    def holds(self) -> bool:
        """Whether no round may open before the orders that wait have been looked at."""
        return self._mailbox.paused or any(
            isinstance(order, Drain | RollBack) for _, order in self._mailbox.waiting()
        )

    def take(self, given: Given) -> None:
        """Carry an order out, or keep it for when no round is open."""
        match given.order:
            case Pause() | Resume():
                text = self._paused(on=isinstance(given.order, Pause))
                self._end(given, done=not text, text=text)
                self._hold()
            case Drain():
                self._due.append(given)
                self._hold()
            case RollBack(version=version):
                if text := self._models.refusal(self._course.state, version):
                    self._end(given, done=False, text=text)
                else:
                    self._due.append(given)
                self._hold()
            case None:
                self._emit(events.Ordered(order="unknown", by="", done=False, text="it cannot be read"))
                self._mailbox.done(given.path)

    def _paused(self, *, on: bool) -> str:
        """Why that cannot be remembered; empty where it is."""
        try:
            self._mailbox.pause(on=on)
        except OSError as error:
            return f"{error.filename or 'the folder of orders'} cannot be written ({error.strerror}): free some space there"
        return ""

    def step(self, *, judged: bool) -> None:
        """Do what waited for the round to end. ``judged``: the models of all rounds have been evaluated."""
        if not self._due or self._course.state.phase != "waiting":
            return
        given = self._due[0]
        if isinstance(given.order, Drain):
            self._due.remove(given)
            self._end(given, done=True)
            self._course.halt()
        elif isinstance(given.order, RollBack) and judged:
            self._due.remove(given)
            self._roll_back(given, given.order.version)
            self._hold()

    def _roll_back(self, given: Given, version: int) -> None:
        text = self._models.refusal(self._course.state, version)  # rounds have ended since it came
        if not text:
            try:
                self._course.state = self._models.go_back(self._course.state, version)
            except StoreError as error:
                text = error.message
        model = self._course.state.model_version[:12]
        told = text or f"the model is that after round {version} again, {model}"
        self._end(given, done=not text, text=told, version=version)

    def _hold(self) -> None:
        self._course.advance(coordinator.Hold(bool(self._due) or self._mailbox.paused))

    def _end(self, given: Given, *, done: bool, text: str = "", version: int = -1) -> None:
        assert given.order is not None
        by = printable(given.order.by, _MOST_BY)
        self._emit(events.Ordered(order=given.order.name, by=by, done=done, text=text, version=version))
        self._mailbox.done(given.path)
