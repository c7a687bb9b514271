"""Writer of the folder of `edgefl-conformance vectors`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from edgefl.system.files import write_text, write_whole
from edgefl.wire import tensors
from edgefl.wire.bundle.archive import write_bundle
from edgefl.wire.tensors import Arrays
from edgefl_conformance.material.bundles import MASKS, Material, material, samples
from edgefl_conformance.material.compare import TOLERANCES, expected
from edgefl_conformance.vectors.blobs import blob_vectors
from edgefl_conformance.vectors.draws import draw_vectors, whole
from edgefl_conformance.vectors.signatures import signature_vectors
from edgefl_device.round.trainer import RoundResult


@dataclass(frozen=True)
class RoundVector:
    """A round of the bundle ``bundle``. ``after``: name of the round whose carry it begins with."""

    name: str
    bundle: str
    seed: int
    samples: int = 0
    after: str = ""


_CASES = (
    RoundVector("plain", "plain", 2**62 + 1),
    RoundVector("plain-13-rows", "plain", 7, 13),
    RoundVector("plain-5-rows", "plain", 11, 5),
    RoundVector("coded", "coded", 2**40 + 3),
    RoundVector("onebit", "onebit", 5),
    RoundVector("passes", "passes", 6),
    RoundVector("inner", "inner", 9),
    RoundVector("tier", "tier", 8),
    RoundVector("sparse", "sparse", 10),
    RoundVector("masked", "masked", 12),
    RoundVector("carried", "carried", 1),
    RoundVector("carried-again", "carried", 2, after="carried"),
    RoundVector("opening", "opening", 21),
    RoundVector("exchange", "exchange", 22, after="opening"),
)


def write_rounds(folder: Path, format: str) -> list[dict[str, Any]]:
    """Write the files of all rounds in ``format`` below ``folder``, and return their rows of the index.

    Raises ConfigError if the engine of the format is not installed.
    """
    rows, carries = [], dict[str, Arrays]()
    for case in _CASES:
        what = material(case.bundle, format)
        place = folder / "rounds" / format / case.name
        place.mkdir(parents=True, exist_ok=True)
        carry = carries.get(case.after)
        result = expected(what, samples(), format, seed=case.seed, samples=case.samples, carry=carry)
        carries[case.name] = result.carry
        rows.append(_row(case, format, _files(place, what, carry, result, folder), result))
    return rows


def _files(
    place: Path, what: Material, carry: Arrays | None, result: RoundResult, root: Path
) -> dict[str, str]:
    x, y = samples()
    write_bundle(what.bundle, place / "bundle.efl")
    parts = {
        "weights": what.weights,
        "data": {"x": x, "y": y},
        "carry_before": carry,
        "carry_after": result.carry,
    }
    for name, arrays in parts.items():
        if arrays:
            masks = {key: MASKS[key] for key in arrays.keys() & MASKS.keys()}
            write_whole(place / f"{name}.safetensors", tensors.dump(arrays, masks))
    write_whole(place / "update.safetensors", tensors.dump(result.update, result.masks))
    written = ["bundle.efl", *(f"{name}.safetensors" for name in (*parts, "update"))]
    return {
        Path(name).stem: str((place / name).relative_to(root)) for name in written if (place / name).exists()
    }


def _row(case: RoundVector, format: str, files: dict[str, str], result: RoundResult) -> dict[str, Any]:
    return {
        "name": f"{format}/{case.name}",
        "kind": "round",
        "format": format,
        "seed": whole(case.seed),
        "samples": case.samples,
        "rows_used": result.samples,
        "metrics": result.metrics,
        "tolerance": asdict(TOLERANCES[format]),
        "files": files,
    }


_DATA = Path(__file__).parents[1] / "data"
GOLDEN = _DATA / "golden"
"""Frozen messages, manifests, references, tensors, patches and frames; ``values.json`` has the decoded MessagePack."""
UPDATES = _DATA / "updates"
"""Coded updates, as JSON: ``codes.json`` and ``updates.json``."""


VERSION = 1
_ABOUT = {
    "golden": "the frozen bytes of the protocol; values.json has what each that is MessagePack decodes to",
    "updates": "the arrays of coded updates, and what they stand for",
    "draws": "generators, batches, passes over the data, and noise, by their keys",
    "signatures": "envelopes, and signatures that do not hold; successions, tokens and bundles",
    "blobs": "references and chunks, references and frames that must be refused, masks and their gaps",
}


def write_vectors(folder: Path, formats: Sequence[str] = ("onnx", "executorch")) -> list[dict[str, Any]]:
    """Write all vectors into ``folder``, with rounds for ``formats``; return the rows of ``index.json``.

    Replaces existing files of these names. Raises ConfigError if an engine is not installed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for name, source in (("golden", GOLDEN), ("updates", UPDATES)):
        shutil.copytree(source, folder / name, dirs_exist_ok=True)
        files = sorted(f"{name}/{path.name}" for path in source.iterdir())
        rows.append({"name": name, "kind": name, "about": _ABOUT[name], "files": files})
    for name, vectors in (
        ("draws", draw_vectors()),
        ("signatures", signature_vectors()),
        ("blobs", blob_vectors()),
    ):
        file = f"{name}.json"
        write_text(folder / file, _lines(vectors))
        counts = {part: len(cases) for part, cases in vectors.items()}
        rows.append({"name": name, "kind": name, "about": _ABOUT[name], "files": [file], "cases": counts})
    for format in formats:
        rows += write_rounds(folder, format)
    write_text(folder / "index.json", json.dumps({"version": VERSION, "vectors": rows}, indent=1) + "\n")
    return rows


def _lines(vectors: dict[str, list[dict[str, Any]]]) -> str:
    """Return JSON with one case per line."""
    parts = []
    for name, cases in vectors.items():
        rows = ",\n  ".join(json.dumps(case) for case in cases)
        parts.append(f" {json.dumps(name)}: [\n  {rows}\n ]")
    return "{\n" + ",\n".join(parts) + "\n}\n"
