"""Coded updates that the service refuses, each with a reason and a text, while the round goes on with the honest ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from edgefl.wire import tensors
from edgefl.wire.bundle.manifest import Port
from edgefl.wire.mqtt.messages import Round, Task, encode
from edgefl.wire.tensors import Arrays
from edgefl.wire.update.decode import decode
from edgefl.wire.update.form import DENSE, SIGNS, CodeEncoding, FloatEncoding, Form, Section, SparseEncoding
from edgefl_server.events import Rejected, RoundClosed
from edgefl_server.run_spec import RunSpec
from tests.server.fleet import (
    PATIENCE_S,
    WEIGHTS,
    MakeDevice,
    MakePlan,
    ScriptedDevice,
    Serve,
    names_of,
    trained,
    update_for,
    with_manifest,
)

NAMES = tuple(sorted(WEIGHTS))
SIZES = {name: WEIGHTS[name].size for name in NAMES}
GROUPS = {name: number for number, name in enumerate(NAMES)}
SIGNED = Form("scaled_sign", sections=(Section(NAMES, CodeEncoding(1, SIGNS), GROUPS),), change=True)
KNOWN = Form("signsgd", sections=(Section(NAMES, CodeEncoding(1, SIGNS, 0.01)),), change=True)
SPARSE = Form("topk", sections=(Section(NAMES, SparseEncoding(0.05)),), change=True)
HALVES = Form("float16", sections=(Section(NAMES, FloatEncoding("float16")),), change=True)
FORMS = {form.codec: form for form in (SIGNED, KNOWN, SPARSE, HALVES)}
MASK_BITS = sum(SIZES.values())
SHAPES = {name: array.shape for name, array in WEIGHTS.items()}


def honest(form: Form, device: str, number: int) -> Arrays:
    """The arrays of an update as ``form`` has them; they depend on the device and the round only."""
    rng = np.random.default_rng([number, *device.encode()])
    arrays: Arrays = {}
    for name, (dtype, length) in form.arrays(SIZES).items():
        if dtype == "uint8":
            arrays[name] = rng.integers(0, 256, length).astype(np.uint8)
        else:
            arrays[name] = np.abs(rng.normal(0, 0.01, length)).astype(dtype)
    if form is SPARSE:
        arrays["mask"] = mask(rng)
    return arrays


def mask(rng: np.random.Generator) -> np.ndarray:
    """As many bits set per tensor as the form keeps."""
    flags = [rng.permutation(np.arange(size) < SparseEncoding(0.05).kept(size)) for size in SIZES.values()]
    return np.packbits(np.concatenate(flags), bitorder="little")


def send(
    device: ScriptedDevice,
    task: Task,
    opened: Round,
    form: Form,
    arrays: Mapping[str, Any] | bytes,
    metrics: dict[str, float] | None = None,
    **fields: Any,
) -> None:
    masks = {"mask": MASK_BITS} if form is SPARSE else {}
    content = arrays if isinstance(arrays, bytes) else tensors.dump(arrays, masks)
    told = {"codec": form.codec, "codec_version": form.version, **fields}
    update = update_for(device.name, task, opened.model_version, {}, tensors=content, **told)
    metrics = {"loss": 1.5} if metrics is None else metrics
    device.send(encode(msgspec.structs.replace(update, metrics=metrics)), task)


Answer = Callable[[ScriptedDevice, Task, Round], None]


def good(form: Form) -> Answer:
    return lambda device, task, opened: send(
        device, task, opened, form, honest(form, device.name, task.round)
    )


def bad(form: Form, **changes: Callable[[np.ndarray], Any]) -> Answer:
    """An update in which some arrays are what ``changes`` make of them, or left out."""

    def answer(device: ScriptedDevice, task: Task, opened: Round) -> None:
        arrays: dict[str, Any] = dict(honest(form, device.name, task.round))
        for name, change in changes.items():
            arrays[name] = change(arrays.get(name, np.zeros(1, np.float32)))
        # Not as a mask: whoever sends a bad one does not write it as we do.
        content = tensors.dump({name: array for name, array in arrays.items() if array is not None})
        send(device, task, opened, form, content)

    return answer


def told(form: Form, **fields: Any) -> Answer:
    return lambda device, task, opened: send(
        device, task, opened, form, honest(form, device.name, task.round), **fields
    )


def first(value: float) -> Callable[[np.ndarray], np.ndarray]:
    return lambda array: np.concatenate([np.array([value], array.dtype), array[1:]])


def dense(device: ScriptedDevice, task: Task, opened: Round) -> None:
    """What a device with another bundle sends: weights, as they are."""
    send(device, task, opened, DENSE, trained(device.name, task))


def dense_in_disguise(device: ScriptedDevice, task: Task, opened: Round) -> None:
    send(device, task, opened, SIGNED, trained(device.name, task))


def gaps(count: int) -> Answer:
    """A few bytes that say they stand for a mask of ``count`` entries."""

    def answer(device: ScriptedDevice, task: Task, opened: Round) -> None:
        arrays = {"values": honest(SPARSE, device.name, task.round)["values"]}
        blob = tensors.dump({**arrays, "m": np.array([5], np.uint8)})
        name = f"mask~gaps:{count}".encode()
        header = int.from_bytes(blob[:8], "little")
        text = blob[8 : 8 + header].rstrip().replace(b'"m"', b'"' + name + b'"')
        text += b" " * (-len(text) % 8)
        content = len(text).to_bytes(8, "little") + text + blob[8 + header :]
        send(device, task, opened, SPARSE, content)

    return answer


CASES: list[tuple[str, Form, Answer, str, str]] = [
    ("one byte too few", SIGNED, bad(SIGNED, codes=lambda a: a[:-1]), "wrong-shape", "codes"),
    ("codes signed", SIGNED, bad(SIGNED, codes=lambda a: a.view(np.int8)), "wrong-dtype", "codes"),
    ("no scales", SIGNED, bad(SIGNED, scales=lambda a: None), "wrong-names", "scales"),
    ("scale is NaN", SIGNED, bad(SIGNED, scales=first(np.nan)), "not-finite", "scales"),
    ("scale is negative", SIGNED, bad(SIGNED, scales=first(-0.1)), "bad-scale", "never negative"),
    ("scale is huge", SIGNED, bad(SIGNED, scales=first(1e30)), "too-large", "scale"),
    ("an unknown codec", SIGNED, told(SIGNED, codec="magic"), "unknown-codec", "'magic' version 1"),
    ("a codec of 4 KB", SIGNED, told(SIGNED, codec="x" * 4096), "unknown-codec", "this server does not know"),
    ("a version to come", SIGNED, told(SIGNED, codec_version=2), "wrong-codec", "'scaled_sign' version 2"),
    ("no version", SIGNED, told(SIGNED, codec_version=0), "wrong-codec", "version 0"),
    ("another codec of the fleet", SIGNED, told(SIGNED, codec="signsgd"), "wrong-codec", "'signsgd'"),
    ("dense", SIGNED, dense, "wrong-codec", "'dense' version 1, its tier by 'scaled_sign' version 1"),
    ("dense under the codec's name", SIGNED, dense_in_disguise, "wrong-names", "codes"),
    ("no tensors", SIGNED, lambda d, t, o: send(d, t, o, SIGNED, b""), "malformed", "safetensors"),
    ("no bit", SPARSE, bad(SPARSE, mask=np.zeros_like), "malformed", "keeps 0 of"),
    ("gaps of an exabyte", SPARSE, gaps(10**18), "malformed", "mask"),
    ("gaps of one entry more", SPARSE, gaps(MASK_BITS + 1), "malformed", "mask"),
    ("a loss of NaN", SIGNED, told(SIGNED, metrics={"loss": np.nan}), "not-finite", "metric loss"),
    (
        "another metric",
        SPARSE,
        told(SPARSE, metrics={"loss": 1, "norm": -np.inf}),
        "not-finite",
        "metric norm",
    ),
    ("no loss beside a known scale", KNOWN, told(KNOWN, metrics={}), "malformed", "no metric 'loss'"),
    ("a change of 5000", HALVES, bad(HALVES, halves=first(5000)), "too-large", "beyond 4096"),
]


def coded(plan: RunSpec, form: Form) -> RunSpec:
    """The plan in which the strong devices send updates of ``form``."""
    port = Port(name="update.mask", role="update", dtype="uint8", shape=(-(-MASK_BITS // 8),), mask=MASK_BITS)
    (graph,) = plan.tiers["strong"].bundle.manifest.graphs
    graphs = (msgspec.structs.replace(graph, outputs=(port,) if form.masked else ()),)
    tier = with_manifest(plan.tiers["strong"], graphs=graphs, codec=form.codec)
    return replace(plan, tiers={"strong": replace(tier, form=form)})


def moved_by(form: Form, device: str, number: int = 1) -> Arrays:
    """WEIGHTS after one honest update."""
    change = decode(form, honest(form, device, number), dict.fromkeys(NAMES), SHAPES)
    return {n: (WEIGHTS[n].astype(np.float64) + change[n]).astype(np.float32) for n in NAMES}


@pytest.mark.sample(6)
@pytest.mark.parametrize(
    ("form", "answer", "reason", "text"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_a_bad_coded_update_is_refused_and_the_round_goes_on(
    device: MakeDevice,
    serve: Serve,
    plan_of: MakePlan,
    tmp_path: Path,
    form: Form,
    answer: Answer,
    reason: str,
    text: str,
) -> None:
    culprit = device("strong-1", answer)
    device("strong-0", good(form))
    server = serve(coded(plan_of(min_devices=2, rounds=1), form))
    refused = server.wait_for(Rejected)
    closed = server.wait_for(RoundClosed)
    server.join()

    ack = culprit.acks.get(timeout=PATIENCE_S)
    assert (refused.device, refused.reason) == ("strong-1", reason), refused.text
    assert (ack.status, ack.reason, ack.text) == ("rejected", reason, refused.text)
    assert text in refused.text and len(refused.text) <= 1000
    assert (closed.outcome, closed.reports, closed.rejected) == ("closed", 1, 1)
    model = tensors.load((tmp_path / "out" / "model.safetensors").read_bytes())
    expected = moved_by(form, "strong-0")
    assert all(np.array_equal(model[name], expected[name]) for name in NAMES)


def test_a_loss_is_optional_where_the_update_shows_it() -> None:
    mixed = Form("signsgd", sections=(*KNOWN.sections, Section(("norm",), FloatEncoding())), change=True)
    assert [form.silent for form in (KNOWN, SIGNED, SPARSE, HALVES, DENSE, mixed)] == [True] + [False] * 5


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_coded_update_as_it_should_be_is_taken(
    device: MakeDevice, serve: Serve, plan_of: MakePlan, tmp_path: Path, form: Form
) -> None:
    devices = [device(name, good(form)) for name in ("strong-0", "strong-1")]
    server = serve(coded(plan_of(min_devices=2, rounds=1), form))
    closed = server.wait_for(RoundClosed)
    server.join()

    assert (closed.reports, closed.rejected) == (2, 0)
    model = tensors.load((tmp_path / "out" / "model.safetensors").read_bytes())
    both = [decode(form, honest(form, each.name, 1), dict.fromkeys(NAMES), SHAPES) for each in devices]
    for name in names_of("strong"):
        mean = (both[0][name].astype(np.float64) + both[1][name]) / 2
        np.testing.assert_allclose(model[name], WEIGHTS[name] + mean, atol=1e-7)
