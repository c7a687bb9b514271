"""Comparison of what the board computes with what this machine computes, item by item of docs/arm64.md."""

from __future__ import annotations

import csv
import json
import shutil
import sys
import wave
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from safetensors.numpy import load_file

from edgefl_conformance.material.bundles import FORMATS
from tools.board import values
from tools.board.root import BoardError, BoardRoot, run

ABSOLUTE, RELATIVE, CODES = 1e-5, 1e-4, 0.02
"""Tolerance of a float, and share of the bytes of codes that may differ, as in the conformance kit."""
MODEL = """
[model]
name = "resnet8"
[algorithm]
batch = 4
steps = 3
[codec]
name = "fedbat"
[data]
name = "digits"
[tiers.strong]
"""


@dataclass(frozen=True)
class EqualityItem:
    """Files of :mod:`tools.board.values` that one row of docs/arm64.md is about."""

    name: str
    exact: bool
    files: str


ITEMS = (
    EqualityItem("protocol", True, "bits/protocol-*"),
    EqualityItem("random numbers", True, "bits/random-*"),
    EqualityItem("data", True, "bits/data-*"),
    EqualityItem("codecs", True, "bits/codecs-*"),
    EqualityItem("sums", True, "bits/sums-*"),
    EqualityItem("graphs", False, "floats/graph-*"),
    EqualityItem("rounds", False, "floats/round-*"),
    EqualityItem("models", False, "floats/model-*"),
)


def compare_values(root: BoardRoot, folder: Path) -> list[dict[str, Any]]:
    """Compute the values on the board and here, and compare them.

    Args:
        root: The board, with edgefl and the conformance kit.
        folder: New folder below the one that the board shares.

    Returns:
        Row of each item: name, expected equality, number of files, number of arrays with equal bits, and the
        worst difference, relative to magnitudes above 1.

    Raises:
        BoardError: Values differ by more than the item permits; with all of them.
    """
    inputs = folder / "inputs"
    write_inputs(inputs)
    program = folder / "values.py"
    shutil.copy(Path(values.__file__), program)
    run([sys.executable, program, folder / "here", inputs])
    root.run(root.PYTHON, program, folder / "board", inputs)
    machines = [
        json.loads((folder / name / "facts.json").read_text())["machine"] for name in ("board", "here")
    ]
    if machines[0] == machines[1]:
        raise BoardError(f"expected values of two kinds of processors, found {machines[0]} twice")
    rows, problems = [], list[str]()
    for item in ITEMS:
        row, wrong = compare_item(item, folder / "board", folder / "here")
        rows.append(row)
        problems += wrong
    if problems:
        raise BoardError("\n".join(problems))
    return rows


def compare_item(item: EqualityItem, found: Path, expected: Path) -> tuple[dict[str, Any], list[str]]:
    """Compare the files of an item in two folders. Return its row and what differs too much."""
    names = sorted(str(path.relative_to(expected)) for path in expected.glob(item.files))
    problems = [f"{item.name}: no values"] * (not names)
    arrays, equal, worst = 0, 0, 0.0
    for name in names:
        mine, theirs = _read(found / name), _read(expected / name)
        if mine.keys() != theirs.keys():
            problems.append(f"{item.name}: {name} holds {sorted(mine)} on the board, {sorted(theirs)} here")
        for key in mine.keys() & theirs.keys():
            arrays += 1
            same = mine[key].dtype == theirs[key].dtype and mine[key].tobytes() == theirs[key].tobytes()
            equal += same
            text, difference = ("", 0.0) if same else _difference(mine[key], theirs[key], item.exact)
            worst = max(worst, difference)
            problems += [f"{item.name}: {key} of {name}: {text}"] if text else []
    row = {
        "item": item.name,
        "exact": item.exact,
        "files": len(names),
        "arrays": arrays,
        "equal": equal,
        "worst": worst,
    }
    return row, problems


def _read(path: Path) -> Mapping[str, Any]:
    if not path.exists():
        return {}
    if path.suffix == ".safetensors":
        return load_file(path)
    return {"bytes": np.frombuffer(path.read_bytes(), np.uint8)}


def _difference(mine: Any, theirs: Any, exact: bool) -> tuple[str, float]:
    """Return what is wrong with ``mine``, or "", and the largest difference of a float, of its magnitude if above 1."""
    if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
        return f"{mine.dtype} {mine.shape}, expected {theirs.dtype} {theirs.shape}", 0.0
    if mine.dtype.kind != "f":
        share = float((mine != theirs).mean())
        few = mine.dtype == np.uint8 and (mine != theirs).sum() <= max(1, CODES * mine.size)
        return ("" if few and not exact else f"{share:.2%} of its entries differ"), 0.0
    away = np.abs(mine.astype(np.float64) - theirs.astype(np.float64))
    worst = float(np.nan_to_num(away / np.maximum(1, np.abs(theirs)), nan=np.inf).max())
    near = bool((away <= ABSOLUTE + RELATIVE * np.abs(theirs)).all())
    return ("" if near and not exact else f"it differs by up to {worst:.3g}"), worst


def write_inputs(folder: Path) -> None:
    """Write files of samples of each kind, and bundles of a convolutional network in both formats."""
    for place, text in enumerate(("png", "jpg", "png")):
        label = folder / "images" / str(place)
        label.mkdir(parents=True)
        for number in range(3):
            pixels = values.drawn(f"{place}{number}", (20 + number, 15, 3), "float32") * 255
            Image.fromarray(pixels.astype(np.uint8)).save(label / f"{number}.{text}")
        sounds = folder / "sounds" / str(place)
        sounds.mkdir(parents=True)
        with wave.open(str(sounds / "a.wav"), "wb") as file:
            file.setnchannels(2)
            file.setsampwidth(2)
            file.setframerate(8000)
            file.writeframes(
                ((values.drawn(f"wave{place}", (2 * 50,), "float32") - 0.5) * 60000).astype("<i2").tobytes()
            )
        texts = folder / "texts" / str(place)
        texts.mkdir(parents=True)
        (texts / "a.txt").write_text("Größe: 東京 " * (place + 1))
    for name in ("table", "series"):
        (folder / name).mkdir()
        with (folder / name / "rows.csv").open("w", newline="") as output:
            writer = csv.writer(output)
            writer.writerow(("a", "b", "c"))
            numbers = values.drawn(name, (12, 2), "float32").astype(np.float64) * np.pi
            writer.writerows((repr(float(a)), f"{b:.3e}", place // 4) for place, (a, b) in enumerate(numbers))
    config = folder / "model.toml"
    config.write_text(MODEL)
    formats = [word for name in FORMATS for word in ("--format", name)]
    run([sys.executable, "-m", "edgefl", "export", config, "--out", folder / "bundles", *formats])
    for bundle in (folder / "bundles").rglob("*.efl"):
        shutil.copy(bundle, folder / f"resnet8-{bundle.name}")
