"""The vectors: what numpy drew, what keys signed, and whole rounds, looked at by other means than those that made them."""

from __future__ import annotations

import json
import struct
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import edgefl
from edgefl.errors import BundleError, IdentityError
from edgefl.wire import bits, enrolment, tensors
from edgefl.wire.blobs import BlobRef, decompress, verify_blob
from edgefl.wire.keys import Succession, verify
from edgefl.wire.mqtt import messages
from edgefl.wire.mqtt.envelope import open_message
from edgefl.wire.mqtt.messages import ProfileAnswer, ProfileRequest
from edgefl_conformance.vectors.blobs import blob_vectors
from edgefl_conformance.vectors.draws import draw_vectors
from edgefl_conformance.vectors.signatures import signature_vectors
from edgefl_conformance.vectors.write import GOLDEN, UPDATES, write_vectors
from tests.conformance import by_the_book

DRAWS, SIGNED, BLOBS = draw_vectors(), signature_vectors(), blob_vectors()
KINDS = {kind.__name__: kind for kind in (ProfileAnswer, ProfileRequest)} | vars(messages)


def test_generators_are_those_of_the_book() -> None:
    for case in DRAWS["generators"]:
        key = [int(number) for number in case["key"]]
        generator = by_the_book.Philox(*key)
        assert case["philox_key"] == [f"{word:016x}" for word in by_the_book.seed_sequence(key, 2)]
        assert case["words"] == [f"{generator.next64():016x}" for _ in case["words"]]


def test_batches_are_those_of_the_book() -> None:
    ways = {"walk": by_the_book.walk, "draw": by_the_book.draw}
    assert {case["draws"] for case in DRAWS["batches"]} == set(ways)
    for case in DRAWS["batches"]:
        numbers = (int(case["seed"]), case["stream"], case["step"], case["rows"], case["batch"])
        assert case["indices"] == ways[case["draws"]](*numbers), case


def test_batches_of_like_lengths_are_those_of_the_book() -> None:
    for case in DRAWS["lengths"]:
        seed, batch, rows = int(case["seed"]), case["batch"], len(case["lengths"])
        needs = [sum(edge < length for edge in case["edges"]) for length in case["lengths"]]
        order = sorted(by_the_book.Philox(seed, 0).permutation(rows), key=lambda row: needs[row])
        count = -(-rows // batch)
        place = by_the_book.Philox(seed, 0, 1 << 21).permutation(count)[case["step"] % count]
        assert case["indices"] == [order[at % rows] for at in range(place * batch, (place + 1) * batch)], case


def test_a_draw_of_a_large_part_of_many_rows_is_that_of_the_book() -> None:
    from edgefl_device.data.samples import Batches

    for rows, batch in ((20_000, 401), (20_000, 400), (10_001, 10_001)):
        found = Batches(5, rows, batch, "draw").indices(0, 0).tolist()
        assert found == by_the_book.draw(5, 0, 0, rows, batch)


def test_noise_is_that_of_the_book() -> None:
    for case in DRAWS["noise"]:
        count = int(np.prod(case["shape"], dtype=int))
        numbers = by_the_book.noise(int(case["seed"]), case["step"], case["port"], count)
        found = [Fraction(struct.unpack(">f", bytes.fromhex(word))[0]) for word in case["bits"]]
        assert found == numbers, case


def test_passes_meet_every_row_once() -> None:
    met: dict[tuple[int, int], list[int]] = {}
    for case in DRAWS["passes"]:
        kept = [row for row, counts in zip(case["indices"], case["mask"], strict=True) if counts]
        met.setdefault((case["rows"], case["batch"]), []).extend(kept)
    assert met
    assert all(rows == list(range(count)) for (count, _), rows in met.items())


def test_envelopes_open_and_the_wrong_ones_do_not() -> None:
    assert len(SIGNED["envelopes"]) == 10
    for case in SIGNED["envelopes"]:
        opened = open_message(KINDS[case["message"]], case["topic"], bytes.fromhex(case["envelope"]))
        assert messages.encode(opened.message).hex() == case["body"]
        assert verify(opened.key, bytes.fromhex(case["signature"]), bytes.fromhex(case["signed_text"]))
    for case in SIGNED["wrong"]:
        with pytest.raises(IdentityError):
            open_message(messages.Task, case["topic"], bytes.fromhex(case["envelope"]))


def test_successions_tokens_and_bundles_hold() -> None:
    (succession,) = SIGNED["successions"]
    parts = {name: bytes.fromhex(succession[name]) for name in ("old", "new", "signature")}
    (token,), (bundle,) = SIGNED["enrolments"], SIGNED["bundles"]
    given = enrolment.parse_token(token["token"])

    assert Succession(**parts, until=succession["until"]).is_valid
    assert enrolment.proves(
        given.secret, token["topic"], bytes.fromhex(token["public"]), bytes.fromhex(token["proof"])
    )
    assert verify(given.server, bytes.fromhex(bundle["signature"]), bytes.fromhex(bundle["signed_text"]))


def _ref(told: dict[str, Any]) -> BlobRef:
    return msgspec.convert({**told, "digests": bytes.fromhex(told["digests"])}, BlobRef)


def test_chunks_are_accepted_and_wrong_references_refused() -> None:
    for case in BLOBS["chunks"]:
        ref, pieces = _ref(case["ref"]), [bytes.fromhex(piece) for piece in case["chunks"]]
        ref.check(1 << 20)
        assert len(pieces) == ref.count
        assert all(ref.accepts(index, piece) for index, piece in enumerate(pieces))
        assert verify_blob(ref, b"".join(pieces)).hex() == case["blob"]
    for case in BLOBS["refused"]:
        with pytest.raises((BundleError, msgspec.ValidationError)):
            _ref(case["ref"]).check(1 << 20)


def test_frames_unfold_or_are_refused_and_masks_are_their_gaps() -> None:
    for case in BLOBS["frames"]:
        ref, frame = _ref(case["ref"]), verify_blob(_ref(case["ref"]), bytes.fromhex(case["frame"]))
        if case["why"]:
            with pytest.raises(BundleError):
                decompress(ref, frame, 1 << 20)
        else:
            assert decompress(ref, frame, 1 << 20).hex() == case["blob"]
    for case in BLOBS["masks"]:
        packed = bits.from_gaps(bytes.fromhex(case["gaps"]), case["count"])
        assert packed.tobytes().hex() == case["packed"]
        assert np.flatnonzero(bits.unpack(packed, case["count"])).tolist() == case["set"]


def test_the_folder_is_whole_and_its_rounds_can_be_run_again(tmp_path: Path) -> None:
    rows = write_vectors(tmp_path, ("onnx",))

    assert json.loads((tmp_path / "index.json").read_text())["vectors"] == json.loads(json.dumps(rows))
    for source in (*GOLDEN.iterdir(), *UPDATES.iterdir()):
        assert (tmp_path / source.parent.name / source.name).read_bytes() == source.read_bytes()
    assert json.loads((tmp_path / "draws.json").read_text()) == json.loads(json.dumps(DRAWS))
    rounds = [row for row in rows if row["kind"] == "round"]
    assert len(rounds) == 14
    for row in rounds:
        _run_again(tmp_path, row)


def _run_again(folder: Path, row: dict[str, Any]) -> None:
    """By the public API, from the files alone."""
    arrays = {
        name: tensors.load((folder / file).read_bytes())
        for name, file in row["files"].items()
        if name != "bundle"
    }
    result = edgefl.train_round(
        folder / row["files"]["bundle"],
        arrays["weights"],
        arrays["data"]["x"],
        arrays["data"]["y"],
        seed=int(row["seed"]),
        samples=row["samples"],
        carry=arrays.get("carry_before"),
    )
    assert (result.samples, result.metrics) == (row["rows_used"], row["metrics"])
    for name, array in result.update.items():
        np.testing.assert_array_equal(array, arrays["update"][name], err_msg=f"{row['name']}: {name}")
    assert sorted(result.carry) == sorted(arrays.get("carry_after", {}))
