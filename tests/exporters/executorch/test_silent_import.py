"""What somebody who exports sees of ExecuTorch's own libraries: nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest

_LOADED = "from exporters.executorch.silent_import import portable_lib; portable_lib()._get_operator_names()"


@pytest.mark.slow
def test_the_libraries_are_loaded_without_a_word() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", _LOADED], capture_output=True, text=True, timeout=300, check=True
    )

    assert ran.stdout == ran.stderr == ""


@pytest.mark.slow
def test_errors_are_heard_again_after_it() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", f"{_LOADED}; import logging, os; logging.warning('a'); os.write(2, b'b')"],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )

    assert ran.stderr == "WARNING:root:a\nb"
