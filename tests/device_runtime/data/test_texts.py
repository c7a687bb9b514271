"""Texts: lines, records and class folders, in bytes and by a bundle's tokenizer."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from edgefl.data.text.vocabulary import words
from edgefl.wire.blobs import BlobRef, describe
from edgefl.wire.bundle.manifest import DataSpec, Input
from edgefl.wire.bundle.readers import TextSpec
from edgefl_device.data import texts
from edgefl_device.data.samples import LabelSpec, NoBundle
from tests.device_runtime.data.files import every, fitted, written
from tests.support.errors import BundleError, ConfigError, DataError, refuses

BYTES = DataSpec(
    shape=(5,),
    dtype="int64",
    classes=2,
    below=256,
    names=("bad", "good"),
    reader=TextSpec(mask="attention_mask"),
)
MASKED = msgspec.structs.replace(
    BYTES, others=(Input(name="attention_mask", shape=(5,), dtype="int64", below=2),)
)


@pytest.mark.parametrize("form", ["tsv", "txt", "jsonl", "csv", "folders"])
def test_texts_and_their_classes(tmp_path: Path, form: str) -> None:
    contents = {
        "jsonl": '{"text": "a\\tb", "label": "good"}\n{"text": "long text", "label": "bad"}\n',
        "csv": 'label,text\ngood,"a\tb"\nbad,long text\n',
    }
    path = tmp_path
    if form == "folders":
        written(tmp_path / "good" / "1.txt", "a\tb")
        written(tmp_path / "bad" / "1.txt", "long text")
    else:
        path = written(tmp_path / f"d.{form}", contents.get(form, "good\ta\tb\n\nbad\tlong text\n"))
    data = fitted(path, MASKED)

    order = [1, 0] if form == "folders" else [0, 1]
    np.testing.assert_array_equal(data.y[order], [1, 0])
    np.testing.assert_array_equal(every(data)[order], [[97, 9, 98, 0, 0], [*b"long "]])
    np.testing.assert_array_equal(
        data.other("attention_mask", np.array(order)), [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]
    )


@pytest.mark.parametrize("between", [0, 1, 900])
def test_a_closed_quotation_mark_in_a_text_hides_no_texts(tmp_path: Path, between: int) -> None:
    rows = ["label,text", "bad,no", 'good,"he said', *["good,fine"] * between, 'bad,a tube of 5"', "good,yes"]
    path = written(tmp_path / "d.csv", "\n".join(rows))

    with pytest.raises(DataError, match=f"line 3: a quotation mark is .* closed in line {4 + between}"):
        fitted(path, MASKED, policy="skip")


@pytest.mark.parametrize(
    "text",
    [
        "Dear Bo,\n12, Main Street",
        "a\nb\nc, d",
        "Tyger Tyger,\nburning bright,\nIn the forests,\nof the night;\nWhat immortal hand, or eye",
        "1, eggs\n0, milk\n1, bread",
        "Who,he said.\nI,she said.\nAll,they said.\nbye",
        "a\nb\nc\nd",
    ],
)
@pytest.mark.parametrize("form", ["label,text", "text,label", "label,text,id", "id,text,label"])
@pytest.mark.parametrize("names", [("bad", "good"), ("0", "1")])
def test_quoted_lines_are_one_text(tmp_path: Path, text: str, form: str, names: tuple[str, str]) -> None:
    rows = [
        form,
        *(
            form.replace("label", names[label]).replace("id", "7").replace("text", words)
            for label, words in [(1, f'"{text}"'), (0, "plain"), (1, f'"{text}"'), (1, "x"), (0, f'"{text}"')]
        ),
    ]
    path = written(tmp_path / "d.csv", "\n".join(rows))

    data = fitted(path, msgspec.structs.replace(MASKED, names=names))
    np.testing.assert_array_equal(data.y, [1, 0, 1, 1, 0])


@pytest.mark.parametrize("between", [0, 1, 30])
@pytest.mark.parametrize(
    ("opened", "between_row", "closed"),
    [
        ('{0},"he said', "{1},well", '{1},a tube of 5"'),
        ('"he said, hello,{0}', "fine,{0}", 'a tube of 5",{1}'),
        ('"he said,{0}', "fine,{0}", '"so, so",{1}'),
    ],
)
def test_an_open_quotation_mark_of_a_first_row_is_found(
    tmp_path: Path, opened: str, between_row: str, closed: str, between: int
) -> None:
    head = "label,text" if opened.startswith("{") else "text,label"
    rows = [head, opened, *[between_row] * between, closed]
    path = written(tmp_path / "d.csv", "\n".join(rows).format("good", "bad"))

    with pytest.raises(DataError, match=f"line 2: a quotation mark is .* closed in line {3 + between}"):
        fitted(path, MASKED, policy="skip")


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("good\t   ", "the text is empty"),
        ("good\t", "the text is empty"),
        ("no tab at all", "it has no tab behind a label"),
        ("fine\thello", "no class is called 'fine'; the federation's are bad, good"),
        ("good\tZoë", "it is no text in UTF-8"),
    ],
)
def test_a_bad_line_is_named_or_left_out(tmp_path: Path, line: str, text: str) -> None:
    path = written(tmp_path / "d.tsv", f"good\tyes\n{line}\nbad\tno\n".encode("latin-1"))

    with pytest.raises(DataError, match=rf"d\.tsv, line 2: {text}"):
        fitted(path, BYTES)
    data = fitted(path, BYTES, policy="skip")
    np.testing.assert_array_equal(data.y, [1, 0])
    assert data.skipped.count == 1


def test_half_a_character_is_no_text(tmp_path: Path) -> None:
    """JSON may hold one, which no tokenizer takes."""
    path = written(
        tmp_path / "d.jsonl", '{"text": "\\ud800", "label": "good"}\n{"text": "a", "label": "bad"}\n'
    )

    with pytest.raises(DataError, match=r"d\.jsonl, line 1: it is no text in UTF-8"):
        fitted(path, BYTES)
    assert len(fitted(path, BYTES, policy="skip")) == 1


@pytest.mark.parametrize("running", [False, True])
def test_a_file_that_is_no_text_is_left_out(tmp_path: Path, running: bool) -> None:
    written(tmp_path / "bad" / "1.txt", b"caf\xe9 au lait")
    written(tmp_path / "good" / "1.txt", "tea with milk")
    label = LabelSpec((5,)) if running else LabelSpec()
    spec = msgspec.structs.replace(BYTES, classes=256, names=()) if running else BYTES

    with pytest.raises(DataError, match=r"bad/1\.txt: it cannot be read as text \(UTF-8\)"):
        fitted(tmp_path, spec, label)
    data = fitted(tmp_path, spec, label, "skip")
    np.testing.assert_array_equal(data.rows(np.arange(1)), [[*b"tea w"]])
    assert data.skipped.count == 1


def test_many_texts_keep_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "_TOGETHER", 2)
    path = written(tmp_path / "d.tsv", "".join(f"good\t{word}\n" for word in "abcde"))

    np.testing.assert_array_equal(every(fitted(path, BYTES))[:, 0], [*b"abcde"])


def test_running_text_gives_windows_and_what_follows_them(tmp_path: Path) -> None:
    written(tmp_path / "a.txt", "abcdef")
    written(tmp_path / "b.txt", "ghijklm")
    spec = DataSpec(shape=(5,), dtype="int64", classes=256, below=256, reader=TextSpec())
    data = fitted(tmp_path, spec, LabelSpec((5,)))

    np.testing.assert_array_equal(every(data), [[*b"abcde"], [*b"fghij"]])
    np.testing.assert_array_equal(data.y, [[*b"bcdef"], [*b"ghijk"]])
    lines = written(tmp_path / "d.csv", 'text\n"ab\nc\nd\ne"\nf\n')
    np.testing.assert_array_equal(fitted(lines, spec, LabelSpec((5,))).y, [[*b"b\nc\nd"]])
    with refuses(DataError, tokens=5):
        fitted(written(tmp_path / "c.txt", "short"), spec, LabelSpec((5,)))


# -- a tokenizer in the bundle ---------------------------------------------------------------------------------


class OneBlob(NoBundle):
    """A bundle of one blob."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def blob(self, ref: BlobRef) -> bytes:
        assert ref == describe(self._content, 1024)
        return self._content


def tokenized(content: bytes, **more: Any) -> tuple[DataSpec, OneBlob]:
    ref = describe(content, 1024)
    spec = msgspec.structs.replace(BYTES, reader=TextSpec(tokenizer=ref), **more)
    return spec, OneBlob(content)


def test_the_bundle_s_tokenizer_decides_the_numbers(tmp_path: Path) -> None:
    known = words(["The cat sat.", "the dog sat"], 20)
    spec, parts = tokenized(known.tokenizer, below=known.size)
    path = written(tmp_path / "d.tsv", "good\tTHE cat, unheard\n")
    data = fitted(path, spec, parts=parts)

    expected = known.encoder()(["THE cat, unheard"])[0]
    np.testing.assert_array_equal(every(data)[0], (expected + [0] * 5)[:5])
    with pytest.raises(
        DataError, match=r"line 1: token \d+ is beyond the vocabulary, whose tokens are 0 to 1"
    ):
        fitted(path, tokenized(known.tokenizer, below=2)[0], parts=parts)


def test_a_damaged_tokenizer_is_the_bundle_s_fault(tmp_path: Path) -> None:
    spec, parts = tokenized(b"no tokenizer")

    with pytest.raises(BundleError, match="the bundle's tokenizer cannot be read"):
        fitted(written(tmp_path / "d.tsv", "good\tx\n"), spec, parts=parts)


def test_without_tokenizers_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, parts = tokenized(b"{}")
    monkeypatch.setitem(sys.modules, "tokenizers", None)

    with pytest.raises(ConfigError, match=r"pip install 'edgefl-tiers\[text\]'"):
        fitted(written(tmp_path / "d.tsv", "good\tx\n"), spec, parts=parts)
