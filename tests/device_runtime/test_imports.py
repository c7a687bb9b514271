"""A device installs numpy, onnxruntime and paho, and nothing of the server."""

from __future__ import annotations

import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import edgefl_device

HEAVY = (
    "torch",
    "onnx",
    "onnxscript",
    "pydantic",
    "sqlalchemy",
    "sklearn",
    "amqtt",
    "ray",
    "edgefl_server",
    "edgefl_export",
)
MODULES = ["edgefl.wire.mqtt.session", "edgefl.wire.bundle.archive"] + [
    module.name for module in pkgutil.walk_packages(edgefl_device.__path__, "edgefl_device.")
]


def test_no_module_of_the_device_imports_what_only_a_server_has() -> None:
    script = (
        f"import importlib, sys\nfor name in {MODULES!r}: importlib.import_module(name)\n"
        f"print(sorted(set({HEAVY!r}) & set(sys.modules)))"
    )
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=300
    )

    assert found.stdout.strip() == "[]"


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "name",
    [
        "edgefl_device.agent",
        "edgefl_device.round.trainer",
        "edgefl_device.engine.onnx",
        "edgefl_device.engine.executorch",
    ],
)
def test_a_module_imports_on_a_machine_that_has_none_of_it(name: str) -> None:
    """Even an import that is only tried would be found out here."""
    script = f"import sys\nfor heavy in {HEAVY!r}: sys.modules[heavy] = None\nimport {name}"

    subprocess.run([sys.executable, "-c", script], check=True, timeout=300)


def test_the_runtime_names_no_method() -> None:
    methods = ("embracingfl", "heterofl", "fedrolex", "fjord", "depthfl", "fafed", "fedavg")
    folder = Path(edgefl_device.__path__[0])
    found = [
        f"{file.name}: {method}"
        for file in folder.rglob("*.py")
        for method in methods
        if method in file.read_text().lower()
    ]

    assert found == []


@pytest.mark.parametrize(
    ("starts", "loaded"),
    [
        ("import edgefl.wire.mqtt.session", True),
        (
            "from edgefl.cli.device import process\n"
            "from edgefl.wire.mqtt.address import Address\n"
            "told = dict(federation='f', device='d', broker=Address('h', 1), data='/nonexistent', folder=sys.argv[1])\n"
            "try: process.load(); process.run(process.DeviceSettings(**told))\n"
            "except Exception as error: assert 'there is no file' in str(error), error",
            False,
        ),
    ],
    ids=["an importer of the session", "a device"],
)
def test_only_a_device_does_without_what_speaks_http(tmp_path: Path, starts: str, loaded: bool) -> None:
    script = f"import sys\n{starts}\nprint('paho.mqtt.client' in sys.modules, 'http.client' in sys.modules)"

    ran = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], check=True, timeout=300, capture_output=True, text=True
    )

    assert ran.stdout.split() == ["True", str(loaded)]
