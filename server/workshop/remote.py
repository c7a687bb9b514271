"""The functions of a run that its workshop calls: to the server they look like those of its own process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from edgefl.contract.schedule import Scalars
from edgefl.contract.server import MEAN, ServerOpt
from edgefl.wire.bundle.archive import read_bundle
from edgefl.wire.errors import StepError, WorkshopError
from edgefl.wire.regions import Placement
from edgefl.wire.tensors import Array, Arrays
from server.workshop import messages

Ask = Callable[..., Any]
"""``ask(word)``, ``ask(word, beside=True)``: the workshop's answer."""


def found_by(ask: Ask, folder: Path) -> Callable[[messages.Name], object]:
    """What stands on this side for the functions and bundles of a run in ``folder``."""
    placing = _Placing(ask)

    def found(name: messages.Name) -> object:
        match name:
            case messages.Mean():
                return MEAN
            case messages.Bundled(file):
                return read_bundle(folder / "bundles" / file)
            case messages.Placed(tier):
                return partial(placing, tier)
            case messages.Optimizer(exchange, called, state, unfolds, options):
                own = _unfold if unfolds else MEAN.unfold
                return _Elsewhere(called, state, _step, own, options, ask, exchange)
            case messages.Scheduled(exchange, known):
                return _Announced(ask, exchange, {0: known})
            case messages.Judged():
                return partial(_judge, ask)

    return found


def _judge(ask: Ask, weights: Arrays) -> Mapping[str, float]:
    found: Mapping[str, float] = ask(messages.Judge(weights), beside=True)
    return found


class _Placing:
    """The weights of a round go over once, for all tiers that are placed anew."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._asked: tuple[Arrays, int] | None = None
        self._left: dict[str, Placement] = {}

    def __call__(self, tier: str, weights: Arrays, number: int) -> Placement:
        same = self._asked is not None and self._asked[0] is weights and self._asked[1] == number
        if not same or tier not in self._left:
            own = {
                name: array for name, array in weights.items() if "/" not in name
            }  # without the server's state
            self._left, self._asked = dict(self._ask(messages.Place(own, number))), (weights, number)
        placement = self._left.pop(tier)
        if not self._left:
            self._asked = None
        return placement


@dataclass(frozen=True)
class _Announced:
    """A schedule; ``pages`` of it are known, by the position that each begins with."""

    ask: Ask
    exchange: int
    pages: dict[int, Any] = field(default_factory=dict)

    def __call__(self, position: int, rounds: int) -> Scalars:
        first = position - position % messages.PAGE
        if position - first >= len(self.pages.get(first, ())):
            stop = max(position + 1, min(first + messages.PAGE, rounds))
            self.pages[first] = self.ask(messages.Announce(self.exchange, first, stop, rounds))
        scalars: Scalars = self.pages[first][position - first]
        return scalars


def _step(*_: object) -> Any:
    raise NotImplementedError("the step is taken by moved(), in the workshop")


def _unfold(*_: object) -> Any:
    raise NotImplementedError("an update is unfolded by unfolded(), in the workshop")


@dataclass(frozen=True)
class _Elsewhere(ServerOpt):
    """A server's optimizer whose functions are in the workshop."""

    ask: Ask = _step
    exchange: int = 0

    def moved(self, before: Mapping[str, Array], mean: Mapping[str, Array], hyper: Scalars) -> Arrays:
        try:
            return self._asked(messages.Move(self.exchange, dict(before), dict(mean), dict(hyper)))
        except WorkshopError as error:  # the round has no model; the run goes on
            raise StepError(f"the server's step {self.name!r} could not be taken: {error.message}") from error

    def unfolded(self, update: Mapping[str, Array]) -> Arrays:
        return self._asked(messages.Unfold(self.exchange, dict(update))) if self.unfolds else dict(update)

    def _asked(self, word: messages.Word) -> Arrays:
        arrays: Arrays = self.ask(word)
        return arrays
