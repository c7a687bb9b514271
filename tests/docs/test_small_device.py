"""The device of the tutorial: four packages and nothing of edgefl, and the same updates as our own agent, bit for bit."""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from paho.mqtt import publish

import edgefl
from edgefl.data.dataset import write_client
from edgefl.data.datasets import digits
from tests.conftest import BrokerProcess
from tests.docs.documents import DOCS, ROOT, blocks, content
from tests.support.notebook import run_cells

PAGE = DOCS / "tutorials" / "own-device.md"
EXAMPLE = ROOT / "examples" / "small_device.py"
PACKAGES = {"msgspec", "numpy", "onnxruntime", "paho"}


def test_the_page_shows_the_example_as_it_is() -> None:
    shown = "\n".join(block.text for block in blocks(PAGE, "python"))

    assert [line for line in shown.splitlines() if line] == [
        line for line in EXAMPLE.read_text().splitlines() if line
    ]


def test_it_imports_four_packages_and_nothing_of_ours() -> None:
    imports = [node for node in ast.walk(ast.parse(EXAMPLE.read_text())) if isinstance(node, ast.Import)]
    names = {alias.name.partition(".")[0] for node in imports for alias in node.names}

    assert names - set(sys.stdlib_module_names) == PACKAGES
    assert not any(isinstance(node, ast.ImportFrom) for node in ast.walk(ast.parse(EXAMPLE.read_text())))


DOWNLINK = '[downlink]\ncompression = "none"'


def trained(folder: Path, broker: str, weak: str, downlink: str = DOWNLINK) -> edgefl.Run:
    """Train the federation of the page, with a codec that draws noise.

    ``weak`` is what the weak device is: ``ours``, or the page's device as a ``script`` or in a ``notebook``.
    """
    (block,) = [block for block in blocks(PAGE) if block.file == "federation.toml"]
    name = f"small-{folder.name}"
    folder.mkdir()
    file = folder / "federation.toml"
    text = content(block).replace('"small"', f'"{name}"').replace(DOWNLINK, downlink)
    file.write_text(text + '[codec]\nname = "fedpaq"\n')
    data = digits()
    for device, rows in (("strong-0", slice(0, 40)), ("weak-0", slice(40, 90))):
        write_client(folder / f"{device}.npz", data.train_x[rows], data.train_y[rows])
    server = edgefl.Server(file, folder / "out", broker=broker)
    say_nonsense(broker, f"edgefl/v1/{name}/devices/weak-0/acks")
    threading.Thread(target=agent(folder, broker, name, "strong-0").run, daemon=True).start()
    if weak == "ours":
        threading.Thread(target=agent(folder, broker, name, "weak-0").run, daemon=True).start()
        server.run()
        return edgefl.load_run(folder / "out")
    options = ["--id", "weak-0", "--data", "weak-0.npz", "--broker", broker, "--federation", name]
    command = [sys.executable, "-I", str(EXAMPLE), *options]
    cells = [f"import sys; sys.argv = {command[2:]}", *(block.text for block in blocks(PAGE, "python"))]
    with ThreadPoolExecutor() as pool:
        if weak == "script":
            device = pool.submit(subprocess.check_output, command, cwd=folder, text=True)
        else:
            device = pool.submit(printed_by_cells, cells, folder)
        server.run()
        said = device.result(timeout=60)
    assert said.count("accepted") + said.count("declined") == 2, said
    return edgefl.load_run(folder / "out")


def printed_by_cells(cells: list[str], folder: Path) -> str:
    outputs = run_cells(cells, folder, os.environ)
    return "".join(each.text for cell in outputs for each in cell if each.get("name") == "stdout")


def say_nonsense(broker: str, topic: str) -> None:
    """Anybody may send bytes that are no message, and the broker keeps them."""
    host, _, port = broker.partition(":")
    publish.single(topic, b"\xc1 no message", qos=1, retain=True, hostname=host, port=int(port))


def agent(folder: Path, broker: str, federation: str, name: str) -> edgefl.Agent:
    return edgefl.Agent(
        name,
        folder / f"{name}.npz",
        broker=broker,
        federation=federation,
        folder=folder / name,
        until_done=True,
        limits=edgefl.DeviceLimits(tune=False),
    )


@pytest.mark.e2e
@pytest.mark.slow
def test_it_trains_beside_our_agent_with_equal_updates(tmp_path: Path, mosquitto: BrokerProcess) -> None:
    small, ours = (trained(tmp_path / each, str(mosquitto.address), each) for each in ("notebook", "ours"))

    assert [row.reports for row in small.history] == [2, 2]
    assert small.model.keys() == ours.model.keys()
    assert all(np.array_equal(small.model[name], ours.model[name]) for name in ours.model)
    assert small.history[-1].train_loss == pytest.approx(ours.history[-1].train_loss)


@pytest.mark.e2e
@pytest.mark.slow
def test_a_round_that_it_cannot_do_goes_on_without_it(tmp_path: Path, mosquitto: BrokerProcess) -> None:
    patched = '[downlink]\nencoding = "int8"\ncompression = "none"'  # weights of the second round are a patch
    run = trained(tmp_path / "patched", str(mosquitto.address), "script", patched)

    assert [row.reports for row in run.history] == [2, 1]


def test_what_it_leaves_out_is_not_trained_on_wrongly() -> None:
    spec = importlib.util.spec_from_file_location("small_device", EXAMPLE)
    assert spec is not None and spec.loader is not None
    small = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(small)
    task = small.Round.__new__(small.Round)
    task.manifest = {"phases": [{"graph": "full_gradient", "steps": 1, "over_data": True}], "prefix": []}
    task.units = {"head": [{"sha256": "a keyframe"}, {"sha256": "a patch"}]}

    with pytest.raises(NotImplementedError, match="phases over the data"):
        task.train()
    with pytest.raises(NotImplementedError, match="patches"):
        task.weights(["head"])
