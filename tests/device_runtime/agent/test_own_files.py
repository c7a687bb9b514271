"""An agent whose data are files: read as the bundle says, by what came from the broker with it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np

from edgefl.data.text.vocabulary import words
from edgefl.wire.bundle.readers import Reader, TableReader, TextReader
from edgefl.wire.tensors import Array
from edgefl_device.data.samples import LocalData
from edgefl_device.engine.select import open_engine
from edgefl_device.round.offline import train_round
from tests.device_runtime import tiny
from tests.device_runtime.agent.agents import StartAgent
from tests.device_runtime.agent.scripted import ScriptedServer, weights_of
from tests.device_runtime.data.files import written
from tests.device_runtime.tiny import World

NAMES = ("calm", "loud")


def world(reader: Reader, *more: bytes) -> World:
    """A round of the tiny bundle, whose samples are read so; ``more`` are blobs beside it."""
    bundle = tiny.make_bundle()
    data = msgspec.structs.replace(bundle.manifest.data, names=NAMES, reader=reader)
    blobs = dict(bundle.blobs)
    made = World(tiny.Bundle(msgspec.structs.replace(bundle.manifest, data=data), blobs))
    for content in more:
        made.add(content)
    return made


def expected(x: Array, y: Array) -> dict[str, Array]:
    weights = {name: array for part in tiny.weights().values() for name, array in part.items()}
    data = LocalData(x.astype(np.float32), y, "arrays")
    return train_round(tiny.make_bundle(), weights, data, open_engine("onnx"), seed=7).update


def test_left_out_rows_are_told_each_round(server: ScriptedServer, start: StartAgent, tmp_path: Path) -> None:
    local = tiny.local()
    lines = [
        f"{a!r},{b!r},{c!r},{NAMES[label]}\n"
        for (a, b, c), label in zip(local.x.tolist(), local.y.tolist(), strict=True)
    ]
    own = written(tmp_path / "own.csv", "a,b,c,mood\n" + "".join(lines) + "1,2,?,calm\n")
    agent = start(data=own, bad_rows="skip")
    server.open(world(TableReader(columns=("a", "b", "c"), label="mood")))

    found = weights_of(server.update())
    for name, array in expected(local.x, local.y).items():
        np.testing.assert_allclose(found[name], array, rtol=1e-6)
    assert f"1 row is left out, {own}, line 12: column 'c' is '?'" in agent.event("round").text


def test_texts_use_the_blob_tokenizer(server: ScriptedServer, start: StartAgent, tmp_path: Path) -> None:
    known = words(["a loud bang", "the calm sea", "a calm evening"], 20)
    texts = ["the sea", "a loud BANG", "a calm evening", "unheard sea", "bang"] * 2
    labels = [0, 1, 0, 0, 1] * 2
    made = world(TextReader())
    ref = made.add(known.tokenizer)
    reader = TextReader(tokenizer=ref)
    lines = [f"{NAMES[label]}\t{text}\n" for label, text in zip(labels, texts, strict=True)]
    start(data=written(tmp_path / "own.tsv", "".join(lines)))
    server.open(world(reader, known.tokenizer))

    x = np.array([(row + [0] * 3)[:3] for row in known.encoder()(texts)])
    found = weights_of(server.update())
    for name, array in expected(x, np.array(labels)).items():
        np.testing.assert_allclose(found[name], array, rtol=1e-6)


def test_an_unknown_class_is_named_locally(server: ScriptedServer, start: StartAgent, tmp_path: Path) -> None:
    agent = start(data=written(tmp_path / "own.csv", "a,b,c,mood\n1,2,3,angry\n"))
    server.open(world(TableReader(columns=("a", "b", "c"), label="mood")))

    error = agent.event("data").text
    assert "own.csv, line 2: no class is called 'angry'; the federation's are calm, loud" in error
    assert server.decline().reason == "wrong-data"
