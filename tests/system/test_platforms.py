"""Features that Windows has no calls for are refused by name there, before they fail in the middle."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from edgefl.errors import ConfigError
from edgefl.mirror.blobs import BlobFolder
from edgefl.simulator.trainers.pool import ForkingLauncher
from edgefl.wire.limits import Limits
from edgefl_device.sandbox.process import open_sandboxed
from edgefl_server.torch_process.process import Process
from edgefl_server.workers.process import ProcessLauncher


@pytest.mark.parametrize(
    ("feature", "use"),
    [
        ("a mirror", lambda folder, end: BlobFolder(folder)),
        ("a server", lambda folder, end: Process()),
        ("a worker process", lambda folder, end: ProcessLauncher().start(end)),
        ("`simulation.workers`", lambda folder, end: ForkingLauncher().start(end)),
        (
            "an engine in a process of its own",
            lambda folder, end: open_sandboxed("onnx", 1, 0, pages=folder, memory_bytes=0, limits=Limits()),
        ),
    ],
)
def test_windows_is_refused(
    feature: str,
    use: Callable[[Path, socket.socket], object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    with socket.socket() as end, pytest.raises(ConfigError) as error:
        use(tmp_path, end)
    assert error.value.details == {"feature": feature}
