"""Compiler of the kit's bundles for both engines: ``python -m edgefl_conformance.material.make``. Needs torch.

The package contains the bundles, so that the kit itself needs neither torch nor a compiler. Data of profiles is left out.
"""

from __future__ import annotations

import sys
from typing import Any, get_args

import msgspec

from edgefl.algorithms.catalog import FAFED, SGD, TCBGD, FedBAT, MimeLite, PerFedAvg, Scaffold
from edgefl.api.compile import compile
from edgefl.api.model import Model
from edgefl.api.training import CompileOptions, Target, Training
from edgefl.codecs.catalog import FedPAQ, TopK
from edgefl.submodels.catalog import Importance, OutputSide
from edgefl.wire.bundle.archive import BundleArchive, write_bundle
from edgefl_conformance.material.bundles import FOLDER, SCALE, SHIFT

_SMALL = {"size": 4, "classes": 3, "hidden": [12, 8]}
_BIG = {"size": 4, "classes": 3, "hidden": [1024, 128]}
_BATCH: dict[str, Any] = {"batch": 8, "steps": 6}

RECIPES: dict[str, dict[str, Any]] = {
    "plain": {"training": Training(algorithm=SGD(momentum=0.5, **_BATCH))},
    "coded": {"training": Training(algorithm=SGD(**_BATCH), codec=FedPAQ(bits=4))},
    "onebit": {"training": Training(algorithm=SGD(**_BATCH), codec=FedBAT())},
    "passes": {"training": Training(algorithm=MimeLite(**_BATCH))},
    "inner": {"training": Training(algorithm=PerFedAvg(**_BATCH))},
    "carried": {"training": Training(algorithm=Scaffold(**_BATCH))},
    "opening": {"training": Training(algorithm=FAFED(**_BATCH)), "exchange": "opening"},
    "exchange": {"training": Training(algorithm=FAFED(**_BATCH))},
    "tier": {"training": Training(algorithm=SGD(**_BATCH)), "submodel": OutputSide(cut=2), "tier": "weak"},
    "sparse": {"training": Training(algorithm=SGD(**_BATCH), codec=TopK(share=0.1, feedback=True))},
    "masked": {"training": Training(algorithm=TCBGD(**_BATCH)), "submodel": Importance(gamma=0.1)},
    "big": {"training": Training(algorithm=SGD(batch=8, steps=2)), "model": Model("mlp", options=_BIG)},
}
"""Arguments of :func:`edgefl.compile` by bundle."""


def made(name: str, target: Target) -> BundleArchive:
    """Compile the bundle ``name`` for ``target``. Its samples are bytes that the device converts to floats."""
    compiled = compile(
        **{"model": Model("mlp", options=_SMALL), **RECIPES[name]}, options=CompileOptions(target=target)
    ).contents
    manifest = compiled.manifest
    data = msgspec.structs.replace(manifest.data, scale=SCALE, shift=SHIFT)
    graphs = tuple(msgspec.structs.replace(graph, variants=()) for graph in manifest.graphs)
    lean = msgspec.structs.replace(manifest, data=data, graphs=graphs, sources=None)
    return BundleArchive(lean, {ref.sha256: compiled.blobs[ref.sha256] for ref in lean.blobs})


def main() -> None:
    for target in get_args(Target):
        for name in RECIPES:
            path = FOLDER / target / f"{name}.efl"
            write_bundle(made(name, target), path)
            sys.stdout.write(f"{path.name}, {target}: {path.stat().st_size} bytes\n")


if __name__ == "__main__":
    main()
