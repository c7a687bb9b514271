"""Modules that measured processes must not import, because idle memory would count them."""

from __future__ import annotations

import subprocess
import sys

import pytest

DEVICE = ("step", "graph", "bundle", "mirror")


@pytest.mark.parametrize(
    ("imported", "absent"),
    [
        (", ".join(f"benchmarks.workers.{name}" for name in DEVICE), "torch"),
        ("benchmarks.workers.mirror", "edgefl_server"),
        pytest.param("benchmarks.train_step.eager", "torch._dynamo", marks=pytest.mark.slow),
    ],
)
def test_a_worker_imports_only_its_own_libraries(imported: str, absent: str) -> None:
    script = f"import sys, {imported}; sys.exit({absent!r} in sys.modules)"

    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_the_list_of_commands_needs_no_torch() -> None:
    script = (
        "import sys, typer.main; from benchmarks.__main__ import COMMANDS, overview; "
        "found = typer.main.get_command(overview()).commands; "
        "sys.exit('torch' in sys.modules or [*found] != [*COMMANDS] or not all(c.help for c in found.values()))"
    )

    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
