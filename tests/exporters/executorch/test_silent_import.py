"""What somebody who exports sees of ExecuTorch's own libraries: nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest

_LOADED = (
    "from edgefl_export.executorch.silent_import import portable_lib; portable_lib()._get_operator_names()"
)


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


_LATER = """
import sys
from edgefl_export.executorch.program import write
from edgefl_export.executorch.silent_import import portable_lib
portable_lib()
packages = "executorch.exir", "executorch.backends.xnnpack", "torchao"
early = [name for name in packages if name in sys.modules and not is_unused(name)]
import executorch.exir
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import schema, to_edge
print(early, executorch.exir.schema is schema is sys.modules["executorch.exir.schema"], callable(to_edge))
"""


@pytest.mark.slow
def test_the_packages_load_where_somebody_asks_for_them() -> None:
    program = f"from edgefl.system.lazy_modules import is_unused\n{_LATER}"
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=True
    )

    assert ran.stdout == "[] True True\n"
