"""Formats and options of deployed files, and programs that read nothing but a file's own metadata."""

from __future__ import annotations

import json
import wave
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from PIL import Image, ImageOps
from torch import Tensor, nn

from edgefl.cli import app
from edgefl.contract.tensors import TensorSpec
from edgefl.data.dataset import Dataset
from edgefl.data.text.vocabulary import words
from edgefl.errors import ConfigError
from edgefl.lab.deployment import Deployment, DeploymentBuilder
from edgefl.lab.facts import WeightsOrigin
from edgefl.models.layers.log_mel import LogMel
from edgefl.models.spec import ModelSpec
from edgefl.models.split import split
from edgefl.submodels.output_side.submodel import OutputSide
from edgefl.wire.bundle.readers import SoundSpec, TableSpec, TextSpec
from edgefl.wire.images import import_pillow, read_pixels
from edgefl.wire.tensors import Array
from edgefl_export.deploy.target import DeployTarget, files_of, refuse_existing, target_of
from tests.cli.runner import runner
from tests.docs.documents import blocks
from tests.pairs import slow
from tests.support.arrays import weights_of

NAMES = ("cat", "dog", "owl")
GUIDE = Path(__file__).resolve().parents[2] / "docs/models/deploy.md"


class Pictures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 3)

    def forward(self, image: Tensor) -> Tensor:
        return self.head(self.norm(self.conv(image)).relu().mean((2, 3)))


class Flat(nn.Module):
    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.hidden, self.head = nn.Linear(inputs, 8), nn.Linear(8, 3)

    def forward(self, features: Tensor) -> Tensor:
        return self.head(self.hidden(features.flatten(1)).relu())


class Words(nn.Module):
    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(vocabulary, 8), nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.words(tokens).mean(1))


def spec_of(module: nn.Module, data: Dataset) -> ModelSpec:
    dtype = torch.int64 if data.below else torch.float32
    return split(module, sample=TensorSpec(data.shape, dtype, data.below or None), classes=3)


def made(module: nn.Module, data: Dataset, **target: Any) -> Deployment:
    spec = spec_of(module, data)
    weights = weights_of(spec)
    return DeploymentBuilder(
        spec, data, weights, bn_eval="moving" if isinstance(module, Pictures) else "frozen"
    ).deployment(OutputSide(spec, 0), target=DeployTarget(**target), origin=WeightsOrigin("fed", "run-1", 7))


def labels(rows: int) -> Array:
    return np.arange(rows) % 3


def pictures(white: int = 255) -> Dataset:
    x = np.random.default_rng(1).integers(0, white + 1, (24, 3, 12, 10)).astype(np.uint8)
    return Dataset.of(x, labels(24), x, labels(24), names=NAMES)


def metadata(model: bytes) -> tuple[onnxruntime.InferenceSession, dict[str, Any]]:
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    texts = session.get_modelmeta().custom_metadata_map
    return session, {key: json.loads(text) if text[:1] in ("[", "{") else text for key, text in texts.items()}


# -- programs that know a file's metadata alone ----------------------------------------------------------------


def classify(model: bytes, prepare: Callable[[Mapping[str, Any]], Array]) -> tuple[str, Array]:
    """Return the class and the logits of one sample, which ``prepare`` makes by the recipe in the metadata."""
    session, facts = metadata(model)
    port = facts["inputs"][0]
    x = prepare(port["preprocessing"]).astype(port["dtype"])[None]
    logits = session.run([facts["output"]["name"]], {port["name"]: x})[0][0]
    return facts["classes"][int(logits.argmax())], logits


def pixels(path: Path) -> Callable[[Mapping[str, Any]], Array]:
    def prepare(recipe: Mapping[str, Any]) -> Array:
        with Image.open(path) as image:
            image.draft(recipe["channels"], (recipe["jpeg_draft"],) * 2)
            upright = ImageOps.exif_transpose(image).convert(recipe["channels"])
        if recipe["resize"] != "inside the file":
            rows = upright.resize((recipe["width"], upright.height), Image.Resampling.BILINEAR)
            upright = rows.resize((recipe["width"], recipe["height"]), Image.Resampling.BILINEAR)
        array = np.asarray(upright)
        if recipe["kind"] == "pixels":
            return array
        array = (array.astype(np.int32) * recipe["white"] + 127) // 255
        return np.moveaxis(array * np.float32(recipe["scale"]) + np.float32(recipe["shift"]), 2, 0)

    return prepare


@pytest.mark.sample(1)
@pytest.mark.parametrize(("inside", "white"), [(False, 255), (False, 16), (True, 16)])
def test_a_jpeg_is_classified_by_what_the_file_says(inside: bool, white: int, tmp_path: Path) -> None:
    torch.manual_seed(5)
    module, data = Pictures().eval(), pictures(white)
    path = tmp_path / "photo.jpg"
    exif = Image.Exif()
    exif[0x0112] = 6  # lies on its side
    noise = np.random.default_rng(0).integers(0, 256, (9, 7, 3)).astype(np.uint8)
    Image.fromarray(noise).resize((90, 70)).save(path, exif=exif)

    model = made(module, data, preprocessing=inside).artifact.model
    found, logits = classify(model, pixels(path))

    device = np.moveaxis(read_pixels(import_pillow(), path, "RGB", (10, 12)), 2, 0)
    device = (device.astype(np.int32) * white + 127) // 255
    expected = module(torch.from_numpy(data.read(device[None])))[0]
    np.testing.assert_allclose(logits, expected.detach().numpy(), atol=0.02 if inside else 1e-5)
    assert found == NAMES[int(expected.argmax())]
    if not inside:
        (tmp_path / "photos.onnx").write_bytes(model)
        page: dict[str, Any] = {}
        exec(next(blocks(GUIDE, "python")).text, page)
        assert page["classify"](str(tmp_path / "photos.onnx"), str(path)) == found


SOUND = SoundSpec(rate=800, length=400, mels=6, window=64, step=32)


def log_mels(path: Path) -> Callable[[Mapping[str, Any]], Array]:
    def prepare(recipe: Mapping[str, Any]) -> Array:
        with wave.open(str(path)) as file:
            assert file.getframerate() == recipe["rate"]
            raw = np.frombuffer(file.readframes(file.getnframes()), "<i2").reshape(-1, file.getnchannels())
        sound = np.zeros(recipe["length"])
        heard = (raw / 32768).mean(1)[: recipe["length"]]
        sound[: len(heard)] = heard
        if "mels" not in recipe:
            return sound
        window, step, rate = recipe["window"], recipe["step"], recipe["rate"]
        hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(window) / window)
        starts = np.arange(recipe["frames"]) * step
        power = np.abs(np.fft.rfft(np.stack([sound[at : at + window] * hann for at in starts]))) ** 2
        mel = np.linspace(0, 2595 * np.log10(1 + rate / 2 / 700), recipe["mels"] + 2)
        edges = 700 * (10 ** (mel / 2595) - 1)
        hertz = np.arange(window // 2 + 1) * rate / window
        low, middle, high = (edges[at : at + recipe["mels"], None] for at in range(3))
        bank = np.minimum((hertz - low) / (middle - low), (high - hertz) / (high - middle)).clip(0)
        return np.log(bank @ power.T + recipe["floor"])[None]

    return prepare


@pytest.mark.sample(1)
@pytest.mark.parametrize("inside", [False, True])
def test_a_wav_is_classified_by_what_the_file_says(inside: bool, tmp_path: Path) -> None:
    torch.manual_seed(5)
    random, features = np.random.default_rng(2), LogMel.of(SOUND)
    x = features(torch.from_numpy(random.uniform(-1, 1, (20, 400)).astype(np.float32))).numpy()
    data = Dataset.of(x, labels(20), x, labels(20), names=NAMES, reader=SOUND)
    module = Flat(x[0].size)
    path, raw = tmp_path / "word.wav", random.integers(-20000, 20000, (300, 2)).astype("<i2")
    with wave.open(str(path), "wb") as file:
        file.setnchannels(2)
        file.setsampwidth(2)
        file.setframerate(800)
        file.writeframes(raw.tobytes())

    deployed = made(module, data, preprocessing=inside)
    found, logits = classify(deployed.artifact.model, log_mels(path))

    from edgefl_device.data.media import wave_of

    expected = module(features(torch.from_numpy(wave_of(path, SOUND))[None]))[0]
    np.testing.assert_allclose(logits, expected.detach().numpy(), rtol=1e-3, atol=1e-3)
    assert found == NAMES[int(expected.argmax())]
    assert deployed.facts["inputs"][0]["shape"] == ([1, 400] if inside else [1, *x.shape[1:]])


def test_a_text_is_classified_by_what_the_file_says() -> None:
    from tokenizers import Tokenizer

    torch.manual_seed(5)
    texts = ["The cat sat.", "A dog ran!", "Owls fly at night", "the cat and a dog"] * 3
    vocabulary = words(texts, 16)
    ids = [each[:6] for each in vocabulary.encoder()(texts)]
    x = np.array([each + [0] * (6 - len(each)) for each in ids])
    data = Dataset.of(
        x, labels(12), x, labels(12), below=16, names=NAMES, reader=TextSpec(), tokenizer=vocabulary.tokenizer
    )
    module, text = Words(16), "The DOG sat, at night"

    def prepare(recipe: Mapping[str, Any]) -> Array:
        made = Tokenizer.from_str(json.dumps(recipe["tokenizer"]))
        tokens = made.encode(text, add_special_tokens=False).ids[: recipe["length"]]
        return np.array(tokens + [recipe["padding"]] * (recipe["length"] - len(tokens)))

    deployed = made(module, data, preprocessing=True)
    found, logits = classify(deployed.artifact.model, prepare)

    tokens = vocabulary.encoder()([text])[0][:6]
    expected = module(torch.tensor([tokens + [0] * (6 - len(tokens))]))[0]
    np.testing.assert_allclose(logits, expected.detach().numpy(), atol=1e-5)
    assert found == NAMES[int(expected.argmax())] and deployed.facts["inputs"][0]["range"] == [0, 15]
    assert "follow the recipe" in deployed.facts["notes"][0]


def test_columns_are_standardised_inside_the_file() -> None:
    torch.manual_seed(5)
    raw = np.random.default_rng(3).normal(50, 9, (20, 4)).astype(np.float32)
    mean, deviation = (50.0, 49.0, 51.0, 50.0), (9.0, 8.0, 7.0, 9.0)
    x = ((raw - mean) / deviation).astype(np.float32)
    reader = TableSpec(columns=("a", "b", "c", "d"), label="y", mean=mean, deviation=deviation)
    data = Dataset.of(x, labels(20), x, labels(20), names=NAMES, reader=reader)
    module = Flat(4)

    session, facts = metadata(made(module, data, preprocessing=True, dynamic_batch=True).artifact.model)

    found = session.run(None, {"features": raw[:7]})[0]
    np.testing.assert_allclose(found, module(torch.from_numpy(x[:7])).detach().numpy(), atol=1e-4)
    assert facts["inputs"][0]["preprocessing"]["columns"] == ["a", "b", "c", "d"]


# -- formats ---------------------------------------------------------------------------------------------------


def test_the_file_says_where_it_comes_from_and_what_loads_it() -> None:
    _, facts = metadata(made(Pictures().eval(), pictures()).artifact.model)
    (port,) = facts["inputs"]
    assert (port["name"], port["layout"], port["dtype"]) == ("image", "NCHW", "float32")
    assert (facts["federation"], facts["run"], facts["round"]) == ("fed", "run-1", "7")
    assert facts["runtime"] == {"name": "onnxruntime", "least": "1.14", "opset": 18, "ir": 8}
    assert facts["classes"] == list(NAMES) and 0 <= float(facts[facts["metric"]]) <= 1
    assert len(facts["weights_sha256"]) == 64 and facts["producer"].startswith("edgefl-tiers ")


def stock(deployed: Deployment, x: Array) -> Array:
    """Return the logits of rows, one at a time, from the file's stock runtime."""
    if deployed.target.format == "onnx":
        session, _ = metadata(deployed.artifact.model)
        name = session.get_inputs()[0].name
        return np.concatenate([session.run(None, {name: row[None]})[0] for row in x])
    from edgefl_export.executorch.silent_import import portable_lib

    program = portable_lib()._load_for_executorch_from_buffer(deployed.artifact.model)
    return np.concatenate([program.forward([row[None]])[0].clone() for row in torch.from_numpy(x)])


@pytest.mark.parametrize(
    ("format", "quantize"),
    [
        ("onnx", "int8"),
        slow("onnx", "float16"),
        pytest.param("executorch", "int8", marks=[pytest.mark.slow, pytest.mark.needs("executorch")]),
    ],
)
def test_quantized_files_are_smaller_and_about_as_good(format: str, quantize: str) -> None:
    torch.manual_seed(1)
    random = np.random.default_rng(1)
    y = np.arange(300) % 3
    x = (random.normal(size=(3, 64))[y] + 0.8 * random.normal(size=(300, 64))).astype(np.float32)
    data, module = (
        Dataset.of(x, y, x, y, names=NAMES),
        nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3)),
    )
    optimizer = torch.optim.Adam(module.parameters(), 0.01)
    for _ in range(30):
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(torch.from_numpy(x)), torch.from_numpy(y)).backward()
        optimizer.step()

    small, whole = made(module, data, format=format, quantize=quantize), made(module, data, format=format)

    facts = small.facts
    assert facts["bytes"] < 0.75 * whole.facts["bytes"]
    assert facts["unquantized_accuracy"] == whole.facts["accuracy"] > 0.9
    assert facts["accuracy"] >= facts["unquantized_accuracy"] - 0.02
    assert facts["accuracy"] == pytest.approx((stock(small, x).argmax(1) == y).mean())
    assert "notes" not in facts


class Heard(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru, self.head = nn.GRU(4, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, sound: Tensor) -> Tensor:
        return self.head(self.gru(sound)[0][:, -1])


def test_layers_that_int8_leaves_in_float32_are_named() -> None:
    torch.manual_seed(1)
    x = np.random.default_rng(1).normal(size=(30, 5, 4)).astype(np.float32)
    facts = made(Heard(), Dataset.of(x, labels(30), x, labels(30), names=NAMES), quantize="int8").facts
    assert "leaves the weights of GRU in float32" in facts["notes"][0]


def test_a_loader_needs_no_edgefl_and_its_names_are_those_of_the_module(tmp_path: Path) -> None:
    torch.manual_seed(5)
    module, data = Pictures().eval(), pictures()
    deployed = made(module, data, format="safetensors", dynamic_batch=True)
    file = deployed.save(tmp_path / "net.safetensors")

    from safetensors.torch import load_file

    space: dict[str, Any] = {"__file__": str(tmp_path / "net.py"), "__name__": "net"}
    exec((tmp_path / "net.py").read_text(), space)
    x = torch.from_numpy(data.read(data.test_x))
    torch.testing.assert_close(space["load"]()(x), module(x).detach(), atol=1e-5, rtol=1e-5)
    assert "edgefl" not in space and load_file(file).keys() <= module.state_dict().keys()
    with pytest.raises(ConfigError, match=r"found .*net\.safetensors, .*net\.json, .*net\.py; .*`force`"):
        deployed.save(file)
    with pytest.raises(ConfigError, match=r"ends in \.safetensors, found 'net\.onnx'"):
        deployed.save(tmp_path / "net.onnx")


@pytest.mark.needs("executorch")
@pytest.mark.slow
@pytest.mark.parametrize("backend", ["portable", "xnnpack"])
def test_a_program_computes_what_torch_does_and_returns_its_metadata(backend: str) -> None:
    from edgefl_export.executorch.silent_import import portable_lib

    torch.manual_seed(5)
    x = np.random.default_rng(3).normal(size=(8, 4)).astype(np.float32)
    data, module = Dataset.of(x, labels(8), x, labels(8), names=NAMES), Flat(4)
    deployed = made(module, data, format="executorch", backend=backend)

    model = deployed.artifact.model
    program = portable_lib()._load_for_executorch_from_buffer(model)
    facts = json.loads(program.run_method("metadata", [])[0])
    assert facts["inputs"][0]["name"] == "features" and facts["classes"] == list(NAMES)
    (found,) = program.forward([torch.from_numpy(x[:1])])
    torch.testing.assert_close(found, module(torch.from_numpy(x[:1])).detach(), atol=1e-5, rtol=1e-4)


# -- what is refused -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("out", "options", "message"),
    [
        ("audio.bin", {}, "expected a file that ends in .onnx, .pte, .safetensors, found 'audio.bin'"),
        ("audio.json", {}, "found 'audio.json'"),
        ("a.safetensors", {"quantize": "int8"}, "float16 for a .safetensors file, found int8"),
        ("a.pte", {"quantize": "int8", "backend": "portable"}, "has no int8 kernels"),
        ("a.pte", {"opset": 18}, "an .onnx file for `opset`, found .pte"),
        ("a.onnx", {"opset": 3}, "`opset` 13 to 21, found 3"),
        ("a.onnx", {"backend": "portable"}, "a .pte file for `backend`, found .onnx"),
        ("a.onnx", {"batch": 4, "dynamic_batch": True}, "either `batch` or `dynamic_batch`"),
    ],
)
def test_options_that_clash_are_one_line(out: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        target_of(out, **options)
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("there", ["phone.onnx", "phone.json"])
def test_existing_files_are_refused_before_work_begins(there: str, tmp_path: Path) -> None:
    (tmp_path / there).write_text("mine")
    (tmp_path / "w.npz").write_bytes(b"")
    out = str(tmp_path / "phone.onnx")
    ran = runner().invoke(app, ["deploy", "--weights", str(tmp_path / "w.npz"), "--out", out])
    assert isinstance(ran.exception, ConfigError) and "overwrite with `force`" in str(ran.exception)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"weights")
    ran = runner().invoke(app, ["deploy", "--weights", str(weights), "--out", str(weights), "--force"])
    assert isinstance(ran.exception, ConfigError) and "is the trained model" in str(ran.exception)
    assert (tmp_path / there).read_text() == "mine"
    refuse_existing(files_of(tmp_path / "other.onnx"))
