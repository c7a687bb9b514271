"""Expected result of a round, and its comparison with an update, within the rounding of engines."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import msgspec
import numpy as np

from edgefl.errors import ProtocolError
from edgefl.wire import tensors
from edgefl.wire.mqtt.messages import ResourceUsage, Update
from edgefl.wire.tensors import Array, Arrays
from edgefl_conformance.material.bundles import Material
from edgefl_conformance.results import CaseFailed, expect, expect_equal
from edgefl_device.data.samples import LocalData
from edgefl_device.engine import open_engine
from edgefl_device.engine.base import Engine
from edgefl_device.round import offline
from edgefl_device.round.trainer import RoundResult


@dataclass(frozen=True)
class Tolerance:
    """Allowed differences between engines.

    Attributes:
        absolute, relative: error of each float of an update.
        metric: relative error of a metric.
        codes: share of the bytes of codes that may differ by rounding; at least one byte may.
    """

    absolute: float = 1e-5
    relative: float = 1e-4
    metric: float = 1e-3
    codes: float = 0.02


TOLERANCES = {"onnx": Tolerance(), "executorch": Tolerance()}
"""Tolerances by engine; the reference runs on the same format."""

_CODES, _MASK = "codes", "mask"


def read_tensors(update: Update) -> Arrays:
    """Return the tensors of an update. Raises CaseFailed unless they are safetensors as in docs/protocol.md."""
    try:
        return tensors.load(update.tensors)
    except ProtocolError as error:
        raise CaseFailed("tensors in safetensors, masks packed or as gaps", error.message) from error


def check_fields(encoded: bytes) -> None:
    """Raise CaseFailed for a field outside the protocol in an encoded update, which a server rejects."""
    fields = msgspec.msgpack.decode(encoded)
    for name, part, known in (
        ("the update", fields, Update.__struct_fields__),
        ("its profile", fields.get("profile", {}), ResourceUsage.__struct_fields__),
    ):
        more = sorted(set(part) - set(known))
        expect(not more, f"no field in {name} that the protocol has not", ", ".join(map(str, more)))


def check_update(update: Update, wanted: RoundResult, tolerance: Tolerance) -> None:
    """Raise CaseFailed if samples, tensors or metrics differ from the reference."""
    expect_equal("update.samples", wanted.samples, update.samples)
    found = read_tensors(update)
    expect_equal("tensors of the update", sorted(wanted.update), sorted(found))
    for name, array in wanted.update.items():
        check_array(name, array, found[name], tolerance)
    check_metrics(wanted.metrics, update.metrics, tolerance)


def check_array(name: str, wanted: Array, found: Array, tolerance: Tolerance) -> None:
    """Raise CaseFailed unless ``found`` equals ``wanted`` within ``tolerance``."""
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
        raise CaseFailed(
            f"{name}[{worst}] = {wanted.flat[worst]:.8g} (to within {allowed.flat[worst]:.1e})",
            f"{found.flat[worst]:.8g}; {int((error > allowed).sum())} of {wanted.size} entries are too far off",
        )


def check_metrics(wanted: Mapping[str, float], found: Mapping[str, float], tolerance: Tolerance) -> None:
    """Raise CaseFailed unless all metrics exist and are equal within ``tolerance``."""
    expect_equal("metrics", sorted(wanted), sorted(found))
    for name, value in wanted.items():
        close = math.isclose(value, found[name], rel_tol=tolerance.metric, abs_tol=tolerance.metric)
        expect(close, f"metric {name} = {value:.6g}", f"{found[name]:.6g}")


_ONE_AT_A_TIME = threading.Lock()


@cache
def _engine(name: str) -> Engine:
    return open_engine(name, 1)


def expected(
    material: Material,
    data: tuple[Array, Array],
    engine: str,
    *,
    seed: int,
    samples: int = 0,
    hyper: Mapping[str, float] | None = None,
    carry: Arrays | None = None,
) -> RoundResult:
    """Run a round of ``material`` on ``data`` (x, y) in this process. Raises ConfigError without the engine."""
    with _ONE_AT_A_TIME:
        return offline.train_round(
            material.bundle,
            material.weights,
            LocalData(*data, "the kit's data"),
            _engine(engine),
            seed=seed,
            samples=samples,
            hyper=hyper,
            carry=carry,
        )
