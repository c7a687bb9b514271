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

from contextlib import suppress  # noqa: E402
from importlib import import_module  # noqa: E402
from typing import Any  # noqa: E402

from edgefl.system.lazy_names import lazily as _lazily  # noqa: E402

_NAMESPACES = ("algorithms", "codecs", "config", "data", "losses", "models", "optimizers", "submodels")
_EXPORTS = {
    "edgefl.api.adapt": ("adapt",),
    "edgefl.api.analysis": ("personalize",),
    "edgefl.api.bundle": ("Bundle",),
    "edgefl.api.check": ("check",),
    "edgefl.api.check_data": ("check_data",),
    "edgefl.api.compile": ("compile", "plan"),
    "edgefl.api.deploy": ("DeployOptions", "deploy"),
    "edgefl.api.device": ("Agent", "DeviceLimits", "Trust", "train_round"),
    "edgefl.api.export": ("export",),
    "edgefl.api.federation": ("Tier", "federation", "load_federation"),
    "edgefl.api.model": ("Model",),
    "edgefl.api.run": ("Run", "load_run", "run"),
    "edgefl.api.serve": ("Server",),
    "edgefl.api.simulate": ("simulate",),
    "edgefl.api.spread": ("spread",),
    "edgefl.api.statistics": ("statistics",),
    "edgefl.api.training": ("CompileOptions", "Training"),
    "edgefl.api.tune": ("tune",),
    "edgefl.facts": ("catalog=shipped",),
    "edgefl.errors": ("EdgeflError",),
    "edgefl_device.personal.personalize": ("Adaptation",),
    "edgefl_export.device": ("Device",),
}
_load_export = _lazily(__name__, _EXPORTS)
__all__ = sorted([*_NAMESPACES, *(name.partition("=")[0] for names in _EXPORTS.values() for name in names)])  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("edgefl.system.distribution").version()
    if name in _NAMESPACES:
        return import_module(f"edgefl.{name}")
    try:
        return _load_export(name)
    except AttributeError as error:
        if not name.startswith("_"):  # notebooks and inspectors ask every object for such names
            error.args = (f"{error}{_place_of(name)}",)
        raise


def _place_of(name: str) -> str:
    """Return ``; it is edgefl.algorithms.FedProx`` if a namespace has the name, or an empty text."""
    for space in _NAMESPACES:
        with suppress(ImportError):  # a device has no torch
            if name in import_module(f"edgefl.{space}").__all__:
                return f"; it is edgefl.{space}.{name}"
    return ""


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
