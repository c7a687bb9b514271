"""What FAFED's figures show of a finished federation: training loss of the global model, bytes and gradient evaluations."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise

import numpy as np

from edgefl.api.simulate import Simulation
from edgefl.data.dataset import Dataset
from edgefl.facts import shipped
from edgefl.setup.data import open_data
from edgefl.setup.evaluation import evaluation
from edgefl.setup.model import federation_model
from edgefl.setup.training import algorithm_of
from edgefl.submodels.output_side.submodel import OutputSide
from edgefl.wire import tensors
from edgefl.wire.tensors import Array
from reproduce.entry import Measurements, Points, curves
from reproduce.results import Judge, Judged, Results, ahead_of_each, judge_factory, told

OBJECTIVE, MEGABYTES, GRADIENTS = "objective", "megabytes", "gradients"
"""Lines by round: training loss of the global model; megabytes up and down, and thousands of gradients of single samples,
of all clients, from the first round on."""
START = 4
"""The first 1 / START of the kept models is the beginning."""


def measured(samples: int) -> partial[Measurements]:
    """Figures and lines of a run whose models were kept; training loss on ``samples`` training samples."""
    return partial(_found, samples=samples)


def _found(simulation: Simulation, *, samples: int) -> Measurements:
    """Return further figures than :func:`~reproduce.entry.curves`: ``objective`` (mean over the last tenth of the models
    that were kept) and its ``perplexity``; ``rises`` (all rises of the training loss together, at the beginning);
    ``down_mb``, ``megabytes`` and ``gradients`` of all rounds; and ``floats_up`` (sent for each parameter by a client in the
    last round, names and shapes in)."""
    told = curves(simulation)
    objective = training_loss(simulation, samples)
    rows = simulation.history
    moved = [(row.up_bytes + row.down_bytes) / 1e6 for row in rows]
    lines = {
        **told.lines,
        OBJECTIVE: objective,
        MEGABYTES: _summed(moved),
        GRADIENTS: _summed([each / 1e3 for each in gradients(simulation)]),
    }
    last = objective[-max(1, len(objective) // 10) :]
    parameters = sum(array.size for array in simulation.model.values())
    reached = sum(loss for _, loss in last) / len(last)
    figures = {
        **told.figures,
        OBJECTIVE: reached,
        "rises": rises([loss for _, loss in objective[: max(2, len(objective) // START)]]),
        "down_mb": sum(row.down_bytes for row in rows) / 1e6,
        MEGABYTES: lines[MEGABYTES][-1][1],
        GRADIENTS: lines[GRADIENTS][-1][1],
        "perplexity": math.exp(min(reached, 50.0)),
        "floats_up": rows[-1].up_float32_bytes / 4 / parameters / rows[-1].reports,
    }
    return Measurements(figures, lines)


def training_loss(simulation: Simulation, samples: int) -> Points:
    """Of the models that were kept, by round, on ``samples`` training samples that the run's seed draws, as in inference."""
    federation = simulation.federation
    dataset = open_data(federation)
    spec = federation_model(federation, dataset)
    trained_on = _its_training_samples(dataset).limited(1, samples, seed=federation.federation.seed)
    judge = evaluation(spec, algorithm_of(federation, OutputSide(spec, 0)), trained_on, "cpu")
    return [
        (float(number), judge(tensors.load(path.read_bytes()))["loss"])
        for number, path in simulation.kept.items()
    ]


def _its_training_samples(dataset: Dataset) -> Dataset:
    """The training samples in the place of the test samples. ``dataset`` has no inputs beside x."""
    return replace(
        dataset, test_x=dataset.train_x, test_y=dataset.train_y, test_owners=dataset.owners, others={}
    )


def gradients(simulation: Simulation) -> list[int]:
    """Gradients of single samples that all clients together took, of each round. An opening exchange has one at each sample
    of as many batches as a round has."""
    federation = simulation.federation
    algorithm = federation.algorithm
    row = next(each for each in shipped().rows["algorithms"] if each["name"] == algorithm.name)
    assert algorithm.batch is not None and algorithm.steps is not None
    own = algorithm.batch * algorithm.steps
    return [
        each.reports * own * (1 if each.round <= row["opening"] else row["gradients"])
        for each in simulation.history
    ]


def rises(losses: list[float]) -> float:
    """How much ``losses`` go up, all steps up together: 0 for one that only falls."""
    return sum(max(0.0, later - earlier) for earlier, later in pairwise(losses))


def _summed(each: list[float]) -> Points:
    return [(float(number), total) for number, total in enumerate(accumulate(each), start=1)]


HEADERS = 0.03
"""Floats for each parameter that the names and shapes of an update's tensors take at most, in a model of these sizes."""


def lowest(arm: str, others: Sequence[str], figure: str) -> Judge:
    """``arm``'s loss is below each other one's."""
    return ahead_of_each(arm, others, figure, lower=True, unit=1.0, digits=4)


@judge_factory
def none_above(results: Results, arms: Sequence[str], other: str, figure: str) -> Judged:
    """No one of ``arms`` is above ``other`` in the paired mean."""
    above = {each: results.lead(each, other, figure) for each in arms}
    ours = ", ".join(f"{arm} {_loss(each)}" for arm, each in above.items())
    return Judged(all(each.mean() <= 0 for each in above.values()), ours)


@judge_factory
def smoother(results: Results, pairs: Mapping[str, Sequence[str]], figure: str) -> Judged:
    """Each arm's ``figure`` is the smallest, in the mean, beside those that stand after it."""
    held, said = True, []
    for arm, others in pairs.items():
        means = {each: results.mean(each, figure) for each in (arm, *others)}
        held &= all(means[arm] < means[each] for each in others)
        said.append(", ".join(f"{each} {mean:.3f}" for each, mean in means.items()))
    return Judged(held, "; ".join(said))


@judge_factory
def dearer(results: Results, pairs: Mapping[str, str], figures: Sequence[str]) -> Judged:
    """By how much an arm's training loss is below that of the other, which has cost less after as many rounds: less so
    where the arm may cost no more of each of ``figures`` (lines by round) than the other one's whole run did."""
    held, said = True, []
    for arm, other in pairs.items():
        leads = {"rounds": _lead(results, arm, other, None)}
        leads |= {figure: _lead(results, arm, other, figure) for figure in figures}
        held &= all(leads[figure].mean() < leads["rounds"].mean() for figure in figures)
        said.append(
            f"{arm} before {other} at equal "
            + ", ".join(f"{name} {_loss(lead)}" for name, lead in leads.items())
        )
    return Judged(held, "; ".join(said))


def _lead(results: Results, arm: str, other: str, figure: str | None) -> Array:
    """The other's last training loss less the arm's, of each seed: at its end, or where it had cost what the other did."""
    leads = []
    for own, its in zip(results.lines[arm], results.lines[other], strict=True):
        loss = list(own[OBJECTIVE])
        at = len(loss) if figure is None else _affordable(loss, own[figure], its[figure][-1][1])
        leads.append(its[OBJECTIVE][-1][1] - loss[max(at, 1) - 1][1])
    return np.array(leads, np.float64)


def _affordable(loss: Sequence[tuple[float, float]], cost: Sequence[tuple[float, float]], most: float) -> int:
    """Return the number of points of ``loss`` in rounds after which ``cost`` is at most ``most``."""
    rounds = bisect_right([spent for _, spent in cost], most)
    return bisect_right([number for number, _ in loss], float(rounds))


@judge_factory
def sends(results: Results, floats: Mapping[str, float]) -> Judged:
    """Each arm sends as many floats for each parameter in a round; names and shapes take at most :data:`HEADERS` more."""
    found = {arm: results.mean(arm, "floats_up") for arm in floats}
    wrong = {arm: value for arm, value in found.items() if not 0 <= value - floats[arm] <= HEADERS}
    ours = ", ".join(f"{arm} {value:.3f}" for arm, value in (wrong or found).items())
    return Judged(not wrong, ours)


def against(results: Results, arms: Sequence[str], x: str, line: str = OBJECTIVE) -> dict[str, Points]:
    """``line`` of each arm over the line ``x`` in place of rounds, both means over the seeds."""
    drawn: dict[str, Points] = {}
    for arm in arms:
        places = dict(results.line(arm, x))
        drawn[arm] = [(places[number], y) for number, y in results.line(arm, line) if number in places]
    return drawn


def _loss(differences: Array) -> str:
    return told(differences, 1.0, 4)
