"""The device in JavaScript: npm packages and nothing of edgefl, in a federation of two codecs beside our own agent."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import threading
from pathlib import Path

import pytest

import edgefl
from edgefl.data.dataset import write_client
from edgefl.data.datasets import digits
from edgefl_conformance.vectors.write import GOLDEN
from tests.conftest import BrokerProcess
from tests.docs.documents import DOCS, ROOT, blocks, content
from tests.docs.test_small_device import say_nonsense
from tests.web.node import HERE as WEB
from tests.web.node import require_node

PAGE = DOCS / "tutorials" / "own-device.md"
EXAMPLE = ROOT / "examples" / "device.mjs"


def test_it_imports_five_packages_that_its_first_lines_name() -> None:
    text = EXAMPLE.read_text()
    packages = {name for name in re.findall(r'^import .* from "(.+)";$', text, re.M) if ":" not in name}
    (install,) = re.findall(r"^// npm install (.*)$", text, re.M)

    assert (
        packages
        == set(install.split())
        == set(json.loads((WEB / "package.json").read_text())["dependencies"])
    )


DECODE = """
import { deepStrictEqual } from "node:assert";
import { readFileSync } from "node:fs";
import { decode } from "@msgpack/msgpack";

const plain = (value) => {
  if (typeof value === "bigint") return value > 2n ** 53n ? { int: String(value) } : Number(value);
  if (value instanceof Uint8Array) return { hex: Buffer.from(value).toString("hex") };
  if (Array.isArray(value)) return value.map(plain);
  if (value === null || typeof value !== "object") return value;
  return Object.fromEntries(Object.entries(value).map(([key, each]) => [key, plain(each)]));
};
for (const [name, value] of Object.entries(JSON.parse(readFileSync(`${process.argv[2]}/values.json`))))
  deepStrictEqual(plain(decode(readFileSync(`${process.argv[2]}/${name}`), { useBigInt64: true })), value, name);
"""


@pytest.mark.slow
def test_the_golden_values_are_what_another_language_reads(tmp_path: Path) -> None:
    require_node()
    (tmp_path / "decode.mjs").write_text(DECODE)
    (tmp_path / "node_modules").symlink_to(WEB / "node_modules")
    ran = subprocess.run(
        ["node", "decode.mjs", GOLDEN], cwd=tmp_path, capture_output=True, timeout=60, check=False
    )

    assert ran.returncode == 0, ran.stderr


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.parametrize("codec", ["dense", "fedbat"])
def test_it_trains_beside_our_agent(tmp_path: Path, mosquitto: BrokerProcess, codec: str) -> None:
    require_node()
    (block,) = [block for block in blocks(PAGE) if block.file == "federation.toml"]
    name, broker, data = f"node-{codec}", str(mosquitto.address), digits()
    text = content(block).replace('"small"', f'"{name}"').replace('compression = "none"', "")
    (tmp_path / "federation.toml").write_text(f'{text}[codec]\nname = "{codec}"\n')
    write_client(tmp_path / "strong.npz", data.train_x[:40], data.train_y[:40])
    samples = {"x": data.train_x[40:90].tolist(), "y": data.train_y[40:90].tolist()}
    (tmp_path / "data.json").write_text(json.dumps(samples))
    shutil.copy(EXAMPLE, tmp_path)
    (tmp_path / "node_modules").symlink_to(WEB / "node_modules")
    server = edgefl.Server(tmp_path / "federation.toml", tmp_path / "out", broker=broker)
    say_nonsense(broker, f"edgefl/v1/{name}/devices/weak-0/acks")
    ours = edgefl.Agent(
        "strong-0",
        tmp_path / "strong.npz",
        broker=broker,
        federation=name,
        folder=tmp_path / "strong",
        until_done=True,
    )
    threading.Thread(target=ours.run, daemon=True).start()
    command = ["node", "device.mjs", "--id", "weak-0", "--broker", broker, "--federation", name]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as device:
        try:
            server.run()
            said, _ = device.communicate(timeout=60)
        finally:
            device.kill()

    assert said.count(b"as weak: accepted") == 2, said
    assert device.returncode == 0, said
    assert [row.reports for row in edgefl.load_run(tmp_path / "out").history] == [2, 2]
