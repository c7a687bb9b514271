"""Federated learning on real devices: submodels that fit, compiled with their training algorithm, over MQTT.

::

    import edgefl

    bundle = edgefl.compile("resnet8", submodel=edgefl.OutputSide(cut=4), algorithm=edgefl.FedProx(mu=0.1))
    bundle.verify(), bundle.profile(), bundle.save("weak.efl")

    federation = edgefl.federation("resnet8", rounds=3, codec=edgefl.FedPAQ(bits=3))
    run = edgefl.run(federation, out="runs/first")
    run.curves["accuracy"]

Names are loaded when they are first used: a device's half needs no torch.
"""

from __future__ import annotations

import os
import sys

# `python -m edgefl` puts the working folder first: a user's random.py there would replace Python's.
if sys.argv[:1] == ["-m"] and not sys.flags.safe_path and sys.path[0] != os.path.dirname(__path__[0]):
    del sys.path[0]

from edgefl.system import search_path as _search_path

_search_path.prefer_installed_modules()

import importlib  # noqa: E402
from typing import TYPE_CHECKING, Any  # noqa: E402

importlib.import_module("edgefl.system.silence")

if TYPE_CHECKING:
    from edgefl.analysis.replay import replay
    from edgefl.api.adapt import adapt
    from edgefl.api.analysis import heterogeneity, personalize
    from edgefl.api.bundle import Bundle
    from edgefl.api.check import Verdict, check
    from edgefl.api.check_data import check_data
    from edgefl.api.choices import (
        CTC,
        FAFED,
        SGD,
        STEM,
        SWAT,
        TCBGD,
        AbsoluteError,
        AdamW,
        BFloat16,
        BiFL,
        BiFLFull,
        Binary,
        BinaryCrossEntropy,
        CausalLM,
        CrossEntropy,
        Dense,
        EarlyExit,
        EFSignSGD,
        FedAdagrad,
        FedAdam,
        FedAMS,
        FedAvg,
        FedAvgMatched,
        FedAvgUpdate,
        FedBAT,
        FedPAQ,
        FedProx,
        FedYogi,
        Float16,
        Huber,
        Importance,
        ImportanceStructured,
        InfoNCE,
        Int8,
        LocalAMSGrad,
        LocalOnly,
        MimeAdam,
        MimeLite,
        ModelLoss,
        MultiExit,
        NaiveAdaptive,
        NoisySignSGD,
        NTXent,
        OutputSide,
        PerFedAvg,
        Quantile,
        Scaffold,
        ScaledSign,
        SequenceCrossEntropy,
        ServerMomentum,
        SignSGD,
        SquaredError,
        StocSignSGD,
        TopK,
        Width,
        ZeroFL,
        own_algorithm,
    )
    from edgefl.api.compile import compile
    from edgefl.api.deploy import deploy
    from edgefl.api.device import Agent, train_round
    from edgefl.api.export import export
    from edgefl.api.federation import Tier, demo_federation, federation, load_federation
    from edgefl.api.plan import plan
    from edgefl.api.run import Run, load_run, prepare, run
    from edgefl.api.serve import Server
    from edgefl.api.simulate import Simulation, prepare_simulation, simulate
    from edgefl.api.spread import spread
    from edgefl.api.tune import tune
    from edgefl.config import DataTable as Data
    from edgefl.config import Federation
    from edgefl.config.broker import BrokerTable as Broker
    from edgefl.config.reading import checked as validate
    from edgefl.config.rounds import AggregateTable as Aggregate
    from edgefl.config.rounds import DownlinkTable as Downlink
    from edgefl.config.rounds import RoundTable as Round
    from edgefl.config.selection import SelectionTable as Selection
    from edgefl.config.tables import ExportTable as Formats
    from edgefl.contract.tensors import TensorSpec
    from edgefl.data.dataset import Dataset, OtherInput
    from edgefl.facts import shipped as catalog
    from edgefl.models.layers.log_mel import LogMel
    from edgefl.models.losses.own import own_loss
    from edgefl.models.spec import ModelSpec
    from edgefl.models.split import split
    from edgefl.setup.updates import update_sizes
    from edgefl.wire.errors import EdgeflError
    from edgefl_device.engine.executorch.build import build_engine
    from edgefl_device.personal.personalize import Wanted as Adaptation
    from edgefl_device.round.runner import RoundResult
    from edgefl_export.device import Device
    from edgefl_export.front.cache import BundleCache
    from edgefl_server.broker import mosquitto_command
    from edgefl_server.embedded_broker import run_amqtt as serve_broker

_PLACES: dict[str, tuple[str, ...]] = {
    "edgefl.api.adapt": ("adapt",),
    "edgefl.api.analysis": ("heterogeneity", "personalize"),
    "edgefl.api.bundle": ("Bundle",),
    "edgefl.api.check": ("Verdict", "check"),
    "edgefl.api.check_data": ("check_data",),
    "edgefl.api.compile": ("compile",),
    "edgefl.api.deploy": ("deploy",),
    "edgefl.api.device": ("Agent", "train_round"),
    "edgefl.api.export": ("export",),
    "edgefl.api.federation": ("Tier", "demo_federation", "federation", "load_federation"),
    "edgefl.api.plan": ("plan",),
    "edgefl.analysis.replay": ("replay",),
    "edgefl.api.run": ("Run", "load_run", "prepare", "run"),
    "edgefl.api.serve": ("Server",),
    "edgefl.api.spread": ("spread",),
    "edgefl.api.simulate": ("Simulation", "prepare_simulation", "simulate"),
    "edgefl.api.tune": ("tune",),
    "edgefl.config": ("Federation",),
    "edgefl.contract.tensors": ("TensorSpec",),
    "edgefl.data.dataset": ("Dataset", "OtherInput"),
    "edgefl.models.losses.own": ("own_loss",),
    "edgefl.models.layers.log_mel": ("LogMel",),
    "edgefl.models.spec": ("ModelSpec",),
    "edgefl.models.split": ("split",),
    "edgefl.setup.updates": ("update_sizes",),
    "edgefl.wire.errors": ("EdgeflError",),
    "edgefl_export.device": ("Device",),
    "edgefl_export.front.cache": ("BundleCache",),
    "edgefl_device.round.runner": ("RoundResult",),
    "edgefl_server.broker": ("mosquitto_command",),
}
# Names that say less, or something else, where they stand.
_RENAMED = {
    "Aggregate": "edgefl.config.rounds:AggregateTable",
    "Broker": "edgefl.config.broker:BrokerTable",
    "Data": "edgefl.config.tables:DataTable",
    "Downlink": "edgefl.config.rounds:DownlinkTable",
    "Selection": "edgefl.config.selection:SelectionTable",
    "Formats": "edgefl.config.tables:ExportTable",
    "Round": "edgefl.config.rounds:RoundTable",
    "Adaptation": "edgefl_device.personal.personalize:Wanted",
    "build_engine": "edgefl_device.engine.executorch.build:build_engine",
    "catalog": "edgefl.facts:shipped",
    "serve_broker": "edgefl_server.embedded_broker:run_amqtt",
    "validate": "edgefl.config.reading:checked",
}
__all__ = [
    "CTC",
    "FAFED",
    "SGD",
    "STEM",
    "SWAT",
    "TCBGD",
    "AbsoluteError",
    "AdamW",
    "Adaptation",
    "Agent",
    "Aggregate",
    "BFloat16",
    "BiFL",
    "BiFLFull",
    "Binary",
    "BinaryCrossEntropy",
    "Broker",
    "Bundle",
    "BundleCache",
    "CausalLM",
    "CrossEntropy",
    "Data",
    "Dataset",
    "Dense",
    "Device",
    "Downlink",
    "EFSignSGD",
    "EarlyExit",
    "EdgeflError",
    "FedAMS",
    "FedAdagrad",
    "FedAdam",
    "FedAvg",
    "FedAvgMatched",
    "FedAvgUpdate",
    "FedBAT",
    "FedPAQ",
    "FedProx",
    "FedYogi",
    "Federation",
    "Float16",
    "Formats",
    "Huber",
    "Importance",
    "ImportanceStructured",
    "InfoNCE",
    "Int8",
    "LocalAMSGrad",
    "LocalOnly",
    "LogMel",
    "MimeAdam",
    "MimeLite",
    "ModelLoss",
    "ModelSpec",
    "MultiExit",
    "NTXent",
    "NaiveAdaptive",
    "NoisySignSGD",
    "OtherInput",
    "OutputSide",
    "PerFedAvg",
    "Quantile",
    "Round",
    "RoundResult",
    "Run",
    "Scaffold",
    "ScaledSign",
    "Selection",
    "SequenceCrossEntropy",
    "Server",
    "ServerMomentum",
    "SignSGD",
    "Simulation",
    "SquaredError",
    "StocSignSGD",
    "TensorSpec",
    "Tier",
    "TopK",
    "Verdict",
    "Width",
    "ZeroFL",
    "adapt",
    "build_engine",
    "catalog",
    "check",
    "check_data",
    "compile",
    "demo_federation",
    "deploy",
    "export",
    "federation",
    "heterogeneity",
    "load_federation",
    "load_run",
    "mosquitto_command",
    "own_algorithm",
    "own_loss",
    "personalize",
    "plan",
    "prepare",
    "prepare_simulation",
    "replay",
    "run",
    "serve_broker",
    "simulate",
    "split",
    "spread",
    "train_round",
    "tune",
    "update_sizes",
    "validate",
]
_FROM = dict.fromkeys(__all__, "edgefl.api.choices:")
_FROM |= {name: f"{place}:" for place, names in _PLACES.items() for name in names} | _RENAMED


def __getattr__(name: str) -> Any:
    if name == "__version__":
        value: Any = importlib.import_module("edgefl.system.distribution").version()
    elif name in _FROM:
        module, _, attribute = _FROM[name].partition(":")
        value = getattr(importlib.import_module(module), attribute or name)
    else:
        raise AttributeError(
            f"module 'edgefl' has no attribute {name!r}", name=name, obj=sys.modules[__name__]
        )
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
