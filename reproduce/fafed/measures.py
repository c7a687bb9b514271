"""Training loss of the averaged model, which FAFED's figures show by communication rounds."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

from edgefl.api.simulate import Simulation
from edgefl.setup.data import open_data
from edgefl.setup.evaluation import evaluation
from edgefl.setup.model import federation_model
from edgefl.setup.training import algorithm_of
from edgefl.submodels.output_side.submodel import OutputSide
from edgefl.wire import tensors
from reproduce.entry import Measurements, curves, tail


def training_loss(simulation: Simulation) -> Measurements:
    """Return :func:`~reproduce.entry.curves`, and the loss of the kept models on as many training samples as test samples.

    Curves: ``objective``, and its exponential ``perplexity``. Figures: the same in the mean over the last tenth, and
    ``rises``, the sum of all rises of the loss in the first quarter.
    """
    federation, found = simulation.federation, curves(simulation)
    dataset = open_data(federation)
    spec = federation_model(federation, dataset)
    # Training samples in the place of test samples. The datasets have no inputs beside x.
    own = replace(
        dataset, test_x=dataset.train_x, test_y=dataset.train_y, test_owners=dataset.owners, others={}
    ).limited(1, len(dataset.test_y), seed=federation.federation.seed)
    loss_of = evaluation(spec, algorithm_of(federation, OutputSide(spec, 0)), own, "cpu")
    losses = {
        float(number): loss_of(tensors.load(path.read_bytes()))["loss"]
        for number, path in simulation.kept.items()
    }
    start = list(losses.values())[: max(2, len(losses) // 4)]
    lines = {
        "objective": list(losses.items()),
        "perplexity": [(number, math.exp(min(loss, 50.0))) for number, loss in losses.items()],
    }
    figures = {name: tail(line) for name, line in lines.items()}
    figures["rises"] = sum(max(0.0, later - earlier) for earlier, later in pairwise(start))
    return Measurements(found.figures | figures, found.lines | lines)
