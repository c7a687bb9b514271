"""Rounds of the C++ agent's tool beside the same rounds of the Python agent."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edgefl.wire import tensors
from edgefl.wire.bundle.archive import BundleArchive, write_bundle
from edgefl.wire.bundle.manifest import Manifest
from edgefl.wire.tensors import Array, Arrays
from edgefl_device.config import Policy
from edgefl_device.data.samples import LabelSpec
from edgefl_device.data.sources import load
from edgefl_device.engine import open_engine
from edgefl_device.round.offline import train_round
from tests.agents.cpp.build import program
from tests.support.commands import run_command

SEED = 7
STOPPED = 9


@dataclass(frozen=True)
class Told:
    """How a run of the tool ended. ``facts``: what it printed."""

    code: int
    facts: dict[str, Any]
    error: str
    update: bytes = b""
    carry: bytes = b""


@dataclass(frozen=True)
class Place:
    """A folder with a bundle, weights and data in it, as a device would have them."""

    folder: Path
    bundle: BundleArchive
    weights: Arrays
    data: Path

    @classmethod
    def of(cls, folder: Path, bundle: BundleArchive, weights: Mapping[str, Array], data: Path) -> Place:
        write_bundle(bundle, folder / "bundle.zip")
        masks = {p.label: p.mask for g in bundle.manifest.of_round for p in g.inputs_of("weights") if p.mask}
        (folder / "weights").write_bytes(tensors.dump(weights, masks))
        (folder / "work").mkdir(exist_ok=True)
        return cls(folder, bundle, dict(weights), data)

    def in_cpp(self, *more: object, carry: bytes = b"") -> Told:
        out, kept, before = (self.folder / name for name in ("out", "kept", "before"))
        for made in (out, kept):
            made.unlink(missing_ok=True)
        words: list[object] = [
            program("tools/edgefl-round"),
            "--bundle",
            self.folder / "bundle.zip",
            "--data",
            self.data,
        ]
        words += ["--weights", self.folder / "weights", "--seed", SEED, "--folder", self.folder / "work"]
        words += ["--out", out, "--carry-out", kept, *more]
        if carry:
            before.write_bytes(carry)
            words += ["--carry", before]
        done = run_command(*words, timeout=60)
        if done.returncode:
            return Told(done.returncode, {}, done.stderr)
        return Told(0, json.loads(done.stdout), done.stderr, out.read_bytes(), kept.read_bytes())

    def in_python(
        self,
        *,
        carry: bytes = b"",
        hyper: Mapping[str, float] | None = None,
        samples: int = 0,
        policy: Policy = "refuse",
    ) -> Told:
        result = train_round(
            self.bundle,
            self.weights,
            load(self.data, policy),
            open_engine(self.bundle.manifest.format),
            seed=SEED,
            carry=tensors.load(carry) if carry else None,
            hyper=hyper,
            samples=samples,
        )
        facts = {"metrics": result.metrics, "samples": result.samples}
        return Told(0, facts, "", tensors.dump(result.update, result.masks), tensors.dump(result.carry))


def assert_same(cpp: Told, python: Told) -> None:
    """The same bits, metrics and rows."""
    assert cpp.code == 0, cpp.error
    assert {name: cpp.facts[name] for name in python.facts} == python.facts
    assert (cpp.update, cpp.carry) == (python.update, python.carry)


def random_weights(manifest: Manifest) -> Arrays:
    """Something for every tensor that a round reads: what a server keeps beside the model is not below zero."""
    rng = np.random.default_rng(1)
    made: Arrays = {}
    for port in (port for graph in manifest.of_round for port in graph.inputs_of("weights")):
        drawn = 0.1 * rng.standard_normal(port.shape)
        positive = "/" in port.label or port.label.endswith("var")
        made.setdefault(port.label, np.asarray(np.abs(drawn) + 0.01 if positive else drawn, port.dtype))
    return made


def random_data(manifest: Manifest, path: Path, rows: int = 21) -> Path:
    """An npz with samples as the manifest wants them."""
    rng, data, label = np.random.default_rng(2), manifest.data, LabelSpec.of(manifest)
    shape = (rows, *data.shape)
    x: Array = (
        rng.standard_normal(shape, np.float32) if not data.below else rng.integers(0, data.below, shape)
    )
    if data.below and len(data.shape) == 1:
        x[:, 1:][np.arange(1, data.shape[0]) >= rng.integers(1, data.shape[0], (rows, 1))] = (
            0  # of many lengths
        )
    arrays: dict[str, Any] = {
        each.name: rng.integers(0, each.below or 2, (rows, *each.shape)) for each in data.others
    }
    np.savez(path, **arrays, x=x, y=rng.integers(0, data.classes, (rows, *label.shape)))
    return path
