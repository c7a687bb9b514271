"""How right submodels of a simulation's model are: any size, trained or not, on the test set and on each client's classes.

::

    judge = SubmodelAccuracy.of(simulation)
    by_class = judge.by_class(judge.cut(tier="weak", gamma=1 / 32), simulation.model)
    judge.overall(by_class), judge.local("weak", by_class)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from edgefl.api.simulate import Simulation
from edgefl.config import Federation
from edgefl.data.dataset import Dataset
from edgefl.data.partition import histograms
from edgefl.lab.deployment import ROWS, DeploymentBuilder, deployed_submodel
from edgefl.models.spec import ModelSpec
from edgefl.setup.data import open_data, partition
from edgefl.setup.model import federation_model
from edgefl.setup.tiers import device_names
from edgefl.submodels.standalone import FIRST_ROUND
from edgefl.submodels.submodel import Submodel
from edgefl.wire.tensors import Array


@dataclass(frozen=True, eq=False)
class SubmodelAccuracy:
    """Of a federation whose samples have classes. Batch norms have statistics of one batch of training samples, taken with
    the submodel itself, whatever method trained it (fiarse.md A11)."""

    federation: Federation
    dataset: Dataset
    spec: ModelSpec

    @classmethod
    def of(cls, simulation: Simulation) -> SubmodelAccuracy:
        """The data are read again."""
        federation = simulation.federation
        dataset = open_data(federation)
        return cls(federation, dataset, federation_model(federation, dataset))

    def cut(self, tier: str, gamma: float | None = None) -> Submodel:
        """What ``tier`` trains, or a submodel of its kind of another size."""
        return deployed_submodel(self.federation, self.spec, tier=tier, gamma=gamma)

    def by_class(self, submodel: Submodel, weights: Mapping[str, Array], number: int = FIRST_ROUND) -> Array:
        """float64 (classes,): the share of each class's test samples that ``submodel`` of ``weights`` finds; 0 for a class
        without any. A window that rolls stands as in round ``number``."""
        builder = DeploymentBuilder(
            self.spec, self.dataset, weights, samples=ROWS, federation=self.federation
        )
        right = builder.right(builder.module(submodel, number))
        hits = np.bincount(self.dataset.test_y[right], minlength=len(self._test_counts))
        return hits / np.maximum(self._test_counts, 1)

    def overall(self, by_class: Array) -> float:
        """The accuracy on the test set."""
        return float(by_class @ self._test_counts / self._test_counts.sum())

    def local(self, tier: str, by_class: Array) -> float:
        """The mean over the clients of ``tier`` of the accuracy that is expected where test samples have the client's mix of
        classes."""
        own = self._mixes[[name.rpartition("-")[0] == tier for name in device_names(self.federation)]]
        return float((own @ by_class).mean())

    @cached_property
    def _test_counts(self) -> Array:
        return np.bincount(self.dataset.test_y, minlength=self.dataset.classes)

    @cached_property
    def _mixes(self) -> Array:
        """float64 (clients, classes): each client's shares of the classes in training."""
        clients = len(device_names(self.federation))
        parts = partition(self.federation, self.dataset, clients, warn=lambda _: None)
        counts = histograms(self.dataset.train_y, parts, self.dataset.classes)
        return np.asarray(counts / counts.sum(axis=1, keepdims=True))
