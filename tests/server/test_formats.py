"""One model in several formats: what the server announces, signs and keeps, and which bundles a run exports."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from edgefl.config import Federation, parse
from edgefl.errors import ConfigError
from edgefl.setup.runs import run_digest
from edgefl.wire.bundle import archive
from edgefl.wire.bundle.archive import BundleArchive, Signer
from edgefl.wire.bundle.manifest import decode_manifest
from edgefl.wire.mqtt.messages import NO_FORMAT
from edgefl.wire.mqtt.session import Session
from edgefl_export.compiler.cache import bundle_name
from edgefl_server.events import ParticipationDeclined, RoundClosed
from edgefl_server.run_spec import RunSpec, TierSpec
from edgefl_server.service import ServerKeys
from tests.server.fleet import MakeDevice, MakePlan, Serve, bundle, fetch, placed, retained, silent
from tests.server.service.test_service_participation import declining


def written(tier: str, format: str) -> BundleArchive:
    """The tier's bundle as if it were in this format; nobody runs it."""
    made = bundle(tier)
    (graph,) = made.manifest.graphs
    graph = msgspec.structs.replace(graph, format=format)
    return BundleArchive(msgspec.structs.replace(made.manifest, graphs=(graph,)), made.blobs)


def in_formats(plan: RunSpec, formats: dict[str, tuple[str, ...]]) -> RunSpec:
    """The plan with tiers whose bundles are in these formats."""
    tiers = {}
    for tier, names in formats.items():
        first, *others = (written(tier, name) for name in names)
        tiers[tier] = TierSpec(first, placed(tier), further=tuple(others))
    return replace(plan, tiers=tiers)


BOTH = {"strong": ("onnx", "executorch"), "weak": ("executorch",)}


OFFERED = {"onnx": ["strong"], "executorch": ["strong", "weak"]}


def test_a_round_offers_each_tier_in_its_formats(
    device: MakeDevice, serve: Serve, plan_of: MakePlan, stranger: Session, federation: str
) -> None:
    watching = device("strong-0", silent)
    serve(in_formats(plan_of(), BOTH))
    opened = watching.wait_open()

    assert {name: list(offer.bundles) for name, offer in opened.offers.items()} == OFFERED
    assert opened.formats_of("strong") == ("executorch", "onnx")
    assert opened.formats_of("weak") == ("executorch",)
    for name in OFFERED:
        for tier, ref in opened.offer(name).bundles.items():
            found = decode_manifest(fetch(stranger, federation, ref))
            assert (found.tier, found.format) == (tier, name)
            assert fetch(stranger, federation, found.graphs[0].blob) == b"graph of " + tier.encode()


def test_bundles_of_all_formats_are_kept_to_the_end(
    device: MakeDevice, serve: Serve, plan_of: MakePlan, stranger: Session, federation: str
) -> None:
    strong, weak = device("strong-0"), device("weak-0")
    plan = in_formats(plan_of(min_devices=2), BOTH)
    server = serve(plan)
    closed = [server.wait_for(RoundClosed) for _ in range(2)]
    server.join()

    done = strong.done()
    assert [round.reports for round in closed] == [2, 2]
    assert done == weak.done()
    refs = [ref for name in OFFERED for ref in done.offer(name).bundles.values()]
    assert len(refs) == 3
    bundles = [each for tier in plan.tiers.values() for each in tier.bundles.values()]
    graphs = {graph.blob.sha256 for each in bundles for graph in each.manifest.graphs}
    weights = [ref for line in done.units.values() for ref in line]
    chunks = sum(ref.count for ref in [*weights, *refs]) + len(graphs)
    assert sum("/blobs/" in topic for topic in retained(stranger, federation)) == chunks


def test_each_format_is_signed(device: MakeDevice, serve: Serve, plan_of: MakePlan, tmp_path: Path) -> None:
    watching, signer = device("strong-0", silent), Signer(tmp_path / "key")
    serve(in_formats(plan_of(), BOTH), keys=ServerKeys(signer))
    opened = watching.wait_open()

    for name, tiers in OFFERED.items():
        offer = opened.offer(name)
        assert list(offer.signatures) == tiers
        for tier, signature in offer.signatures.items():
            archive.check([signer.keys.public], offer.bundles[tier].sha256, signature)


def test_a_device_without_bundle_delays_nothing(device: MakeDevice, serve: Serve, plan_of: MakePlan) -> None:
    device("strong-0")
    device("strong-1", declining(1, reason=NO_FORMAT, text="no .pte"))
    server = serve(in_formats(plan_of(rounds=1, min_devices=2), {"strong": ("onnx",)}))
    declined, closed = server.wait_for(ParticipationDeclined), server.wait_for(RoundClosed)
    server.join()

    assert (declined.device, declined.reason, declined.text) == ("strong-1", "no-format", "no .pte")
    assert (closed.outcome, closed.reports) == ("closed", 1)


def told(**tables: Any) -> Federation:
    return parse(tables, source="the test")


@pytest.mark.parametrize(
    ("export", "tier", "formats"),
    [
        ({}, {}, ("onnx",)),
        ({}, {"engine": "executorch"}, ("executorch",)),
        ({"formats": ["executorch", "onnx"]}, {}, ("onnx", "executorch")),
        ({"formats": ["executorch"]}, {}, ("executorch",)),
        ({"formats": ["executorch"]}, {"count": 2}, ("onnx", "executorch")),
        ({"formats": ["executorch"]}, {"count": 2, "engine": "executorch"}, ("executorch",)),
    ],
)
def test_a_tiers_formats_follow_file_and_devices(
    export: dict[str, Any], tier: dict[str, Any], formats: tuple[str, ...]
) -> None:
    assert told(export=export, tiers={"weak": tier}).formats_of("weak") == formats


def test_another_format_is_another_configuration() -> None:
    plain = told(tiers={"weak": {}})
    others = [
        told(tiers={"weak": {}}, export={"formats": ["onnx", "executorch"]}),
        told(tiers={"weak": {"engine": "executorch"}}),
    ]

    assert run_digest(told(tiers={"weak": {}}, export={"formats": []})) == run_digest(plain)
    assert len({run_digest(each) for each in (plain, *others)}) == 3


@pytest.mark.parametrize(
    "tables", [{"export": {"formats": ["tflite"]}}, {"tiers": {"weak": {"engine": "tflite"}}}]
)
def test_a_format_that_does_not_exist_is_told_when_the_file_is_read(tables: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"'onnx' or 'executorch' \(found 'tflite'\)"):
        told(**tables)


def test_files_of_bundles_tell_formats_apart() -> None:
    names = [bundle_name("weak", each, name) for each in ("", "first") for name in ("onnx", "executorch")]

    assert names == ["weak.efl", "weak.executorch.efl", "weak.first.efl", "weak.first.executorch.efl"]
