"""The folder of vectors: what `edgefl conformance vectors` writes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from edgefl.conformance.vectors.blobs import blob_vectors
from edgefl.conformance.vectors.draws import draw_vectors
from edgefl.conformance.vectors.rounds import write_rounds
from edgefl.conformance.vectors.signatures import signature_vectors
from edgefl.system.files import write_text

# The frozen vectors of the protocol, which lie in the package: one place for tests, documents and other languages.

_DATA = Path(__file__).parents[1] / "data"
GOLDEN = _DATA / "golden"
"""Messages, manifests, references, tensors, patches and frames; ``values.json`` says what those in MessagePack decode to."""
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
    """Write all vectors into ``folder``, rounds for the engines of ``formats``; gives the rows of ``index.json``.

    What lay there under these names is replaced. ConfigError if an engine is not installed."""
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
    """JSON with one case a line."""
    parts = []
    for name, cases in vectors.items():
        rows = ",\n  ".join(json.dumps(case) for case in cases)
        parts.append(f" {json.dumps(name)}: [\n  {rows}\n ]")
    return "{\n" + ",\n".join(parts) + "\n}\n"
