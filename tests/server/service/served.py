"""What the tests of the service share."""

from __future__ import annotations

from collections.abc import Callable

from tests.server.fleet import (
    ScriptedDevice,
)

MakeDevice = Callable[..., ScriptedDevice]
