"""Which devices of a fleet are asked for a profile, and for that of which bundle."""

from __future__ import annotations

import threading
from dataclasses import replace

import msgspec
import pytest

from edgefl.wire.bundle.archive import BundleArchive
from edgefl.wire.mqtt.messages import Hello
from edgefl_server.profiling.fleet import FleetProfiler, ProfilingOptions
from edgefl_server.profiling.reports import FleetReport, by_tier, tier_for
from tests.conftest import BrokerProcess
from tests.server.profiling.phones import STRONG, WEAK, MakePhone, Profile, by_name, measures
from tests.support.errors import ConfigError, refuses
from tests.wire.mqtt.events import PATIENCE_S


def test_a_device_that_is_named_is_waited_for_and_others_are_not_asked(
    broker: BrokerProcess, phones: MakePhone, wanted: ProfilingOptions
) -> None:
    other = phones("other", measures)
    reports: list[FleetReport] = []
    profiler = FleetProfiler(broker.address, replace(wanted, devices=frozenset({"phone"})))
    asking = threading.Thread(target=lambda: reports.append(profiler.run()))
    asking.start()
    threading.Event().wait(2 * wanted.settle_s)
    assert asking.is_alive()

    phones("phone", measures)
    asking.join(PATIENCE_S)

    assert [(row.device, row.state) for row in reports[0].devices] == [("phone", "done")]
    assert other.requests == []


def test_an_unknown_device_is_reported_as_unknown(broker: BrokerProcess, wanted: ProfilingOptions) -> None:
    named = replace(wanted, devices=frozenset({"nobody"}), timeout_s=1.0)

    [row] = FleetProfiler(broker.address, named).run().devices

    assert (row.device, row.state) == ("nobody", "unknown")


def test_each_device_gets_the_bundle_of_its_tier(phones: MakePhone, profile: Profile) -> None:
    phones("phone", measures, tier="strong")
    phones("weak-3", measures, tier="")
    lost = phones("lost", measures, tier="moderate")

    found = by_name(profile(offered=by_tier([WEAK, STRONG])))

    assert found["phone"].profile is not None
    assert found["phone"].profile.bundle == STRONG.ref(1024).sha256
    assert found["weak-3"].profile is not None
    assert found["weak-3"].profile.bundle == WEAK.ref(1024).sha256
    assert (found["lost"].state, found["lost"].reason) == ("skipped", "no-tier")
    assert lost.requests == []


def test_two_bundles_for_the_same_tier_are_refused() -> None:
    other = BundleArchive(msgspec.structs.replace(WEAK.manifest, batch=99), WEAK.blobs)

    with refuses(ConfigError, tier="weak", format="onnx"):
        by_tier([WEAK, other])
    assert by_tier([WEAK, WEAK]) == {"weak": {"onnx": WEAK}}


@pytest.mark.parametrize(("memory", "tier"), [(10, ""), (100, "weak"), (1000, "strong")])
def test_a_device_without_a_tier_gets_the_largest_that_fits_its_memory(memory: int, tier: str) -> None:
    def needs(held: BundleArchive, size: int) -> BundleArchive:
        graphs = tuple(msgspec.structs.replace(graph, planned_bytes=size) for graph in held.manifest.graphs)
        return BundleArchive(msgspec.structs.replace(held.manifest, graphs=graphs), held.blobs)

    hello = Hello(agent="", memory_bytes=memory, cores=1, samples=1, engines={})

    assert tier_for(by_tier([needs(WEAK, 50), needs(STRONG, 500)]), "phone", hello) == tier
    assert tier_for(by_tier([WEAK, STRONG]), "phone", hello) == ""
    assert tier_for(by_tier([STRONG]), "phone", hello) == "strong"
