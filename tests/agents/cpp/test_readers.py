"""The C++ agent reads tables and sounds as the Python agent does: the same bits, the same refusals."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import msgspec
import numpy as np
import pytest

from edgefl.errors import DataError
from edgefl.wire.bundle.archive import BundleArchive
from edgefl.wire.bundle.manifest import Graph, Input
from edgefl.wire.bundle.readers import Reader, SeriesSpec, SoundSpec, TableSpec, TextSpec
from tests.agents.cpp.offline import Place, assert_same, random_weights
from tests.device_runtime import tiny
from tests.device_runtime.data.files import sound, written

TABLE = TableSpec(
    columns=("age", "height", "north"),
    label="buys",
    mean=(41.5, 0.1, 0.0),
    deviation=(3.0, 0.7, 1.0),
    others={"place": ("north", "east", "age")},
)
SOUND = SoundSpec(rate=8000, length=tiny.WIDTH, features="features")
NAMES = ("no", "café")
CSV = '''\ufeffsep=,
 height,age, north ,east,note,buys
1.75,41,3,4,"Ada, Lee",no
.5e0, +7. ,-0,1e-400,"two
lines, ""quoted""",café

0.1,٣,5e-324,1e+2,,cafe\u0301
"1.6",9,1,2, spaced,no\r
1.6,1_0,1,2,underscore,no
1.6,9,3.4028235e38,2,large,no
1.6,inf,1,2,infinite,no
1.6,9,1
1.6,9,1,2,six,no,seven
1.6,9,1,2,class,maybe
"1.6",9,1,2,"an end" behind,no
0.30000000000000004,2.4703282292062328e-324,1,2,,no'''
JSON = """{"age": 1, "height": "2.5", "north": true, "east": -0, "buys": "no"}
{"age": 0.1, "height": 15E-1, "north": 1, "east": 2, "buys": "caf\\u00e9", "note": [NaN, {"a": null}]}
{"age": NaN, "height": 1, "north": 1, "east": 2, "buys": "no"}
{"age": 1, "height": 1, "north": 1, "east": 2, "buys": "no"} {}
{"age": 1, "height": 1, "north": [1], "east": 2, "buys": "no"}
"""


def bundle_of(reader: Reader, *graphs: tuple[Graph, bytes], others: tuple[Input, ...] = ()) -> BundleArchive:
    """The tiny bundle with one frozen unit; ``graphs`` come beside its own, or in place of one of the same name."""
    made = tiny.make_bundle(["stem"])
    data = msgspec.structs.replace(made.manifest.data, names=NAMES, reader=reader, others=others)
    named = {graph.name: graph for graph in (*made.manifest.graphs, *(graph for graph, _ in graphs))}
    manifest = msgspec.structs.replace(made.manifest, data=data, graphs=tuple(named.values()))
    return BundleArchive(manifest, {**made.blobs, **{graph.blob.sha256: blob for graph, blob in graphs}})


def table() -> BundleArchive:
    """Columns as x, and others beside it, which the frozen unit adds."""
    weight, place = tiny.port("weights.stem.w", (3, 3)), tiny.port("batch.0.place", (tiny.BATCH, 3))
    inputs, record = (weight, tiny.X, place), tiny.port("record.x", (tiny.BATCH, 3))
    nodes = [
        tiny.node("MatMul", f"batch.0.x {weight.name}", "h"),
        tiny.node("Add", "h batch.0.place", "out.record.x"),
    ]
    blob = tiny.onnx_bytes(nodes, inputs, (record,))
    graph = tiny.graph_of("forward.stem", blob, inputs, (record,))
    return bundle_of(TABLE, (graph, blob), others=(Input(name="place", shape=(3,), dtype="float32"),))


def heard() -> BundleArchive:
    """Sounds as what a graph makes of their samples."""
    wave, record = tiny.port("batch.0.x", (1, 3)), tiny.port("record.x", (1, 3))
    blob = tiny.onnx_bytes([tiny.node("Tanh", "batch.0.x", "out.record.x")], (wave,), (record,))
    return bundle_of(SOUND, (tiny.graph_of("features", blob, (wave,), (record,)), blob))


def place_of(folder: Path, bundle: BundleArchive, data: Path) -> Place:
    return Place.of(folder, bundle, random_weights(bundle.manifest), data)


def assert_alike(place: Place) -> bool:
    """Both agents compute the same bits, or refuse the data in the same words: then it is True."""
    told = place.in_cpp()
    try:
        expected = place.in_python()
    except DataError as error:
        assert told.error.endswith(f"edgefl-round: {error.message}\n")
        return True
    assert_same(told, expected)
    return False


def test_odd_tables_give_the_bits_of_the_python_agent(tmp_path: Path) -> None:
    written(tmp_path / "data" / "a.csv", CSV)
    written(tmp_path / "data" / "b.jsonl", JSON)
    written(tmp_path / "data" / "c.CSV", CSV.replace("Lee", "L\udcffe").encode(errors="surrogateescape"))
    place = place_of(tmp_path, table(), tmp_path / "data")

    told = place.in_cpp("--skip-bad-rows")

    assert_same(told, place.in_python(policy="skip"))
    assert told.facts["samples"] == 11
    assert " rows are left out, the first is " in told.facts["skipped"]
    assert assert_alike(place)


HEAD = "x,age,height,buys\n"
REFUSED: list[str | bytes] = [
    "",
    "x,age,height\n0,1,2\n",
    HEAD.replace(",", ";") + "0;1;2;no\n",
    "x,age,height,buys,age\n0,1,2,no,3\n",
    'x,age,"height,buys\n0,1,2,no\n',
    HEAD + "0,1,?,no\n",
    HEAD + '0,1,"2,no\n0,3,4,no\n0,5,"6",no\n',
    HEAD + '0,1,"2"3,no\n',
    HEAD + "0,1,2,no\n0,3,1e39,no\n",
    HEAD + "0,1,2,\n",
    HEAD + "0,1,2,maybe \u202e\n",
    HEAD + "0,1,2,'no'\n",
    HEAD + "9" * 80 + "x,1,2,no\n",
    HEAD.encode("utf-16"),
]


def test_what_is_wrong_with_a_table_is_said_in_the_same_words(tmp_path: Path) -> None:
    plain = TableSpec(columns=("x", "age", "height"), label="buys")
    place = place_of(tmp_path, bundle_of(plain), tmp_path / "d.csv")
    for content in REFUSED:
        written(place.data, content)
        assert assert_alike(place), content


def test_damaged_tables_are_refused_or_read_by_both_agents(tmp_path: Path) -> None:
    chosen = random.Random(5)
    place = place_of(tmp_path, table(), tmp_path / "d.csv")
    lines = CSV.split("\n")
    whole = "\n".join([*lines[:7], lines[7].rstrip("\r"), lines[-1]]).encode()
    written(place.data, whole)
    assert not assert_alike(place)
    refused = 0
    for _ in range(8):
        at = chosen.randrange(len(whole))
        piece = chosen.choice([b"", b'"', b"\r", b"\n", b",", b"\xff", b"\0", b" ", b"9"])
        written(place.data, whole[:at] + piece + whole[at + chosen.randrange(2) :])
        refused += assert_alike(place)
    assert 0 < refused < 8


def wav(content: bytes, kind: int, channels: int, width: int, *, size: int | None = None) -> bytes:
    head = struct.pack("<HHLLHH", kind, channels, 8000, 8000 * channels * width, channels * width, 8 * width)
    chunks = b"LIST" + struct.pack("<L", 3) + b"abc\0" + b"fmt " + struct.pack("<L", 16) + head
    chunks += b"data" + struct.pack("<L", len(content) if size is None else size) + content
    return b"RIFF" + struct.pack("<L", 4 + len(chunks)) + b"WAVE" + chunks


def sounds(folder: Path) -> Path:
    """Every format in two classes, of one to nine channels, one shorter than the federation's sounds."""
    rng = np.random.default_rng(1)
    for width in (1, 2, 3, 4):
        written(folder / "no" / f"{width}.wav", wav(rng.bytes(4 * width * 2), 1, 2, width))
    sound(folder / "cafe\u0301" / "mono.WAV", rng.integers(-999, 999, 2).astype(np.int16))
    many = 0.1 * rng.standard_normal((6, 9))
    written(folder / "cafe\u0301" / "double.wav", wav(many.astype("<f8").tobytes(), 3, 9, 8))
    written(folder / "cafe\u0301" / "pipe.wav", wav(many.astype("<f4").tobytes(), 3, 3, 4, size=0))
    return folder


def test_sounds_become_the_features_of_the_python_agent(tmp_path: Path) -> None:
    place = place_of(tmp_path, heard(), sounds(tmp_path / "sounds"))

    assert_same(place.in_cpp(), place.in_python())


def test_damaged_sounds_are_refused_or_read_by_both_agents(tmp_path: Path) -> None:
    place = place_of(tmp_path, heard(), tmp_path / "sounds")
    chosen = random.Random(6)
    whole = wav(np.arange(6, dtype=np.float32).tobytes(), 3, 1, 4)
    refused = 0
    for _ in range(8):
        at = chosen.randrange(len(whole))
        damaged = whole[:at] + chosen.choice([b"\0", b"\1", b"\xff", b""]) + whole[at + 1 :]
        written(place.data / "no" / "a.wav", damaged)
        refused += assert_alike(place)
    assert 0 < refused < 8


@pytest.mark.parametrize(
    ("reader", "words"),
    [
        (TextSpec(), "the federation reads texts, which the C++ agent does not"),
        (
            SeriesSpec(columns=("age",), window=1, step=1),
            "the federation reads windows of sensor series, which",
        ),
    ],
)
def test_what_is_not_read_is_said_in_one_line(tmp_path: Path, reader: Reader, words: str) -> None:
    place = place_of(tmp_path, bundle_of(reader), written(tmp_path / "d.csv", CSV))

    told = place.in_cpp()

    assert words in told.error
    assert told.error.count("\n") == 1
