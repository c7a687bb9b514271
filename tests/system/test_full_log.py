"""Where even the error cannot be written, such as a log on a full disk, the exit code still says what happened."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from edgefl.errors import ConfigError, StoreError


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["broker", "--broker-kind", "none"], ConfigError.exit_code),
        (["device", "--id", "a", "--data", "{0}", "--store", "/dev/null/x"], StoreError.exit_code),
    ],
    ids=["command", "device"],
)
def test_an_unwritable_error_keeps_its_code(arguments: list[str], code: int, tmp_path: Path) -> None:
    data = tmp_path / "data.npz"
    np.savez(data, x=np.zeros((4, 2), np.float32), y=np.zeros(4, np.int64))
    command = [sys.executable, "-m", "edgefl", *(each.format(data) for each in arguments)]
    with open("/dev/full", "wb") as full:
        ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=full, timeout=300, check=False)

    assert ended.returncode == code
