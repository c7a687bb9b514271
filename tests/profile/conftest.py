"""A profile of the tiny bundle, measured once, and a browser."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from device_runtime.profile.whole import Settings, profile_bundle
from edgefl.wire.bundle.profiles import BundleProfile
from tests.device_runtime import tiny
from tests.profile.browser import Browser


@pytest.fixture(scope="session")
def measured() -> BundleProfile:
    return profile_bundle(tiny.make_bundle(), Settings(repeat=5, samples=10))


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with Browser() as opened:
        yield opened
