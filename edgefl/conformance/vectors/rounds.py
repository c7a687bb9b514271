"""Whole rounds: bundle, weights, data, seed and carry, and the update and metrics that they give on an engine."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from device_runtime.round.runner import RoundResult
from edgefl.conformance.material.bundles import MASKS, Material, material, samples
from edgefl.conformance.material.compare import TOLERANCES
from edgefl.conformance.material.reference import expected
from edgefl.conformance.vectors.draws import whole
from edgefl.system.files import write_whole
from edgefl.wire import tensors
from edgefl.wire.bundle.archive import write_bundle
from edgefl.wire.tensors import Arrays


@dataclass(frozen=True)
class _Case:
    """A round of the bundle ``name``; ``after``: the case whose carry it begins with."""

    name: str
    bundle: str
    seed: int
    samples: int = 0
    after: str = ""


_CASES = (
    _Case("plain", "plain", 2**62 + 1),
    _Case("plain-13-rows", "plain", 7, 13),
    _Case("plain-5-rows", "plain", 11, 5),
    _Case("coded", "coded", 2**40 + 3),
    _Case("onebit", "onebit", 5),
    _Case("passes", "passes", 6),
    _Case("inner", "inner", 9),
    _Case("tier", "tier", 8),
    _Case("sparse", "sparse", 10),
    _Case("masked", "masked", 12),
    _Case("carried", "carried", 1),
    _Case("carried-again", "carried", 2, after="carried"),
    _Case("opening", "opening", 21),
    _Case("exchange", "exchange", 22, after="opening"),
)


def write_rounds(folder: Path, format: str) -> list[dict[str, Any]]:
    """Write the files of all rounds in ``format`` below ``folder``, and give their rows of the index.

    ConfigError if the engine of the format is not installed."""
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


def _row(case: _Case, format: str, files: dict[str, str], result: RoundResult) -> dict[str, Any]:
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
