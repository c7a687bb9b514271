"""A device's own files through a round: the federation says how they become samples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import edgefl
from edgefl.cli import app
from edgefl.config import parse
from edgefl.data.text.vocabulary import words
from edgefl.setup.data import open_data
from edgefl.setup.model import data_spec
from edgefl.wire.blobs import BlobRef, decompress
from edgefl.wire.bundle.manifest import decode_manifest
from edgefl.wire.bundle.readers import ImageSpec, Reader, SeriesSpec, SoundSpec, TableSpec, TextSpec
from edgefl.wire.limits import Limits
from edgefl.wire.tensors import Array
from edgefl_server.publish.announcements import offer_bundle
from edgefl_server.publish.publisher import Publisher
from tests.cli.runner import runner
from tests.device_runtime.data.files import image, sound, written
from tests.server.publish.test_publisher import TOPICS, Broker
from tests.support.errors import ConfigError, DataError, ExportError, refuses

NAMES = ("ant", "bee", "cow")


def looks(classes: int = 3) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(32, classes))


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 4)
        self.head = nn.Linear(24, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(x).flatten(1))  # type: ignore[no-any-return]


def pictures(count: int) -> tuple[Array, Array]:
    rng = np.random.default_rng(3)
    return rng.integers(0, 255, (count, 1, 4, 8), dtype=np.uint8), rng.integers(0, 3, count)


@pytest.fixture(scope="module")
def bundle() -> edgefl.Bundle:
    data = edgefl.data.Dataset.of(*pictures(20), *pictures(20), name="animals", names=NAMES)
    return edgefl.compile(
        looks, data=data, training=edgefl.Training(algorithm=edgefl.algorithms.SGD(lr=0.1, steps=2, batch=4))
    )


@pytest.fixture(scope="module")
def sentences() -> tuple[edgefl.Bundle, Any]:
    known = words(["the cat sat on the mat", "a dog ate"], 20)
    x, y = np.random.default_rng(0).integers(0, 20, (8, 6)), np.arange(8) % 2
    data = edgefl.data.Dataset.of(
        x, y, x, y, below=20, names=("bad", "good"), reader=TextSpec(), tokenizer=known.tokenizer
    )
    return edgefl.compile(
        Words, data=data, training=edgefl.Training(algorithm=edgefl.algorithms.SGD(lr=0.1, steps=2, batch=2))
    ), known.encoder()


def folders(path: Path, x: Array, y: Array) -> Path:
    for row, (pixels, label) in enumerate(zip(x, y, strict=True)):
        image(path / NAMES[label] / f"{row:02}.png", pixels[0])
    return path


def same(one: Any, other: Any) -> None:
    assert one.update.keys() == other.update.keys()
    for name in one.update:
        np.testing.assert_array_equal(one.update[name], other.update[name])


# -- rounds ----------------------------------------------------------------------------------------------------


def test_a_round_over_png_files_is_the_round_over_their_pixels(bundle: edgefl.Bundle, tmp_path: Path) -> None:
    x, y = pictures(10)
    order = np.argsort(y, kind="stable")
    weights = bundle.initial_weights()

    files = edgefl.train_round(bundle, weights, folders(tmp_path / "own", x, y), seed=5)

    same(files, edgefl.train_round(bundle, weights, x[order], y[order], seed=5))
    assert files.samples == 10


def test_texts_are_read_by_the_bundles_tokenizer(
    sentences: tuple[edgefl.Bundle, Any], tmp_path: Path
) -> None:
    made, encode = sentences
    path = made.save(tmp_path / "words.efl")
    texts = ["The cat ate.", "a dog on the mat, a cat", "sat"]
    x = np.array([(row + [0] * 6)[:6] for row in encode(texts)])
    lines = [f"{name}\t{text}\n" for name, text in zip(("good", "bad", "good"), texts, strict=True)]
    own = written(tmp_path / "own.tsv", "".join(lines))
    weights = made.initial_weights()

    same(edgefl.train_round(path, weights, own), edgefl.train_round(path, weights, x, np.array([1, 0, 1])))


def test_what_texts_are_read_by_travels_with_the_bundle(sentences: tuple[edgefl.Bundle, Any]) -> None:
    contents = sentences[0].contents
    publisher = Publisher(Broker(), TOPICS, 1024, "zstd")

    def fetched(ref: BlobRef) -> bytes:
        return decompress(ref, publisher.encoded(ref.sha256), Limits().max_blob_bytes)

    manifest = decode_manifest(fetched(offer_bundle(publisher, contents)))
    sent, made = manifest.data.tokenizer, contents.manifest.data.tokenizer
    assert sent is not None and made is not None
    assert sent.codec == "zstd"
    assert fetched(sent) == contents.blobs[made.sha256]


def test_bad_rows_are_skipped_where_the_device_wants_that(bundle: edgefl.Bundle, tmp_path: Path) -> None:
    own = folders(tmp_path, *pictures(10))
    written(own / "ant" / "broken.jpg", "no image")
    weights = bundle.initial_weights()

    with pytest.raises(DataError, match=r"ant/broken\.jpg: is no image"):
        edgefl.train_round(bundle, weights, own)
    assert edgefl.train_round(bundle, weights, own, limits=edgefl.DeviceLimits(bad_rows="skip")).samples == 10
    with pytest.raises(ConfigError, match="bad rows cannot be 'drop': one of refuse, skip"):
        edgefl.train_round(bundle, weights, own, limits=edgefl.DeviceLimits(bad_rows="drop"))
    with pytest.raises(ConfigError, match="argument `y` is missing"):
        edgefl.train_round(bundle, weights, pictures(2)[0])


class Hears(nn.Module):
    """Two convolutions, small enough to compile in a second."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(2 * 6 * 5, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


MEL = {"rate": 8000, "length": 400, "mels": 8, "window": 100, "step": 50}


@pytest.mark.parametrize("target", ["onnx", pytest.param("executorch", marks=pytest.mark.slow)])
def test_a_round_over_wav_files_reads_them_by_a_graph_of_the_bundle(target: Any, tmp_path: Path) -> None:
    """The same on a device as where the features were made by torch."""
    waves = (np.random.default_rng(1).normal(size=(6, 400)) * 6000).astype(np.int16)
    y = np.array([0, 0, 0, 1, 1, 1])
    x = edgefl.models.LogMel(**MEL)(torch.from_numpy(waves.astype(np.float32) / 32768)).numpy()
    data = edgefl.data.Dataset.of(x, y, x, y, names=("off", "on"), reader=SoundSpec(**MEL))
    made = edgefl.compile(
        Hears,
        data=data,
        training=edgefl.Training(algorithm=edgefl.algorithms.SGD(lr=0.1, steps=2, batch=2)),
        options=edgefl.CompileOptions(target=target),
    )
    path = made.save(tmp_path / "sounds.efl")
    for row, (samples, label) in enumerate(zip(waves, y, strict=True)):
        sound(tmp_path / "own" / ("off", "on")[label] / f"{row}.wav", samples)
    weights = made.initial_weights()

    assert made.manifest.graph("features").outputs[0].shape == (1, *x.shape[1:])
    files = edgefl.train_round(path, weights, tmp_path / "own")
    arrays = edgefl.train_round(path, weights, x, y)
    for name in files.update:
        np.testing.assert_allclose(files.update[name], arrays.update[name], atol=2e-5)
    assert made.verify(seed=2).ok
    report = edgefl.check_data(tmp_path / "own", path)
    assert report.fits and report.inputs[0].shape == x.shape[1:]


def test_features_of_another_shape_than_the_samples_are_refused() -> None:
    x, y = np.zeros((4, 1, 8, 6), np.float32), np.arange(4) % 2
    data = edgefl.data.Dataset.of(x, y, x, y, reader=SoundSpec(**MEL))

    with refuses(ExportError, found=(1, 8, 6), expected=(1, 8, 7)):
        edgefl.compile(lambda: nn.Sequential(nn.Flatten(), nn.Linear(48, 2)), data=data)


# -- the check -------------------------------------------------------------------------------------------------


def test_the_check_says_what_is_there_and_what_does_not_fit(bundle: edgefl.Bundle, tmp_path: Path) -> None:
    x, y = pictures(10)
    own = folders(tmp_path / "own", x, y)
    report = edgefl.check_data(own, bundle)

    assert report.fits and (report.rows, report.bad_rows) == (10, 0)
    assert report.classes == dict(zip(NAMES, np.bincount(y, minlength=3).tolist(), strict=True))
    seen = report.inputs[0]
    assert (seen.name, seen.dtype, seen.shape) == ("x", "float32", (1, 4, 8))
    data = bundle.manifest.data
    assert seen.most == pytest.approx(float(x.max()) * data.scale + data.shift, rel=1e-5)

    for number in range(25):
        written(own / "cow" / f"broken{number:02}.png", "no image")
    report = edgefl.check_data(own, bundle)
    assert (report.fits, report.rows, report.bad_rows, len(report.problems)) == (False, 10, 25, 20)


def test_the_check_of_a_function_and_of_data_that_cannot_be_used(bundle: edgefl.Bundle) -> None:
    x, y = pictures(4)
    report = edgefl.check_data(lambda: (x, np.array([0, 1, 5, 2])), bundle)

    assert (report.rows, report.bad_rows) == (3, 1)
    assert report.problems[0].text == "y has 5, the model takes whole numbers from 0 to 2"
    wrong = edgefl.check_data(lambda: (x[:, :, :2], y), bundle)
    assert not wrong.fits and "samples have shape (1, 2, 8), the model takes (1, 4, 8)" in wrong.error


def test_the_command_prints_the_report_and_exits_as_it_says(bundle: edgefl.Bundle, tmp_path: Path) -> None:
    own, path = folders(tmp_path / "own", *pictures(10)), bundle.save(tmp_path / "b.efl")
    ran = runner().invoke(app, ["data", "check", str(own), "--bundle", str(path)])
    assert ran.exit_code == 0, ran.output
    assert "every row fits" in ran.stdout and "bee" in ran.stdout

    image(own / "wasp" / "a.png", np.zeros((4, 8), np.uint8))
    ran = runner().invoke(app, ["data", "check", str(own), "--bundle", str(path)])
    assert ran.exit_code == DataError.exit_code
    assert "--bad-rows skip leaves these out" in ran.stdout
    ran = runner().invoke(app, ["data", "check", str(own), "--bundle", str(path), "--json"])
    told = json.loads(ran.stdout)
    assert (ran.exit_code, told["fits"], told["rows"]) == (DataError.exit_code, False, 10)
    assert told["problems"][0]["text"] == "no class is called 'wasp'; the federation's are ant, bee, cow"


# -- what the federation says ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "reader",
    [{"kind": "table", "columns": ["a", "b"], "label": "y"}, TableSpec(columns=("a", "b"), label="y")],
)
def test_a_federation_says_how_files_are_read(reader: Any, tmp_path: Path) -> None:
    x, y = np.random.default_rng(0).normal(size=(6, 2)).astype(np.float32), np.arange(6) % 2
    file = edgefl.data.Dataset.of(x, y, x, y).save(tmp_path / "d.npz")
    made = edgefl.federation("mlp", data=edgefl.config.DataTable(name="file", file=str(file), reader=reader))
    again = parse(made.model_dump(exclude_unset=True), source="again")

    assert open_data(made).reader == TableSpec(columns=("a", "b"), label="y") == open_data(again).reader


@pytest.mark.parametrize(
    ("reader", "message"),
    [
        ({"kind": "video"}, "no such reader: Invalid value 'video'"),
        ({"columns": ["a"]}, "missing required field `kind`"),
        ({"kind": "sound", "rate": 8000}, "missing required field `length`"),
        ({"kind": "series", "columns": ["a"], "window": 8, "step": 0}, "step is 0, and at least 1"),
    ],
)
def test_a_reader_that_cannot_be_used_is_named_with_its_key(reader: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"data\.reader.*{message}"):
        parse({"data": {"reader": reader}}, source="fed.toml")


@pytest.mark.parametrize(
    "reader", [TextSpec(mask="m"), SeriesSpec(columns=("a",), window=4, step=2), ImageSpec(white=9), None]
)
def test_a_dataset_keeps_its_reader_in_its_file(reader: Reader | None, tmp_path: Path) -> None:
    x, y = pictures(4)
    made = edgefl.data.Dataset.of(
        x, y, x, y, names=NAMES, classes=3, reader=reader, tokenizer=b"{}" if reader else b""
    )
    read = edgefl.data.Dataset.load(made.save(tmp_path / "d.npz"))

    assert (read.reader, read.tokenizer, read.names) == (made.reader, made.tokenizer, NAMES)


def test_a_federation_of_texts_tells_its_devices_how_it_reads_them(tmp_path: Path) -> None:
    written(tmp_path / "ag_news" / "train.csv", '1,Cup,"A late goal wins"\n2,Shares,"Prices fall late"\n' * 3)
    written(tmp_path / "ag_news" / "test.csv", '2,Cup,"A goal"\n')
    table = {"name": "ag_news", "dir": str(tmp_path), "length": 6, "vocabulary": 30, "mask": True}
    data = open_data(parse({"data": table}, source="fed.toml"))

    assert data.reader == TextSpec(mask="attention_mask")
    assert b"late" in data.tokenizer and len(data.names) == 4
    assert open_data(parse({"data": {**table, "tokens": "bytes"}}, source="fed.toml")).tokenizer == b""


def test_classes_have_as_many_names() -> None:
    x, y = pictures(9)
    with pytest.raises(DataError, match="own data: 3 classes have as many different names, found ant, bee"):
        edgefl.data.Dataset.of(x, y, x, y, names=("ant", "bee"))


def test_pixels_that_do_not_reach_255_say_what_white_is() -> None:
    x, y = pictures(9)
    data = edgefl.data.Dataset.of(x // 16, y, x // 16, y)

    assert data_spec(data).reader == ImageSpec(white=15)
