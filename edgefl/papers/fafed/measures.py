"""What FAFED's figures show of a finished federation: training loss of the global model, bytes and gradient evaluations."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise

from edgefl.api.simulate import Simulation
from edgefl.data.dataset import Dataset
from edgefl.facts import shipped
from edgefl.papers.entry import Found, Points, curves
from edgefl.setup.data import open_data
from edgefl.setup.evaluation import evaluation
from edgefl.setup.model import federation_model
from edgefl.setup.training import program_of
from edgefl.submodels.output_side.submodel import OutputSide
from edgefl.wire import tensors

OBJECTIVE, MEGABYTES, GRADIENTS = "objective", "megabytes", "gradients"
"""Lines by round: training loss of the global model; megabytes up and down, and thousands of gradients of single samples,
of all clients, from the first round on."""
START = 4
"""The first 1 / START of the kept models is the beginning."""


def measured(samples: int) -> partial[Found]:
    """Figures and lines of a run whose models were kept; training loss on ``samples`` training samples."""
    return partial(_found, samples=samples)


def _found(simulation: Simulation, *, samples: int) -> Found:
    """Beside those of :func:`~edgefl.papers.entry.curves`: figures ``objective`` (mean over the last tenth of the models
    that were kept), ``perplexity`` (of that), ``rises`` (all rises of the training loss together, at the beginning),
    ``down_mb``, ``megabytes``, ``gradients`` (all rounds) and ``floats_up`` (sent for each parameter by a client in the
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
    return Found(figures, lines)


def training_loss(simulation: Simulation, samples: int) -> Points:
    """Of the models that were kept, by round, on ``samples`` training samples that the run's seed draws, as in inference."""
    federation = simulation.federation
    dataset = open_data(federation)
    spec = federation_model(federation, dataset)
    trained_on = _its_training_samples(dataset).limited(1, samples, seed=federation.federation.seed)
    judge = evaluation(spec, program_of(federation, OutputSide(spec, 0)), trained_on, "cpu")
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
    program = federation.program
    row = next(each for each in shipped().rows["programs"] if each["name"] == program.name)
    assert program.batch is not None and program.steps is not None
    own = program.batch * program.steps
    return [
        each.reports * own * (1 if each.round <= row["opening"] else row["gradients"])
        for each in simulation.history
    ]


def rises(losses: list[float]) -> float:
    """How much ``losses`` go up, all steps up together: 0 for one that only falls."""
    return sum(max(0.0, later - earlier) for earlier, later in pairwise(losses))


def _summed(each: list[float]) -> Points:
    return [(float(number), total) for number, total in enumerate(accumulate(each), start=1)]
