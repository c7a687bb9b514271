"""What devices are given: the same bits as the server believes, whoever missed rounds and whoever was killed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgefl.errors import BundleError
from edgefl.wire import bits, tensors
from edgefl.wire.regions import BlockRegion, EntryRegion, Placement
from edgefl_device.round.forward import record_tag
from edgefl_server.publish.downlink import PublishedPart
from tests.server.publish.published import NAMES, Device, Server, believed, job, model, same, units


def test_all_devices_have_the_bits_that_the_server_believes(tmp_path: Path) -> None:
    server, faithful, now_and_then = Server(tmp_path), Device(), Device()
    for number in range(10):
        server.publish(number)
        expected = believed(server)
        assert same(faithful.read(server, number), expected)
        assert same(Device().read(server, number), expected)
        if number in (1, 3, 6, 9):
            assert same(now_and_then.read(server, number), expected)


def test_the_devices_model_is_exact_at_keyframes(tmp_path: Path) -> None:
    server, device = Server(tmp_path), Device()
    for number in range(9):
        server.publish(number)
        got, exact = device.read(server, number), model(number)
        if number % 4 == 0:
            assert same(got, exact)
        worst = max(float(np.abs(got[name] - exact[name]).max()) for name in exact)
        assert worst <= 0.5 / 127 * 0.6, "errors must not add up over rounds"
        assert got["stem.mean"].tobytes() == exact["stem.mean"].tobytes()


def test_a_device_that_stays_fetches_a_quarter(tmp_path: Path) -> None:
    server, device = Server(tmp_path, every=10), Device()
    fetched = []
    for number in range(5):
        server.publish(number)
        device.read(server, number)
        fetched.append(device.fetched)
    whole = sum(len(tensors.dump(part.arrays)) for part in units(0).values())
    assert all(whole / bytes_ > 3.5 for bytes_ in fetched[1:]), fetched


def test_float16_halves_the_trained_tensors_and_leaves_statistics_alone(tmp_path: Path) -> None:
    server = Server(tmp_path, "float16")
    server.publish(3)
    got, exact = Device().read(server, 3), model(3)
    for name in NAMES:
        assert got[name].tobytes() == exact[name].astype(np.float16).astype(np.float32).tobytes()
    assert got["stem.mean"].tobytes() == exact["stem.mean"].tobytes()
    assert server.patched == {} and not (tmp_path / "published").exists()


def test_float32_gives_the_exact_model(tmp_path: Path) -> None:
    server = Server(tmp_path, "float32")
    server.publish(3)
    assert same(Device().read(server, 3), model(3))


@pytest.mark.parametrize("encoding", ["float32", "float16", "int8"])
def test_the_server_knows_the_bits_that_devices_begin_with(tmp_path: Path, encoding: str) -> None:
    server = Server(tmp_path, encoding)
    for number in range(3):
        server.publish(number)
        given = server.downlink.received(model(number), units(number))
        assert same(given, Device().read(server, number))
    assert (encoding == "float32") == same(given, model(2))


@pytest.mark.parametrize("encoding", ["float16", "int8"])
def test_the_server_knows_what_a_tier_of_its_own_begins_with(tmp_path: Path, encoding: str) -> None:
    server, rows = Server(tmp_path, encoding), range(5, 20)
    for number in range(3):
        server.publish(number, slice_of(number, rows))
        given, exact = server.downlink.received(model(number), slice_of(number, rows)), model(number)
        got = Device().read(server, number, ["half/submodel"])
        assert given["head.w"][5:20].tobytes() == got["head.w"].tobytes()
        assert given["head.w"][:5].tobytes() == exact["head.w"][:5].tobytes()
        assert same(
            {n: given[n] for n in ("stem.w", "stem.mean")}, {n: exact[n] for n in ("stem.w", "stem.mean")}
        )


def test_the_server_knows_what_a_tier_behind_a_mask_begins_with(tmp_path: Path) -> None:
    server, held = Server(tmp_path), np.arange(2600) % 7 == 0
    names, exact = ("head.w", "stem.w"), model(1)
    values = np.concatenate([exact[name].reshape(-1) for name in names])[held]
    payload = {"submodel.mask": bits.pack(held), "submodel.values": values}
    regions = {"submodel.values": EntryRegion(names, np.flatnonzero(held))}
    part = PublishedPart.of_payload(Placement(regions, payload, {"submodel.mask": held.size}), NAMES)
    server.publish(1, {"thin/submodel": part})
    given = server.downlink.received(exact, {"thin/submodel": part})
    flat = np.concatenate([given[name].reshape(-1) for name in names])
    assert flat[held].tobytes() == values.astype(np.float16).astype(np.float32).tobytes()
    assert (
        flat[~held].tobytes() == np.concatenate([exact[name].reshape(-1) for name in names])[~held].tobytes()
    )


def test_another_patch_is_other_content_for_a_device_with_work_begun(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.publish(0)
    first = job(server.announced(1))
    server.publish(1)
    second = job(server.announced(1))
    assert first.content != second.content and record_tag(first) != record_tag(second)


def test_a_patch_that_does_not_fit_is_refused_with_a_reason(tmp_path: Path) -> None:
    server, device = Server(tmp_path, compression="none"), Device()
    server.publish(0)
    server.publish(1)
    bad = tensors.dump({"head.w": np.zeros(3, np.int8), "/scales": np.ones(1, np.float32)})
    device.store[server.patched["head"][1].sha256] = bad
    with pytest.raises(BundleError, match=r"patch does not fit.*'head.w' is int8 \(3,\)"):
        device.read(server, 1)


# -- payloads of tiers -----------------------------------------------------------------------------------------


def slice_of(number: int, rows: range) -> dict[str, PublishedPart]:
    weights = model(number)
    regions = {"head.w": BlockRegion((rows, None)), "stem.mean": None}
    payload = {"head.w": weights["head.w"][list(rows)], "stem.mean": weights["stem.mean"]}
    return {"half/submodel": PublishedPart.of_payload(Placement(regions, payload), NAMES)}


def test_a_payload_that_stays_where_it_is_travels_as_patches(tmp_path: Path) -> None:
    server, device = Server(tmp_path), Device()
    for number in range(3):
        server.publish(number, slice_of(number, range(10)))
        got = device.read(server, number, ["half/submodel"])
        assert same(got, believed(server))
    assert len(server.patched["half/submodel"]) == 3


def test_a_payload_that_moves_travels_whole_in_float16(tmp_path: Path) -> None:
    server = Server(tmp_path)
    for number in range(3):
        server.publish(number, slice_of(number, range(number, number + 10)))
    got = Device().read(server, 3, ["half/submodel"])
    assert server.patched == {}
    expected = model(2)["head.w"][2:12].astype(np.float16).astype(np.float32)
    assert got["head.w"].tobytes() == expected.tobytes()
    assert got["stem.mean"].tobytes() == model(2)["stem.mean"].tobytes()
    server.publish(3, slice_of(3, range(2, 12)))
    assert same(Device().read(server, 3, ["half/submodel"]), believed(server))
    assert len(server.patched["half/submodel"]) == 2, "patches start from what was sent"


@pytest.mark.parametrize("names", [("head.w",), ("head.w", "stem.mean")])
def test_values_behind_a_mask_travel_whole(tmp_path: Path, names: tuple[str, ...]) -> None:
    server = Server(tmp_path)
    held = np.arange(2020) % 7 == 0
    for number in range(3):
        values = np.random.default_rng(number).normal(size=int(held.sum())).astype(np.float32)
        payload = {"submodel.mask": bits.pack(held), "submodel.values": values, "submodel.theta": values[:2]}
        regions = {"submodel.values": EntryRegion(names, np.flatnonzero(held))}
        placement = Placement(regions, payload, {"submodel.mask": held.size})
        server.publish(number, {"thin/submodel": PublishedPart.of_payload(placement, NAMES)})
    got = Device().read(server, 3, ["thin/submodel"])
    rounded = values.astype(np.float16).astype(np.float32) if names == ("head.w",) else values
    assert got["submodel.values"].tobytes() == rounded.tobytes()
    assert got["submodel.mask"].tobytes() == bits.pack(held).tobytes()
    assert got["submodel.theta"].tobytes() == values[:2].tobytes()
    assert server.patched == {}
