"""A door with a list and one without, and two who come to them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from edgefl.wire.mqtt.envelope import MessageSigner
from tests.server.identity.lab import Lab
from tests.wire.mqtt.speakers import speaker_in


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    gate = Lab(tmp_path / "devices.sqlite")
    yield gate
    gate.registry.close()


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Lab]:
    gate = Lab(tmp_path / "devices.sqlite", enrolled=True)
    yield gate
    gate.registry.close()


@pytest.fixture
def phone(tmp_path: Path) -> MessageSigner:
    return speaker_in(tmp_path / "phone.key")


@pytest.fixture
def thief(tmp_path: Path) -> MessageSigner:
    return speaker_in(tmp_path / "thief.key", first=1 << 40)
