"""A round in C++ gives the bytes that the Python agent gives, for programs of every form, on both engines."""

from __future__ import annotations

import gzip
import os
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image

import edgefl
from edgefl.algorithms.statistics import statistics
from edgefl.contract.choice import AlgorithmChoice
from edgefl.contract.tensors import TensorSpec
from edgefl.wire import tensors
from edgefl.wire.bundle.manifest import HELD_OUT, DataSpec, Split
from edgefl.wire.statistics import STATISTICS, StatisticsRequest
from edgefl_export.compiler.compiler import Compiler, target_of
from edgefl_export.compiler.request import CompileRequest
from tests.agents.cpp import make_draws, tiny_segments
from tests.agents.cpp.offline import STOPPED, Place, assert_same, random_data, random_weights
from tests.device_runtime import tiny
from tests.pairs import in_turn
from tests.silence import frank_environment

TINY = {"size": 4, "hidden": (5,)}
NET = {"size": 8, "widths": (3, 4)}
TEXT = {"length": 6, "vocabulary": 11, "features": 4, "hidden": 5}
PLAIN = edgefl.Model("mlp", options=TINY)


def case_of(algorithm: AlgorithmChoice, model: edgefl.Model = PLAIN, **more: Any) -> dict[str, Any]:
    return {"model": model, "training": edgefl.Training(algorithm=algorithm), **more}


CASES = {
    "plain": case_of(edgefl.algorithms.SGD(batch=8, steps=7)),
    "a prefix of two chunks": case_of(
        edgefl.algorithms.SGD(batch=8, steps=4),
        edgefl.Model("fedbat_cnn", options=NET),
        submodel=edgefl.submodels.OutputSide(cut=2, chunks=2),
    ),
    "noise and codes": case_of(edgefl.algorithms.FedBAT(batch=8, steps=6)),
    "independent batches": case_of(edgefl.algorithms.PerFedAvg(batch=4, steps=3)),
    "kept and from the server": case_of(edgefl.algorithms.Scaffold(batch=8, steps=3)),
    "a pass over the data": case_of(edgefl.algorithms.MimeAdam(batch=8, steps=3)),
    "an exchange of its own": case_of(
        edgefl.algorithms.FAFED(batch=8, steps=3, opening_steps=2), exchange="opening"
    ),
    "masks": case_of(
        edgefl.algorithms.SGD(batch=8, steps=3), submodel=edgefl.submodels.Importance(gamma=0.3)
    ),
    "lengths": case_of(
        edgefl.algorithms.SGD(batch=4, steps=6),
        edgefl.Model("lstm_lm", options=TEXT),
        options=edgefl.CompileOptions(lengths=(3,)),
    ),
}


def place_of(folder: Path, case: str, form: str) -> Place:
    options = replace(CASES[case].get("options", edgefl.CompileOptions()), target=form)
    bundle = edgefl.compile(**{**CASES[case], "options": options})
    manifest = bundle.manifest
    weights = bundle.share(bundle.initial_weights()) if case == "masks" else random_weights(manifest)
    return Place.of(folder, bundle.contents, weights, random_data(manifest, folder / "data.npz"))


def plain_place(folder: Path, data: str) -> Place:
    """The plain round of an ExecuTorch program with data of the test's own."""
    bundle = edgefl.compile(**CASES["plain"], options=edgefl.CompileOptions(target="executorch"))
    return Place.of(folder, bundle.contents, random_weights(bundle.manifest), folder / data)


def test_onnxruntime_is_told_to_report_to_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = place_of(tmp_path, "plain", "onnx")
    home = tmp_path / "home"
    home.mkdir()
    assert place.in_cpp().code == 0, "built"
    frank = frank_environment(home)
    for name in {*os.environ} - {*frank}:
        monkeypatch.delenv(name)
    for name, value in frank.items():
        monkeypatch.setenv(name, value)
    assert place.in_cpp().code == 0
    assert not [*home.rglob("*")], "what is to be told waits in a file"


@pytest.mark.sample(4)
@pytest.mark.parametrize(("case", "form"), in_turn(list(CASES)))
def test_a_round_gives_the_same_bytes(tmp_path: Path, case: str, form: str) -> None:
    place = place_of(tmp_path, case, form)

    first, expected = place.in_cpp(), place.in_python()

    assert_same(first, expected)
    assert len(expected.update) > 8
    if tensors.load(expected.carry):
        assert_same(place.in_cpp(carry=first.carry), place.in_python(carry=expected.carry))


@pytest.mark.parametrize(("part", "form"), in_turn(["train", "held-out"]))
def test_a_split_gives_the_same_rows(tmp_path: Path, part: str, form: str) -> None:
    place = place_of(tmp_path, "lengths" if part == "train" else "plain", form)
    split = Split(share=0.4, seed=3, part=part)  # type: ignore[arg-type]
    manifest = msgspec.structs.replace(place.bundle.manifest, v=HELD_OUT, split=split)
    bundle = replace(place.bundle, manifest=manifest)

    found = Place.of(tmp_path, bundle, place.weights, place.data)

    assert_same(found.in_cpp(), found.in_python())
    assert 0 < found.in_python().facts["samples"] < place.in_python().facts["samples"]
    assert_same(found.in_cpp("--samples", 2), found.in_python(samples=2))


@pytest.mark.parametrize("form", ["onnx", "executorch"])
def test_statistics_give_the_same_sums_without_weights(tmp_path: Path, form: str) -> None:
    data = DataSpec(shape=(2, 3, 4), dtype="float32", classes=3, scale=1 / 64, shift=-1.5)
    algorithm = statistics(StatisticsRequest(edges=(-1.0, 0.0, 2.0)), data, TensorSpec((), torch.int64, 3))
    request = CompileRequest(
        model="", tier="all", algorithm=algorithm, units=(), data=data, exchange=STATISTICS
    )
    rng = np.random.default_rng(5)
    rows = {"x": rng.integers(0, 256, (300, *data.shape), np.uint8), "y": rng.integers(0, 3, 300)}
    np.savez(tmp_path / "data.npz", **rows)
    bundle = Compiler(target_of(form)).compile(request).bundle
    place = Place.of(tmp_path, bundle, {}, tmp_path / "data.npz")
    assert_same(place.in_cpp(), place.in_python())
    assert place.in_python().facts["samples"] == 300


def test_planned_outputs_give_the_bytes_of_those_in_the_callers_memory(tmp_path: Path) -> None:
    planned = edgefl.compile(
        **CASES["noise and codes"], options=edgefl.CompileOptions(target="executorch", outputs="planned")
    )
    weights, data = random_weights(planned.manifest), random_data(planned.manifest, tmp_path / "data.npz")
    (tmp_path / "planned").mkdir()
    place = Place.of(tmp_path / "planned", planned.contents, weights, data)

    found = place.in_cpp()

    assert all(graph.planned_outputs for graph in planned.manifest.graphs)
    assert_same(found, place.in_python())
    assert found.update == place_of(tmp_path, "noise and codes", "executorch").in_cpp().update


@pytest.mark.parametrize("form", in_turn([()]))
def test_scalars_and_fewer_rows_are_those_of_the_task(tmp_path: Path, form: str) -> None:
    place = place_of(tmp_path, "plain", form)

    changed = place.in_cpp("--hyper", "lr=0.5", "--samples", 5)

    assert_same(changed, place.in_python(hyper={"lr": 0.5}, samples=5))
    assert changed.update != place.in_cpp().update


@pytest.mark.sample(1)
@pytest.mark.parametrize(("case", "form"), in_turn(["a prefix of two chunks", "lengths"]))
def test_a_killed_round_goes_on_from_its_checkpoint(tmp_path: Path, case: str, form: str) -> None:
    place = place_of(tmp_path, case, form)

    killed = place.in_cpp("--checkpoint-steps", 2, "--stop-at", 2)

    assert (killed.code, killed.update, killed.error) == (STOPPED, b"", "")
    resumed = place.in_cpp("--checkpoint-steps", 2)
    assert_same(resumed, place.in_python())
    assert resumed.facts["made"] == resumed.facts["steps"] - 2
    assert "edgefl-round: it resumes after step 2, from " in resumed.error
    again = place.in_cpp("--checkpoint-steps", 2)
    assert again.update == resumed.update
    assert "this round is done already; it resumes after step " in again.error
    other = place.in_cpp("--hyper", "lr=0.5")
    assert "checkpoint.json is of a round with other weights, data or options: it begins anew" in other.error
    assert other.facts["made"] == other.facts["steps"]


def test_a_checkpoint_of_another_bundle_is_refused(tmp_path: Path) -> None:
    data, weights = random_data(tiny.make_bundle([]).manifest, tmp_path / "data.npz"), tiny.weights()["head"]
    first = Place.of(tmp_path, tiny.make_bundle([]), weights, data)
    assert first.in_cpp().code == 0
    other = Place.of(tmp_path, tiny.make_bundle([], steps=(7,)), weights, data)

    refused = other.in_cpp()

    assert refused.code == 1
    assert "checkpoint.json is of another bundle (tiny, noisy-sgd, tier strong), expected" in refused.error
    assert "name another --folder, or remove it to begin anew" in refused.error
    (tmp_path / "work" / "checkpoint.json").write_text('{"step": 5}')
    assert "checkpoint.json is no checkpoint that can be read" in other.in_cpp().error


def test_samples_of_idx_npy_and_class_folders_are_those_of_npz(tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    x, y = rng.integers(0, 256, (9, 4, 4), np.uint8), np.sort(rng.integers(0, 3, 9))
    np.savez_compressed(tmp_path / "data.npz", x=x, y=y)
    place = plain_place(tmp_path, "data.npz")
    expected = place.in_python()
    (tmp_path / "idx").mkdir()
    head = b"\0\0\x08\x03" + np.array(x.shape, ">u4").tobytes()
    (tmp_path / "idx" / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(head + x.tobytes()))
    head = b"\0\0\x08\x01" + np.array(y.shape, ">u4").tobytes()
    (tmp_path / "idx" / "train-labels-idx1-ubyte").write_bytes(head + y.astype(np.uint8).tobytes())
    (tmp_path / "npy").mkdir()
    np.save(tmp_path / "npy" / "x.npy", np.asfortranarray(x))
    np.save(tmp_path / "npy" / "y.npy", y.astype(">i4"))
    for row, (image, label) in enumerate(zip(x, y, strict=True)):
        (tmp_path / "classes" / str(label)).mkdir(parents=True, exist_ok=True)
        np.save(tmp_path / "classes" / str(label) / f"{row}.npy", image[None])

    for source in ("data.npz", "idx", "npy", "classes"):
        assert_same(Place(place.folder, place.bundle, place.weights, tmp_path / source).in_cpp(), expected)


@pytest.mark.parametrize(
    ("x", "y", "words"),
    [
        (
            np.zeros((3, 1, 4, 5), np.float32),
            [0, 1, 2],
            "samples have shape (1, 4, 5), the model takes (1, 4, 4)",
        ),
        (np.full((3, 1, 4, 4), np.nan, np.float32), [0, 1, 2], "48 values of x are NaN, first at row 0"),
        (np.zeros((3, 1, 4, 4)), [0, 1, 2], "samples are float64, the model takes float32"),
        (
            np.zeros((3, 1, 4, 4), np.uint8),
            [0, 1, 10],
            "labels are int64 from 0 to 10, the model takes integers",
        ),
        (np.zeros((3, 1, 4, 4), np.uint8), [0, 1], "has 3 samples and 2 labels"),
        (np.zeros((3, 1, 4, 4), np.uint8), ["cat", "dog", "owl"], "are no numbers"),
    ],
)
def test_data_that_do_not_fit_are_refused_with_the_reason(tmp_path: Path, x: Any, y: Any, words: str) -> None:
    np.savez(tmp_path / "data.npz", x=x, y=y)
    place = plain_place(tmp_path, "data.npz")

    refused = place.in_cpp()

    assert refused.code == 1
    assert words in refused.error


def test_bad_rows_are_left_out_where_the_owner_says_so(tmp_path: Path) -> None:
    place = place_of(tmp_path, "plain", "executorch")
    with np.load(place.data) as found:
        x, y = found["x"], found["y"]
    kept, few = np.arange(len(y)) != 4, tmp_path / "few.npz"
    np.savez(few, x=x[kept], y=y[kept])
    x[4, 0, 1, 2] = np.inf
    np.savez(place.data, x=x, y=y)

    told = place.in_cpp("--skip-bad-rows")

    assert_same(told, Place(place.folder, place.bundle, place.weights, few).in_python())
    assert told.facts["skipped"].endswith("row 4: x has a value that is NaN or infinite")


def test_a_damaged_graph_is_refused_before_it_is_loaded(tmp_path: Path) -> None:
    place = place_of(tmp_path, "plain", "executorch")
    file = tmp_path / "bundle.zip"
    with zipfile.ZipFile(file) as bundle:
        graph = max(bundle.infolist(), key=lambda entry: entry.compress_size)
    data = bytearray(file.read_bytes())
    data[graph.header_offset + graph.compress_size // 2] ^= 1
    file.write_bytes(data)

    refused = place.in_cpp()

    assert refused.code == 1
    assert "edgefl-round: " in refused.error
    assert "again" in refused.error


def test_the_vectors_of_batches_and_noise_are_those_of_the_python_agent() -> None:
    assert make_draws.FILE.read_text() == make_draws.written()


def test_a_graph_in_segments_gives_the_same_bytes_and_leaves_no_file(tmp_path: Path) -> None:
    bundle = tiny_segments.make_bundle()
    data = random_data(bundle.manifest, tmp_path / "data.npz")
    place = Place.of(tmp_path, bundle, random_weights(bundle.manifest), data)

    made = place.in_cpp("--checkpoint-steps", 100)

    assert_same(made, place.in_python())
    assert not list((tmp_path / "work").iterdir())


def pictures(folder: Path, rng: np.random.Generator) -> None:
    """Two classes of images of many kinds and sizes, some lying on their side by their EXIF."""
    pixels = [rng.integers(0, 256, (*size, 4), np.uint8) for size in ((4, 4), (37, 23), (9, 64), (3, 3))]
    for name, mode in enumerate(("RGB", "RGBA", "L", "LA", "P", "1")):
        (folder / str(name % 2)).mkdir(parents=True, exist_ok=True)
        for number, each in enumerate(pixels):
            Image.fromarray(each).convert(mode).save(folder / str(name % 2) / f"{mode}-{number}.png")
    for turn in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = turn
        mode, number = ("RGB", "L")[turn % 2], turn % len(pixels)
        smooth = Image.fromarray(pixels[number]).resize((50 + turn, 41)).convert(mode)
        smooth.save(folder / "0" / f"{turn}.jpg", quality=80, exif=exif)
        Image.fromarray(pixels[1]).save(folder / "1" / f"turned-{turn}.png", exif=exif)
    tall = Image.fromarray(rng.integers(0, 256, (91, 35, 3), np.uint8))
    for mode, options in (("RGB", {"progressive": True, "subsampling": 2}), ("CMYK", {}), ("L", {})):
        tall.convert(mode).save(folder / "1" / f"tall-{mode}.jpg", **options)


@pytest.mark.parametrize("channels", [1, 3])
def test_images_in_class_folders_become_the_samples_that_pillow_makes(tmp_path: Path, channels: int) -> None:
    options = {**TINY, "in_channels": channels}
    bundle = edgefl.compile(
        edgefl.Model("mlp", options=options),
        training=edgefl.Training(algorithm=edgefl.algorithms.SGD(batch=40, steps=2)),
        options=edgefl.CompileOptions(target="onnx"),
    )
    pictures(tmp_path / "pictures", np.random.default_rng(6))
    weights = random_weights(bundle.manifest)
    place = Place.of(tmp_path, bundle.contents, weights, tmp_path / "pictures")

    assert_same(place.in_cpp(), place.in_python())


def test_a_file_that_is_no_image_is_refused_by_name(tmp_path: Path) -> None:
    pictures(tmp_path / "pictures", np.random.default_rng(6))
    whole = (tmp_path / "pictures" / "1" / "RGBA-1.png").read_bytes()
    (tmp_path / "pictures" / "1" / "cut.png").write_bytes(whole[: len(whole) // 2])
    place = plain_place(tmp_path, "pictures")

    assert "cut.png: is no image that can be read" in place.in_cpp().error
    assert "1 row is left out, " in place.in_cpp("--skip-bad-rows").facts["skipped"]
