"""What a workshop does: it composes the run with torch, and then calls the run's functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from edgefl.config import Federation
from edgefl.contract.server import MEAN, Scalars, Schedule, constant
from edgefl.errors import ConfigError
from edgefl.models.user_factory import files_of, remember
from edgefl.setup.data import open_data
from edgefl.setup.digests import run_digest
from edgefl.setup.processor import processor
from edgefl.wire.bundle.archive import read_bundle
from edgefl_export.compiler.cache import bundle_name
from edgefl_export.compiler.request import exchange_names
from edgefl_server.compose import BUNDLES, CANDIDATES, BundleFor, compose, composed
from edgefl_server.coordinator.roster import CANDIDATE
from edgefl_server.events import Event
from edgefl_server.run_spec import RunSpec, Steady
from edgefl_server.workshop import messages

Answer = tuple[object, Mapping[int, messages.Name]]
"""A value, and what stands for functions and bundles in it, by their ids."""


class Bench:
    """The run, once it is composed; before that, only how to do so."""

    def __init__(self) -> None:
        self._spec: RunSpec | None = None

    def answer(self, word: messages.Word, tell: Callable[[Event], None]) -> Answer:
        """What the server asked for. Whatever the run's functions raise."""
        value: object = None
        match word:
            case messages.Compose(federation, folder, device):
                self._spec = compose(federation, open_data(federation), folder, emit=tell, device=device)
                about = messages.Composed(processor(device), files_of(_own(federation)))
                return (self._spec, about), dict(_names(self._spec))
            case messages.Again():
                self._spec = _again(word)
            case messages.Place(weights, number):
                tiers = self._run.tiers.items()
                moving = {name: tier.place for name, tier in tiers if not isinstance(tier.place, Steady)}
                value = {name: place(weights, number) for name, place in moving.items()}
            case messages.Move(exchange, before, mean, hyper):
                value = self._run.exchanges[exchange].server.moved(before, mean, hyper)
            case messages.Unfold(exchange, update):
                value = self._run.exchanges[exchange].server.unfolded(update)
            case messages.Announce(exchange, first, stop, rounds):
                value = _values(self._run.exchanges[exchange].schedule, first, stop, rounds)
            case messages.Judge(weights):
                assert self._run.evaluate is not None  # else nobody asks
                value = dict(self._run.evaluate(weights))
        return value, {}

    @property
    def _run(self) -> RunSpec:
        assert self._spec is not None  # composing comes first
        return self._spec


def _again(word: messages.Again) -> RunSpec:
    """The run as another process composed it; ConfigError where its files have changed since."""
    federation, folder = word.compose.federation, word.compose.folder
    remember(word.sources)
    if run_digest(federation) != word.digest:
        raise ConfigError(
            "a module of the model, of the algorithm or of the loss has been changed, or another release of "
            "edgefl installed, "
            "since the server began: undo that, or start the server again in another folder"
        )

    def bundles_in(place: Path) -> BundleFor:
        return lambda tier, exchange, format: read_bundle(
            place / bundle_name(tier.name, exchange.name, format)
        )

    ours, theirs = (bundles_in(folder / BUNDLES / part) for part in ("", CANDIDATES))
    candidates = theirs if federation.rollout.on else None
    return composed(federation, open_data(federation), ours, candidates, device=word.compose.device)


def _file(tier: str, exchange: str, format: str) -> str:
    """Of a bundle, below the folder of all."""
    name = tier.removesuffix(CANDIDATE)
    return str(Path("" if name == tier else CANDIDATES, bundle_name(name, exchange, format)))


def _own(federation: Federation) -> list[str]:
    """Names that may say where factories of the user's own are."""
    candidate = str(federation.rollout.algorithm.get("name", ""))
    return [federation.model.name, federation.algorithm.name, federation.loss.name, candidate]


def _values(schedule: Schedule, first: int, stop: int, rounds: int) -> list[Scalars]:
    return [dict(schedule(position, rounds)) for position in range(first, stop)]


def _names(spec: RunSpec) -> Iterator[tuple[int, messages.Name]]:
    """What stands for the functions and the bundles of a run, by their ids."""
    yield id(MEAN), messages.Mean()
    if spec.evaluate is not None:
        yield id(spec.evaluate), messages.Judged()
    called = exchange_names(len(spec.opening), len(spec.ahead))
    for number, (own, exchange) in enumerate(zip(called, spec.exchanges, strict=True)):
        server, schedule = exchange.server, exchange.schedule
        if server is not MEAN:
            state, options = dict(server.state), server.options
            yield id(server), messages.Optimizer(number, server.name, state, server.unfolds, options)
        if schedule is not constant:
            rounds = spec.rules.rounds
            yield (
                id(schedule),
                messages.Scheduled(number, _values(schedule, 0, min(messages.PAGE, rounds), rounds)),
            )
        for name, tier in exchange.tiers.items():
            for bundle in tier.bundles.values():
                yield id(bundle), messages.Bundled(_file(name, own, bundle.manifest.format))
            if not isinstance(tier.place, Steady):
                yield id(tier.place), messages.Placed(name)
