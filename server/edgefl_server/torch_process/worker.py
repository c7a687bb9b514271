"""Worker in the torch process: composes the run, and then calls the run's functions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from edgefl.algorithms.evaluation import EVALUATE
from edgefl.config import Federation
from edgefl.contract.server import MEAN, Scalars, Schedule, constant
from edgefl.errors import ConfigError
from edgefl.models.user_factory import files_of, remember
from edgefl.setup.data import open_data
from edgefl.setup.processor import processor
from edgefl.setup.runs import run_digest
from edgefl.wire.bundle.archive import read_bundle
from edgefl.wire.norm_statistics import NORMS
from edgefl_export.compiler.cache import bundle_name
from edgefl_export.compiler.request import exchange_names
from edgefl_server.compose import BUNDLES, CANDIDATES, BundleFor, compose, compose_with
from edgefl_server.coordinator.roster import CANDIDATE
from edgefl_server.events import EventListener
from edgefl_server.run_spec import FixedPlacement, RunSpec
from edgefl_server.torch_process import messages

Answer = tuple[object, Mapping[int, messages.Placeholder]]
"""Result of a request, and placeholders of functions and bundles in it, by their ids."""


class ModelWorker:
    """Worker that composes the run at the first request, and calls its functions for later ones."""

    def __init__(self) -> None:
        self._spec: RunSpec | None = None

    def answer(self, request: messages.WorkRequest, listener: EventListener) -> Answer:
        """Execute a request in this process.

        Args:
            request: Request to compose the run (models, algorithms and bundles of all tiers), or to call one of its
                functions.
            listener: Receiver of the events that occur while the run is composed.

        Returns:
            (result, placeholders). Functions and bundles in the result cannot be pickled: ``placeholders`` maps the id() of
            each to the name under which the caller refers to it.

        Raises:
            Exception: Any error of the run's functions.
        """
        value: object = None
        match request:
            case messages.ComposeRequest(federation, folder, device):
                self._spec = compose(
                    federation, open_data(federation), folder, listener=listener, device=device
                )
                about = messages.ComposeResult(processor(device), files_of(_factory_names(federation)))
                return (self._spec, about), dict(_names(self._spec))
            case messages.RecomposeRequest():
                self._spec = _recompose(request)
            case messages.PlaceRequest(weights, number):
                tiers = self._run.tiers.items()
                moving = {
                    name: tier.place for name, tier in tiers if not isinstance(tier.place, FixedPlacement)
                }
                value = {name: place(weights, number) for name, place in moving.items()}
            case messages.OptimizeRequest(exchange, before, mean, hyper):
                value = self._run.exchanges[exchange].server.moved(before, mean, hyper)
            case messages.UnfoldRequest(exchange, update):
                value = self._run.exchanges[exchange].server.unfolded(update)
            case messages.ScheduleRequest(exchange, first, stop, rounds):
                value = _values(self._run.exchanges[exchange].schedule, first, stop, rounds)
            case messages.EvaluateRequest(weights):
                assert self._run.evaluate is not None  # a run without evaluation has no such request
                value = dict(self._run.evaluate(weights))
        return value, {}

    @property
    def _run(self) -> RunSpec:
        assert self._spec is not None  # composing comes first
        return self._spec


def _recompose(request: messages.RecomposeRequest) -> RunSpec:
    """Compose the run again from the bundles of an earlier process, and return its run spec.

    Raises:
        ConfigError: If the user's files or edgefl changed since then.
    """
    federation, folder = request.compose.federation, request.compose.folder
    remember(request.sources)
    if run_digest(federation) != request.digest:
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
    return compose_with(federation, open_data(federation), ours, candidates, device=request.compose.device)


def _file(tier: str, exchange: str, format: str) -> str:
    """Return the path of a bundle, relative to the folder of all bundles. ``tier`` may have the suffix of a candidate."""
    name = tier.removesuffix(CANDIDATE)
    return str(Path("" if name == tier else CANDIDATES, bundle_name(name, exchange, format)))


def _factory_names(federation: Federation) -> list[str]:
    """Return the names in the configuration that may refer to a user's own Python files: of model, algorithms and
    loss.
    """
    candidate = str(federation.rollout.algorithm.get("name", ""))
    return [federation.model.name, federation.algorithm.name, federation.loss.name, candidate]


def _values(schedule: Schedule, first: int, stop: int, rounds: int) -> list[Scalars]:
    return [dict(schedule(position, rounds)) for position in range(first, stop)]


def _names(spec: RunSpec) -> Iterator[tuple[int, messages.Placeholder]]:
    """Yield (id() of an object, its placeholder) for the objects of a run that cannot be pickled: functions and
    bundles.
    """
    yield id(MEAN), messages.MeanRef()
    if spec.evaluate is not None:
        yield id(spec.evaluate), messages.EvaluationRef()
    called = exchange_names(len(spec.opening), len(spec.ahead))
    called += () if spec.evaluation is None else (EVALUATE,)
    called += () if spec.measuring is None else (NORMS,)
    for number, (own, exchange) in enumerate(zip(called, spec.offered, strict=True)):
        server, schedule = exchange.server, exchange.schedule
        if server is not MEAN:
            state, options = dict(server.state), server.options
            yield id(server), messages.OptimizerRef(number, server.name, state, server.unfolds, options)
        if schedule is not constant:
            rounds = spec.rules.rounds
            yield (
                id(schedule),
                messages.ScheduleRef(number, _values(schedule, 0, min(messages.PAGE, rounds), rounds)),
            )
        for name, tier in exchange.tiers.items():
            for bundle in tier.bundles.values():
                yield id(bundle), messages.BundleRef(_file(name, own, bundle.manifest.format))
            if not isinstance(tier.place, FixedPlacement):
                yield id(tier.place), messages.PlacementRef(name)
