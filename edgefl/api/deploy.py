"""From a trained model to one ONNX file for inference."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from device_runtime.round.offline import read_weights
from edgefl.api.run import Run, load_run
from edgefl.api.simulate import Simulation
from edgefl.config import Federation, load, without_devices
from edgefl.contract.choice import SubmodelChoice
from edgefl.lab.deployment import BnEval, Deployment, Workshop, chosen
from edgefl.lab.written import CONFIG_NAME
from edgefl.models.spec import ModelSpec
from edgefl.setup.data import open_data
from edgefl.setup.evaluation import STATISTICS_ROWS
from edgefl.simulator.folder import CONFIG_NAME as SIMULATION_CONFIG
from edgefl.submodels.compaction.compact import compact as without_zeros
from edgefl.wire.errors import ConfigError
from edgefl.wire.tensors import Arrays


def deploy(
    source: Run | Simulation | str | Path,
    submodel: SubmodelChoice | None = None,
    *,
    tier: str | None = None,
    gamma: float | None = None,
    options: Mapping[str, Any] | None = None,
    federation: Federation | str | Path | None = None,
    data: str | Path | None = None,
    bn_eval: BnEval = "frozen",
    batch: int = 1,
    samples: int = STATISTICS_ROWS,
    compact: bool = False,
) -> Deployment:
    """Cut a submodel out of a trained model, as one ONNX file: weights inside, samples in, logits out. Its ``save`` writes
    it.

    The size need not have been trained. The file is compared with torch on test samples; its ``facts`` say what it is, how
    to feed it, and its accuracy beside the whole model's.

    Args:
        source: a run or simulation, its folder, or a file of weights (``model.safetensors``, a checkpoint).
        submodel: of any size; by default the whole model. Options that are left out are those of the tiers of its kind.
        tier: cut as this tier is, in place of ``submodel``.
        gamma: another size of the tier.
        options: other options of the tier's kind.
        federation: what the weights were trained with; by default that of the run or simulation.
        data: folder with the dataset's standard files; by default as the federation says.
        bn_eval: statistics of batch norm: ``frozen``, estimated for this submodel from training samples, or from test
            samples without any; for comparison those of each ``batch``, or the ``moving`` ones.
        batch: samples that go through at a time.
        samples: most samples for the statistics; 0: all.
        compact: without the channels that the cut has emptied; computes the same.

    Raises:
        ConfigError: where these do not go together.
        ModelError: if the weights are not the model's.
        ExportError: if the file does not agree with torch.
    """
    weights, settings = _opened(source, federation, data)
    dataset = open_data(settings)
    workshop = Workshop.of(settings, dataset, weights, bn_eval=bn_eval, batch=batch, samples=samples)
    spec = workshop.spec
    own = {**(submodel.options if submodel else {}), **(options or {})}
    if gamma is not None and own.get("gamma", gamma) != gamma:
        raise ConfigError(f"`gamma` is {gamma:g}, and {submodel!r} has another; leave one out", gamma=gamma)
    size = own.pop("gamma", gamma)
    kind = submodel.name if submodel else None
    cut = chosen(settings, spec, tier=tier, kind=kind, gamma=size, options=own, weights=weights)
    return workshop.deployment(cut, _smaller(spec) if compact else lambda module: module)


def _opened(
    source: Run | Simulation | str | Path, federation: Federation | str | Path | None, data: str | Path | None
) -> tuple[Arrays, Federation]:
    """The weights, and the federation that they were trained in."""
    place = source if isinstance(source, Run | Simulation) else Path(source)
    given = {"data.dir": str(Path(data).resolve())} if data else {}
    if isinstance(place, Path) and not place.is_dir():
        weights, folders = (
            read_weights(place),
            list(place.resolve().parents)[:2],
        )  # checkpoints have a folder of their own
    else:
        trained = _trained(place) if isinstance(place, Path) else place
        weights, folders = trained.model, [trained.folder]
    if isinstance(federation, Federation):
        table = federation.data.model_copy(update={"dir": given["data.dir"]} if given else {})
        return weights, without_devices(federation.model_copy(update={"data": table}))
    configs = (folder / name for folder in folders for name in (CONFIG_NAME, SIMULATION_CONFIG))
    path = Path(federation) if federation else next((each for each in configs if each.is_file()), None)
    if path is None:
        raise ConfigError(
            f"expected {CONFIG_NAME} of a run or {SIMULATION_CONFIG} of a simulation in the folder of {source}, found "
            "neither; name the federation that the model was trained with (`federation`)",
            weights=str(source),
        )
    return weights, without_devices(load(path, given))


def _trained(folder: Path) -> Run | Simulation:
    simulated = (folder / SIMULATION_CONFIG).is_file() and not (folder / CONFIG_NAME).is_file()
    return Simulation(folder) if simulated else load_run(folder)


def _smaller(spec: ModelSpec) -> Callable[[nn.Sequential], nn.Sequential]:
    """A module whose zeros are its mask, made smaller."""

    def smaller(module: nn.Sequential) -> nn.Sequential:
        weights = {name: tensor.numpy() for name, tensor in module.state_dict().items()}
        return without_zeros(replace(spec, module=module), weights, {}).spec.module

    return smaller
