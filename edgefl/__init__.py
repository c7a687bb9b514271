"""Federated learning on real devices: submodels that fit, compiled with their training algorithm, over MQTT.

::

    import edgefl

    prox = edgefl.Training(algorithm=edgefl.algorithms.FedProx(mu=0.1), codec=edgefl.codecs.FedPAQ(bits=3))
    bundle = edgefl.compile("resnet8", submodel=edgefl.submodels.OutputSide(cut=4), training=prox)
    bundle.verify(), bundle.profile(), bundle.save("weak.efl")

    federation = edgefl.federation("resnet8", rounds=3, training=prox)
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

from importlib import import_module  # noqa: E402
from typing import TYPE_CHECKING, Any  # noqa: E402

from edgefl.system.lazy import lazily as _lazily  # noqa: E402

import_module("edgefl.system.silence")

if TYPE_CHECKING:
    from edgefl import algorithms, codecs, config, data, losses, models, optimizers, submodels
    from edgefl.api.adapt import adapt
    from edgefl.api.analysis import heterogeneity, personalize
    from edgefl.api.bundle import Bundle
    from edgefl.api.check import check
    from edgefl.api.check_data import check_data
    from edgefl.api.compile import compile
    from edgefl.api.deploy import DeployOptions, deploy
    from edgefl.api.device import Agent, DeviceLimits, Trust, train_round
    from edgefl.api.export import export
    from edgefl.api.federation import Tier, federation, load_federation
    from edgefl.api.model import Model
    from edgefl.api.plan import plan
    from edgefl.api.run import Run, load_run, run
    from edgefl.api.serve import Server
    from edgefl.api.simulate import simulate
    from edgefl.api.spread import spread
    from edgefl.api.training import CompileOptions, Training
    from edgefl.api.tune import tune
    from edgefl.errors import EdgeflError
    from edgefl.facts import shipped as catalog
    from edgefl_device.personal.personalize import Wanted as Adaptation
    from edgefl_export.device import Device

_SPACES = ("algorithms", "codecs", "config", "data", "losses", "models", "optimizers", "submodels")
_PLACES: dict[str, tuple[str, ...]] = {
    "edgefl.api.adapt": ("adapt",),
    "edgefl.api.analysis": (
        "heterogeneity",
        "personalize",
    ),
    "edgefl.api.bundle": ("Bundle",),
    "edgefl.api.check": ("check",),
    "edgefl.api.check_data": ("check_data",),
    "edgefl.api.compile": ("compile",),
    "edgefl.api.deploy": ("DeployOptions", "deploy"),
    "edgefl.api.device": ("Agent", "DeviceLimits", "Trust", "train_round"),
    "edgefl.api.export": ("export",),
    "edgefl.api.federation": (
        "Tier",
        "federation",
        "load_federation",
    ),
    "edgefl.api.plan": ("plan",),
    "edgefl.api.run": (
        "Run",
        "load_run",
        "run",
    ),
    "edgefl.api.serve": ("Server",),
    "edgefl.api.spread": ("spread",),
    "edgefl.api.simulate": ("simulate",),
    "edgefl.api.model": ("Model",),
    "edgefl.api.training": ("CompileOptions", "Training"),
    "edgefl.api.tune": ("tune",),
    "edgefl.facts": ("catalog=shipped",),
    "edgefl.errors": ("EdgeflError",),
    "edgefl_device.personal.personalize": ("Adaptation=Wanted",),
    "edgefl_export.device": ("Device",),
}
__all__ = [
    "Adaptation",
    "Agent",
    "Bundle",
    "CompileOptions",
    "DeployOptions",
    "Device",
    "DeviceLimits",
    "EdgeflError",
    "Model",
    "Run",
    "Server",
    "Tier",
    "Training",
    "Trust",
    "adapt",
    "algorithms",
    "catalog",
    "check",
    "check_data",
    "codecs",
    "compile",
    "config",
    "data",
    "deploy",
    "export",
    "federation",
    "heterogeneity",
    "load_federation",
    "load_run",
    "losses",
    "models",
    "optimizers",
    "personalize",
    "plan",
    "run",
    "simulate",
    "spread",
    "submodels",
    "train_round",
    "tune",
]
_named = _lazily(__name__, _PLACES)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("edgefl.system.distribution").version()
    return import_module(f"edgefl.{name}") if name in _SPACES else _named(name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
