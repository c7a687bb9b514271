"""Updates and messages that the service refuses, with a reason, while the round goes on."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save

from edgefl.wire import tensors
from edgefl.wire.mqtt.address import Address
from edgefl.wire.mqtt.messages import Status, Task, UpdateChunk, encode
from edgefl.wire.update.form import DENSE, Form
from edgefl_server.events import Rejected, RoundClosed
from edgefl_server.publish.downlink import check_counting
from edgefl_server.run_spec import DownlinkSpec, RunSpec
from edgefl_server.service import Service
from edgefl_server.storage.update_table import MOST_REJECTED
from tests.server.fleet import (
    PATIENCE_S,
    MakeDevice,
    MakePlan,
    ScriptedDevice,
    assert_mean,
    silent,
    trained,
    update_for,
    with_manifest,
)
from tests.support.errors import ConfigError, refuses
from tests.support.listeners import CallingListener


def nan_update(device: ScriptedDevice, task: Any, opened: Any) -> None:
    arrays = trained(device.name, task)
    arrays["head.weight"] = np.full_like(arrays["head.weight"], np.nan)
    device.report(task, opened, tensors=tensors.dump(arrays))


def reshaped_update(device: ScriptedDevice, task: Any, opened: Any) -> None:
    arrays = {name: array.ravel() for name, array in trained(device.name, task).items()}
    device.report(task, opened, tensors=tensors.dump(arrays))


def with_metadata(device: ScriptedDevice, task: Any, opened: Any) -> None:
    device.report(task, opened, tensors=save(trained(device.name, task), metadata={"pad": "x"}))


def padded(pad: bytes, field: str = "") -> Callable[..., None]:
    """Answer with what the journal would keep whole: a field of the update, or of one of its fields, that no message has."""

    def answer(device: ScriptedDevice, task: Any, opened: Any) -> None:
        update = update_for(device.name, task, opened.model_version, trained(device.name, task))
        fields = msgspec.msgpack.decode(encode(update))
        (fields[field] if field else fields)["pad"] = pad
        device.send(msgspec.msgpack.encode(fields), task)

    return answer


# An update never has masks, and a few bytes of one could ask for a gigabyte.
MASKED = tensors.dump({"mask": np.zeros(1000, np.uint8)}, {"mask": 8000})


def changed(**changes: Any) -> Callable[..., None]:
    return lambda device, task, opened: device.report(task, opened, **changes)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (nan_update, "not-finite"),
        (reshaped_update, "wrong-shape"),
        (padded(bytes(1 << 20)), "too-large"),
        (padded(b"x"), "malformed"),
        (padded(b"x", "profile"), "malformed"),
        (with_metadata, "malformed"),
        (changed(tier="weak"), "wrong-tier"),
        (changed(device="strong-0"), "wrong-device"),
        (changed(tensors=b"no tensors"), "malformed"),
        (changed(tensors=MASKED), "malformed"),
        (lambda device, task, opened: device.send(b"no message", task), "malformed"),
    ],
    ids=[
        "nan",
        "shape",
        "padded",
        "field",
        "profile",
        "metadata",
        "tier",
        "device",
        "tensors",
        "mask",
        "message",
    ],
)
def test_a_bad_update_is_refused_and_recorded_and_the_round_goes_on(
    device: MakeDevice, serve: Any, tmp_path: Path, bad: Any, reason: str
) -> None:
    culprit = device("strong-1", bad)
    device("strong-0")
    server = serve(min_devices=2, rounds=1)
    refused = server.wait_for(Rejected)
    closed = server.wait_for(RoundClosed)
    server.join()

    ack = culprit.acks.get(timeout=PATIENCE_S)
    assert (refused.device, refused.round, refused.reason) == ("strong-1", 1, reason)
    assert (ack.status, ack.reason, ack.round) == ("rejected", reason, 1) and ack.text == refused.text
    assert (closed.outcome, closed.reports, closed.rejected) == ("closed", 1, 1)
    assert_mean(tmp_path / "out", [("strong-0", "strong", 1)])
    with sqlite3.connect(tmp_path / "out" / "journal.sqlite") as journal:
        rows = journal.execute("select device, reason from updates where reason != ''").fetchall()
    assert rows == [("strong-1", reason)]


def test_copies_that_come_before_the_first_is_kept_are_counted_once(device: MakeDevice, serve: Any) -> None:
    eager, slow = device("strong-0", silent), device("strong-1", silent)
    server = serve(rounds=1, min_devices=2)
    opened = eager.wait_open()
    task = eager.tasks.get(timeout=PATIENCE_S)
    for _ in range(5):
        eager.report(task, opened)
    assert eager.acks.get(timeout=PATIENCE_S).status == "accepted"
    slow.report(slow.tasks.get(timeout=PATIENCE_S), opened)
    closed = server.wait_for(RoundClosed)
    server.join()
    assert (closed.reports, closed.rejected) == (2, 0)


def test_a_copy_of_a_refused_update_is_recorded_once(device: MakeDevice, serve: Any) -> None:
    culprit = device("strong-1", silent)
    device("strong-0", silent)
    server = serve(rounds=1, min_devices=2)
    opened = culprit.wait_open()
    task = culprit.tasks.get(timeout=PATIENCE_S)
    for _ in range(2):
        culprit.report(task, opened, tier="weak")
    first, again = (culprit.acks.get(timeout=PATIENCE_S) for _ in range(2))

    assert (first.reason, again.reason) == ("wrong-tier", "already-rejected")
    assert (again.status, again.round, again.nonce) == ("rejected", 1, task.nonce)
    assert "refused already; wait for the next round" in again.text
    assert server.wait_for(Rejected).reason == "wrong-tier"


def test_a_refusal_names_the_claim_and_the_expected_value(device: MakeDevice, serve: Any) -> None:
    culprit = device("strong-0", changed(codec="fedpaq", codec_version=7))
    device("strong-1", silent)
    serve(rounds=1, min_devices=2)

    text = culprit.acks.get(timeout=PATIENCE_S).text
    assert "coded by 'fedpaq' version 7, its tier by 'dense' version 1; fetch the tier's bundle again" in text


def test_an_update_for_a_closed_round_is_refused(device: MakeDevice, serve: Any) -> None:
    fast, late = device("strong-0", silent), device("strong-1", silent)
    server = serve(rounds=3, min_devices=2, over_selection=2.0, fraction=0.5)
    opened = fast.wait_open()
    fast.report(fast.tasks.get(timeout=PATIENCE_S), opened)
    server.wait_for(RoundClosed)
    late.report(late.tasks.get(timeout=PATIENCE_S), opened)
    refused = server.wait_for(Rejected)
    assert refused.reason == "closed-round" and late.acks.get(timeout=PATIENCE_S).reason == "closed-round"


def test_an_update_from_a_device_without_a_task_is_refused(device: MakeDevice, serve: Any) -> None:
    stranger = device("strong-9", silent)
    server = serve(rounds=1)
    opened, task = stranger.wait_open(), stranger.tasks.get(timeout=PATIENCE_S)
    for changes in ({"nonce": "0" * 24}, {"round": 8}):
        forged = Task(**{**{name: getattr(task, name) for name in task.__struct_fields__}, **changes})
        stranger.report(forged, opened)
    reasons = {server.wait_for(Rejected).reason for _ in range(2)}
    assert reasons == {"wrong-nonce", "closed-round"}


def test_messages_that_make_no_sense_are_named_and_survived(device: MakeDevice, serve: Any) -> None:
    odd = device("strong-0", silent, samples=2**64 - 1)
    server = serve(rounds=1)
    opened, task = odd.wait_open(), odd.tasks.get(timeout=PATIENCE_S)
    chunk = UpdateChunk(nonce="n", sha256="s", index=0, count=1, size=1, data=b"x")
    odd.say(odd.mine.update(2**70, 0), chunk)
    odd.say(odd.mine.update(-1, 0), chunk)
    odd.session.publish(odd.mine.update(1, 0), b"\x00 no msgpack")
    odd.session.publish(odd.mine.progress, encode(Status(online=True)))
    odd.session.publish(f"{odd.topics.root}/devices/strong-0/updates/one/0", b"x")
    assert {server.wait_for(Rejected).reason for _ in range(5)} == {"malformed"}
    odd.report(task, opened)
    assert server.wait_for(RoundClosed).reports == 1


def test_a_device_hears_which_of_its_messages_cannot_be_read(device: MakeDevice, serve: Any) -> None:
    odd = device("strong-0", silent)
    server = serve(rounds=1)
    opened, task = odd.wait_open(), odd.tasks.get(timeout=PATIENCE_S)
    odd.session.publish(odd.mine.hello, b"\x82\xa1v\x01\xa5agent\x07", retain=True)
    odd.session.publish(odd.mine.update(1, 0), b"\x82\xa1v\x01\xa5nonce\xc4\x01n")
    hello, chunk = (odd.acks.get(timeout=PATIENCE_S) for _ in range(2))
    for ack in (hello, chunk):
        assert (ack.round, ack.nonce, ack.status, ack.reason) == (0, "", "rejected", "malformed")
    assert hello.text == "Hello message is malformed: Expected `str`, got `int` - at `$.agent`"
    assert chunk.text == "UpdateChunk message is malformed: Expected `str`, got `bytes` - at `$.nonce`"
    odd.report(task, opened)
    assert server.wait_for(RoundClosed).reports == 1


def test_refusals_are_recorded_within_limits(device: MakeDevice, serve: Any, tmp_path: Path) -> None:
    odd = device("strong-0", silent)
    server = serve(rounds=1)
    opened, task = odd.wait_open(), odd.tasks.get(timeout=PATIENCE_S)
    for number in range(40):
        chunk = UpdateChunk(nonce=f"{number}" + "n" * 500, sha256="s", index=0, count=1, size=1, data=b"x")
        odd.say(odd.mine.update(1 + number % 20, 0), chunk)
    odd.report(task, opened)
    assert server.wait_for(RoundClosed).rejected == MOST_REJECTED
    server.join()
    assert len(server.seen_of(Rejected)) == MOST_REJECTED
    with sqlite3.connect(tmp_path / "out" / "journal.sqlite") as journal:
        assert journal.execute("select max(length(text)) from updates").fetchone()[0] < 300


NOBODY = Address("127.0.0.1", 1)


def rounding_apart(plan: RunSpec) -> RunSpec:
    """The plan with counted changes, whose weak tier has a part of its own, rounded by itself."""
    tiers = {**plan.tiers, "weak": with_manifest(plan.tiers["weak"], suffix=("weak/submodel",))}
    return replace(plan, tiers=tiers, count="nonzero", downlink=DownlinkSpec("int8"))


def test_a_server_that_counts_changes_must_know_what_was_sent() -> None:
    forms, changes = {"strong": DENSE, "weak": DENSE}, Form("x", change=True)
    check_counting("nonzero", "int8", dict.fromkeys(forms, changes), ["weak"])
    check_counting("nonzero", "int8", {"weak": DENSE}, ["weak"])
    check_counting("nonzero", "int8", forms, [])
    check_counting("nonzero", "float16", forms, ["weak"])
    check_counting("holders", "int8", forms, ["weak"])


def with_small_blobs(plan: RunSpec) -> RunSpec:
    return replace(plan, limits=msgspec.structs.replace(plan.limits, max_blob_bytes=100))


@pytest.mark.parametrize(
    ("change", "details"),
    [(rounding_apart, {"encoding": "int8"}), (with_small_blobs, {"size": 423, "limit": 100})],
)
def test_a_refused_configuration_leaves_no_run(
    change: Any, details: dict[str, object], plan_of: MakePlan, tmp_path: Path
) -> None:
    plan = plan_of()
    with refuses(ConfigError, **details):
        Service(change(plan), NOBODY, tmp_path, listener=CallingListener(print))

    mended = Service(replace(plan, digest="e" * 64), NOBODY, tmp_path, listener=CallingListener(print))

    assert not mended.is_resumed
