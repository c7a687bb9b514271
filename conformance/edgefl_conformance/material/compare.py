"""Whether an update is the expected one, within what engines may round otherwise."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
import numpy as np

from edgefl.errors import ProtocolError
from edgefl.wire import tensors
from edgefl.wire.mqtt.messages import Profile, Update
from edgefl.wire.tensors import Array, Arrays
from edgefl_conformance.verdict import Failed, expect, expect_equal
from edgefl_device.round.runner import RoundResult


@dataclass(frozen=True)
class Tolerance:
    """``absolute`` and ``relative`` error of each float of an update, ``metric``: relative error of a metric, ``codes``:
    share of the bytes of codes that may differ, and of few of them one, where a rounding fell to the other side."""

    absolute: float = 1e-5
    relative: float = 1e-4
    metric: float = 1e-3
    codes: float = 0.02


TOLERANCES = {"onnx": Tolerance(), "executorch": Tolerance()}
"""By the engine that ran the round, beside the reference on the same format."""

_CODES, _MASK = "codes", "mask"


def read_tensors(update: Update) -> Arrays:
    """Those of an update; Failed if the bytes are no safetensors as docs/protocol.md has them."""
    try:
        return tensors.load(update.tensors)
    except ProtocolError as error:
        raise Failed("tensors in safetensors, masks packed or as gaps", error.message) from error


def check_fields(encoded: bytes) -> None:
    """Failed if an encoded update holds a field that the protocol has not: a server refuses it."""
    fields = msgspec.msgpack.decode(encoded)
    for name, part, known in (
        ("the update", fields, Update.__struct_fields__),
        ("its profile", fields.get("profile", {}), Profile.__struct_fields__),
    ):
        more = sorted(set(part) - set(known))
        expect(not more, f"no field in {name} that the protocol has not", ", ".join(map(str, more)))


def check_update(update: Update, wanted: RoundResult, tolerance: Tolerance) -> None:
    """Failed where samples, tensors or metrics are not those of the reference."""
    expect_equal("update.samples", wanted.samples, update.samples)
    found = read_tensors(update)
    expect_equal("tensors of the update", sorted(wanted.update), sorted(found))
    for name, array in wanted.update.items():
        check_array(name, array, found[name], tolerance)
    check_metrics(wanted.metrics, update.metrics, tolerance)


def check_array(name: str, wanted: Array, found: Array, tolerance: Tolerance) -> None:
    """Failed unless ``found`` is ``wanted`` within ``tolerance``."""
    expect_equal(f"dtype of {name}", str(wanted.dtype), str(found.dtype))
    expect_equal(f"shape of {name}", wanted.shape, found.shape)
    if name == _CODES:
        differ = int((wanted != found).sum())
        expect(
            differ <= max(1, int(tolerance.codes * wanted.size)),
            f"codes of which at most {tolerance.codes:.0%} differ, or one",
            f"{differ} of {wanted.size}",
        )
    elif wanted.dtype.kind in "biu":
        differ = int((wanted != found).sum())
        expect(differ == 0, f"{name} with exactly these numbers", f"{differ} of {wanted.size} differ")
    else:
        _check_floats(name, wanted.astype(np.float64), found.astype(np.float64), tolerance)


def _check_floats(name: str, wanted: Array, found: Array, tolerance: Tolerance) -> None:
    error = np.abs(wanted - found)
    allowed = tolerance.absolute + tolerance.relative * np.abs(wanted)
    if wanted.size and not bool((error <= allowed).all()):
        worst = int(np.argmax(np.nan_to_num(error - allowed, nan=np.inf)))
        raise Failed(
            f"{name}[{worst}] = {wanted.flat[worst]:.8g} (to within {allowed.flat[worst]:.1e})",
            f"{found.flat[worst]:.8g}; {int((error > allowed).sum())} of {wanted.size} entries are too far off",
        )


def check_metrics(wanted: Mapping[str, float], found: Mapping[str, float], tolerance: Tolerance) -> None:
    """Failed unless each metric is there, and the same within ``tolerance``."""
    expect_equal("metrics", sorted(wanted), sorted(found))
    for name, value in wanted.items():
        close = math.isclose(value, found[name], rel_tol=tolerance.metric, abs_tol=tolerance.metric)
        expect(close, f"metric {name} = {value:.6g}", f"{found[name]:.6g}")
