"""Export of a trained model to one file for inference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from edgefl.api.federation import federation_of
from edgefl.api.progress import reporting
from edgefl.api.training import checked_argument
from edgefl.config import Federation, without_devices
from edgefl.contract.choice import SubmodelChoice
from edgefl.errors import ConfigError
from edgefl.lab.deployment import BnEval, Deployment, DeploymentBuilder, deployed_submodel
from edgefl.lab.facts import WeightsOrigin
from edgefl.lab.run_folder import (
    CONFIG_NAME,
    MODEL_NAME,
    SIMULATION_CONFIG,
    MeasuredStatistics,
    last_round,
    measured_statistics,
    round_of,
    weights_of,
)
from edgefl.models.spec import ModelSpec
from edgefl.setup.data import open_data
from edgefl.setup.evaluation import STATISTICS_ROWS
from edgefl.submodels.compaction.compact import compact as without_zeros
from edgefl.wire.tensors import Arrays
from edgefl_device.round.offline import read_weights
from edgefl_export.deploy.target import Backend, DeployTarget, Format, Quantize

if TYPE_CHECKING:  # they load the server
    from edgefl.api.run import Run
    from edgefl.api.simulate import Simulation


@dataclass(frozen=True, kw_only=True)
class DeployOptions:
    """Options of a model file for inference.

    Attributes:
        format: ``onnx``, ``executorch`` (a .pte file), or ``safetensors`` with a loader for torch.
        batch: Samples of one call.
        dynamic_batch: Accept any number of samples in one call.
        quantize: ``int8``, calibrated on the server's rows, ``float16``, or ``none``.
        opset: Opset of an ONNX file; None for 18, which ONNX Runtime 1.14 loads.
        backend: Kernels of a .pte file: ``xnnpack``, with portable ones for the rest, or ``portable``.
        preprocessing: Put the preprocessing of samples into the file, as far as its operators allow.
        compact: Remove the channels that the submodel sets to zero; the outputs stay the same.
    """

    format: Format = "onnx"
    batch: int = 1
    dynamic_batch: bool = False
    quantize: Quantize = "none"
    opset: int | None = None
    backend: Backend = "xnnpack"
    preprocessing: bool = False
    compact: bool = False


def deploy(
    source: Run | Simulation | str | Path,
    submodel: SubmodelChoice | None = None,
    *,
    tier: str | None = None,
    gamma: float | None = None,
    federation: Federation | str | Path | None = None,
    data: str | Path | None = None,
    bn_eval: BnEval = "frozen",
    samples: int = STATISTICS_ROWS,
    options: DeployOptions = DeployOptions(),
) -> Deployment:
    """Cut a submodel out of a trained model and return it as a file for inference: samples in, logits out.

    ``save`` of the result writes the file. Any size is possible, also one that was not trained. The file is loaded by
    its stock runtime and compared with torch on test samples. Its ``facts`` describe its inputs and its accuracy,
    measured from the file, beside that of the whole model.

    Args:
        source: a run or simulation, its folder, or a file of weights (``model.safetensors``, a checkpoint).
        submodel: of any size; by default the whole model. Omitted options are taken from the tiers of its kind.
        tier: name of a tier whose submodel is cut, instead of ``submodel``.
        gamma: share of the parameters, instead of the tier's. A ``submodel`` must not have another one.
        federation: federation of the weights; by default that of the run or simulation.
        data: folder with the dataset's standard files; by default as the federation says.
        bn_eval: statistics of batch norm: ``frozen``, those that devices measured for this submodel in an evaluation
            of the model; or else estimated from training samples, or from test samples if there are none. For
            comparison ``batch`` uses those of each batch, ``moving`` the moving averages.
        samples: maximum number of samples for the statistics; 0: all.
        options: format and contents of the file.

    Raises:
        ConfigError: the arguments contradict each other, or a package is missing.
        DataError: statistics or int8 need samples, and the server has none.
        ModelError: the weights are of another model.
        ExportError: the file does not agree with torch.
    """
    checked_argument("options", DeployOptions, options)
    wishes = {
        field.name: getattr(options, field.name) for field in fields(options) if field.name != "compact"
    }
    target = DeployTarget(**wishes)
    own = dict(submodel.options) if submodel else {}
    if gamma is not None and own.get("gamma", gamma) != gamma:
        raise ConfigError(f"`gamma` is {gamma:g}, and {submodel!r} has another; leave one out", gamma=gamma)
    size = own.pop("gamma", gamma)
    kind = (submodel.name or None) if submodel else None
    with reporting("reading weights and data") as report:
        weights, measured, settings, origin = _open(source, federation, data)
        dataset = open_data(settings)
        builder = DeploymentBuilder.of(
            settings,
            dataset,
            weights,
            bn_eval=bn_eval,
            batch=options.batch,
            samples=samples,
            measured=measured,
        )
        spec = builder.spec
        report("cutting the model")
        cut = deployed_submodel(
            settings, spec, tier=tier, kind=kind, gamma=size, options=own, weights=weights
        )
        report("exporting the file and evaluating it")
        return builder.deployment(
            cut,
            _smaller(spec) if options.compact else lambda module: module,
            target=target,
            origin=replace(origin, tier=tier or ""),
        )


def _open(
    source: Run | Simulation | str | Path, federation: Federation | str | Path | None, data: str | Path | None
) -> tuple[Arrays, MeasuredStatistics | None, Federation, WeightsOrigin]:
    """Return (weights, statistics of devices, federation, origin) for the argument ``source`` of :func:`deploy`.

    Weights are float arrays by global name, without those that only the server uses. The federation is the argument, or
    else that in the folder of the weights.

    Raises:
        ConfigError: no federation is given or found.
    """
    place = Path(source) if isinstance(source, str | Path) else source.folder
    file = weights_of(place) if place.is_dir() else place
    # What the server keeps beside the model has a slash in its name. Checkpoints have a folder of their own.
    weights = {name: array for name, array in read_weights(file).items() if "/" not in name}
    folders = list(file.resolve().parents)[:2]
    if federation is None:
        configs = (folder / name for folder in folders for name in (CONFIG_NAME, SIMULATION_CONFIG))
        federation = next((each for each in configs if each.is_file()), None)
        if federation is None:
            raise ConfigError(
                f"expected {CONFIG_NAME} of a run or {SIMULATION_CONFIG} of a simulation in the folder of {source}, found "
                "neither; name the federation that the model was trained with (`federation`)",
                weights=str(source),
            )
    settings = without_devices(federation_of(federation, data=data))
    measured = measured_statistics(file, settings)
    return weights, measured, settings, _origin(settings.federation.name, folders, file)


def _origin(name: str, folders: list[Path], file: Path) -> WeightsOrigin:
    """Return the origin of the weights in ``file``: federation, folder of the run or simulation, and round.

    It is the first of ``folders`` that contains a run or simulation. If there is none, only the federation's ``name``
    is known.
    """
    configs = (CONFIG_NAME, SIMULATION_CONFIG)
    folder = next((each for each in folders if any((each / config).is_file() for config in configs)), None)
    if folder is None:
        return WeightsOrigin(federation=name)
    number = last_round(folder) if file.name == MODEL_NAME else round_of(file)
    return WeightsOrigin(federation=name, run=folder.name, round=number)


def _smaller(spec: ModelSpec) -> Callable[[nn.Sequential], nn.Sequential]:
    """Return a function that returns a module like its argument, without the channels whose weights are zero."""

    def smaller(module: nn.Sequential) -> nn.Sequential:
        weights = {name: tensor.numpy() for name, tensor in module.state_dict().items()}
        return without_zeros(replace(spec, module=module), weights, {}).spec.module

    return smaller
