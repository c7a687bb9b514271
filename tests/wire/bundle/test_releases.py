"""Releases of runtimes: one rule for manifests and for every agent."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from edgefl.errors import BundleError
from edgefl.wire.bundle.formats import is_older
from edgefl.wire.bundle.manifest import decode_manifest, encode_manifest
from tests.wire.example_manifests import example_manifest

MANIFEST = example_manifest()


@pytest.mark.parametrize(
    ("version", "least", "older"),
    [
        ("1.9.2", "1.15", True),
        ("1.15", "1.9.2", False),
        ("1.15", "1.15.0", False),
        ("1.15.1", "1.15", False),
        ("1.5.1+cpu", "1.5", False),
        ("1.4.0a0+1234", "1.5", True),
        ("1.22.0-dev.2025", "1.23", True),
        ("2", "1.99.99.99", False),
        ("unknown", "1.15", False),
        ("", "1.15", False),
    ],
)
def test_numbers_of_a_version_are_compared_one_by_one(version: str, least: str, older: bool) -> None:
    assert is_older(version, least) is older


def _needing(*releases: str) -> Any:
    graphs = MANIFEST.graphs
    needed = [*releases, *[""] * (len(graphs) - len(releases))]
    changed = [
        msgspec.structs.replace(graph, least_runtime=each) for graph, each in zip(graphs, needed, strict=True)
    ]
    return msgspec.structs.replace(MANIFEST, graphs=tuple(changed))


def test_a_manifest_needs_what_its_newest_graph_needs() -> None:
    assert _needing("1.9", "1.15").least_runtime == "1.15"
    assert MANIFEST.least_runtime == "" and b"least_runtime" not in encode_manifest(MANIFEST)


@pytest.mark.parametrize("release", ["new", "1.", "1.2.3.4.5", "1.5rc1", "-1", "1" * 10])
def test_a_release_that_is_none_is_refused(release: str) -> None:
    with pytest.raises(BundleError, match="needs release"):
        decode_manifest(encode_manifest(_needing(release)))
