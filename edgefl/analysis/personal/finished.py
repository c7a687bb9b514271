"""Evaluation of every device of a finished run or simulation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from edgefl.algorithms.personalize import ALPHA, STEP, add_personalize
from edgefl.analysis.personal.evaluate import AdaptableModel, User, evaluate_user
from edgefl.analysis.personal.report import EvaluationSetting, PersonalReport, UserReport, summarize
from edgefl.config import Federation, load
from edgefl.data.dataset import Dataset
from edgefl.errors import ConfigError, DataError
from edgefl.lab.run_folder import CONFIG_NAME as RUN_CONFIG
from edgefl.models.spec import ModelSpec
from edgefl.objective.objective import Objective
from edgefl.setup.data import held_out, open_data, partition
from edgefl.setup.model import federation_model
from edgefl.setup.tiers import device_names
from edgefl.setup.training import tier_of
from edgefl.simulator.folder import CONFIG_NAME as SIMULATION_CONFIG
from edgefl.simulator.folder import MODEL_NAME
from edgefl.wire import tensors
from edgefl.wire.tensors import Array, Arrays
from edgefl_device.data.arrays import archive

DEVICES = "devices"
"""Folder of a run with a subfolder per device."""

FIRST_ROUND = 1
"""Round of the evaluated window: a rolling submodel is evaluated in its first place, as it is deployed."""


@dataclass(frozen=True)
class FinishedRun:
    """Results of a finished run or simulation.

    A user is a device with the submodel of its tier. Its train shard is the device's file, or in a simulation its
    rows of the dataset. Its test shard holds rows of the test set with the same class proportions, disjoint between
    users.

    Attributes:
        folder: folder of the run.
        federation: its configuration.
        dataset: its dataset.
        weights: its final model, by global name.
    """

    folder: Path
    federation: Federation
    dataset: Dataset
    weights: Arrays

    @classmethod
    def open(cls, folder: Path, data: Path | None = None) -> FinishedRun:
        """Open the folder of a finished run.

        Args:
            folder: folder of the run or simulation.
            data: folder of the dataset's files, if they moved.

        Returns:
            The run with its model and dataset.

        Raises:
            ConfigError: if the folder holds no finished run.
        """
        config, model = _configuration(folder), folder / MODEL_NAME
        missing = [path.name for path in (config, model) if not path.is_file()]
        if missing:
            raise ConfigError(
                f"{folder} is not the folder of a finished run: it has no {' and no '.join(missing)}; give what "
                "`edgefl run --out` or `edgefl simulate --out` was given, once it is done",
                folder=str(folder),
            )
        federation = load(config, {"data.dir": str(data.resolve())} if data else {})
        return cls(folder, federation, open_data(federation), tensors.load(model.read_bytes()))

    @cached_property
    def spec(self) -> ModelSpec:
        return federation_model(self.federation, self.dataset)

    @cached_property
    def users(self) -> tuple[User, ...]:
        """Devices as users, in the order of the federation file; ``group`` is the tier."""
        names = device_names(self.federation)
        parts = partition(self.federation, self.dataset, len(names), warn=lambda _: None)
        rows = held_out(self.federation, self.dataset, parts)
        return tuple(
            self._user(number, name, parts[number], rows[number]) for number, name in enumerate(names)
        )

    def _user(self, number: int, name: str, part: Array, rows: Array) -> User:
        train, test = self._train(name, part), self.dataset.test_batch(rows)
        return User.of(
            number,
            train=(torch.from_numpy(train["x"]), self._labels(train["y"])),
            test=(torch.from_numpy(test["x"]), self._labels(test["y"])),
            name=name,
            group=tier_name(name),
            others={
                other: (torch.from_numpy(train[other]), torch.from_numpy(test[other]))
                for other in self.dataset.others
            },
        )

    def _train(self, name: str, part: Array) -> Mapping[str, Array]:
        """Return the training samples of device ``name`` as the model reads them: ``x``, ``y``, and further inputs by
        name.

        ``part``: indices of its samples in the dataset.

        Raises:
            DataError: if the file of the device has other labels than these samples.
        """
        if not (self.folder / DEVICES).is_dir():  # a simulation's clients read the dataset
            return self.dataset.train_batch(part)
        own = archive(self.folder / DEVICES / name / "data.npz")
        if not np.array_equal(np.sort(own.y), np.sort(self.dataset.train_y[part])):
            raise DataError(
                f"the data of device {name} are not those that {RUN_CONFIG} describes ({self.dataset.name}): its test "
                "shard would be of other classes. Name the folder that the run's dataset came from by `data`",
                device=name,
            )
        return {**own.others, "x": self.dataset.read(own.x), "y": own.y}

    def _labels(self, y: Array) -> torch.Tensor:
        """Return ``y`` as a tensor in the shape and dtype that the loss takes."""
        return torch.from_numpy(y.reshape(len(y), *self.spec.label.shape))

    def adapter(self, tier: str) -> AdaptableModel:
        """Return the model of a tier to adapt. An algorithm without ``personalize`` gets the plain gradient step."""
        made = tier_of(self.federation, self.spec, tier)
        algorithm, submodel = made.algorithm, made.submodel
        if algorithm.personalize is None:
            algorithm = add_personalize(algorithm, Objective.of(submodel), alpha=STEP)
        arrays = {name: array for name, array in self.weights.items() if name in self.spec.weights}
        payload = submodel.place(arrays, FIRST_ROUND).payload or arrays
        weights = {name: torch.from_numpy(array.copy()) for name, array in payload.items()}
        return AdaptableModel(algorithm, weights, [part.forward for part in made.prefix])

    @cached_property
    def adapters(self) -> Mapping[str, AdaptableModel]:
        """Model to adapt, by tier. Tiers without devices are left out."""
        return {tier: self.adapter(tier) for tier, table in self.federation.tiers.items() if table.count}

    @property
    def alpha(self) -> float:
        """Step size of the adaptation, which is the same in all tiers."""
        return next(iter(self.adapters.values())).algorithm.hyper[ALPHA]

    def report(self, setting: EvaluationSetting) -> PersonalReport:
        """Evaluate all users and return the report.

        It lists users whose samples the protocol cannot split, with the reason.
        """
        left_out: dict[str, str] = {}
        return summarize(setting, list(self._evaluate_users(setting, left_out)), left_out)

    def _evaluate_users(self, setting: EvaluationSetting, left_out: dict[str, str]) -> Iterator[UserReport]:
        for user in self.users:
            try:
                yield evaluate_user(self.adapters[user.group], user, setting)
            except DataError as error:
                left_out[user.name] = error.message


def _configuration(folder: Path) -> Path:
    """Return the path of the federation file in ``folder``: that of a simulation if it exists, else that of a run."""
    simulation = folder / SIMULATION_CONFIG
    return simulation if simulation.is_file() else folder / RUN_CONFIG


def tier_name(device: str) -> str:
    """Return the tier in a device's name of the form ``tier-number``, as ``edgefl run`` makes them."""
    return device.rpartition("-")[0]
