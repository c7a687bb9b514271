"""Records of CSV and JSON lines, and windows over sensor series."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgefl.wire.bundle.manifest import DataSpec, Input
from edgefl.wire.bundle.readers import SeriesSpec, TableSpec
from edgefl_device.data.samples import ONE_CLASS, LabelSpec
from tests.device_runtime.data.files import every, fitted, written
from tests.support.errors import DataError, refuses

TABLE = DataSpec(
    shape=(2,),
    dtype="float32",
    classes=2,
    names=("no", "yes"),
    reader=TableSpec(columns=("age", "height"), label="buys"),
)
CSV = "height,age,name,buys\n1.75,41,Ada,yes\n1.6,9,Bo,no\n"


def spec(reader: Any, shape: tuple[int, ...], **more: Any) -> DataSpec:
    return DataSpec(**{"shape": shape, "dtype": "float32", "classes": 2, "reader": reader, **more})


# -- tables ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["csv", "jsonl", "bom", "folder"])
def test_columns_are_taken_by_name(tmp_path: Path, form: str) -> None:
    records = [{"height": 1.75, "age": 41, "buys": "yes"}, {"height": "1.6", "age": 9, "buys": "no"}]
    contents = {"csv": CSV, "bom": "\ufeff" + CSV, "folder": CSV}
    lines = "\n".join(map(json.dumps, records)) + "\n\n"
    path = written(tmp_path / f"d.{'jsonl' if form == 'jsonl' else 'csv'}", contents.get(form, lines))
    data = fitted(tmp_path if form == "folder" else path, TABLE)

    np.testing.assert_allclose(every(data), [[41, 1.75], [9, 1.6]])
    np.testing.assert_array_equal(data.y, [1, 0])


def test_mean_and_deviation_are_taken_out(tmp_path: Path) -> None:
    reader = TableSpec(columns=("age", "height"), label="buys", mean=(25, 1.6), deviation=(16, 0.1))
    data = fitted(written(tmp_path / "d.csv", CSV), spec(reader, (2,), names=("no", "yes")))

    np.testing.assert_allclose(every(data), [[1, 1.5], [-1, 0]], atol=1e-5)


def test_inputs_beside_x_and_numbers_as_labels(tmp_path: Path) -> None:
    path = written(tmp_path / "d.csv", "user,item,when,tall,stars\n3,7,0.5,2,4.5\n1,0,0.25,1,2\n")
    reader = TableSpec(columns=("user",), label="stars", others={"seen": ("when", "tall")})
    others = (
        Input(name="item", shape=(), dtype="int64", below=8),
        Input(name="seen", shape=(2,), dtype="float32"),
    )
    data = fitted(path, spec(reader, (1,), dtype="int64", below=4, others=others), LabelSpec((1,), "float32"))

    np.testing.assert_array_equal(every(data), [[3], [1]])
    assert every(data).dtype == np.int64
    np.testing.assert_array_equal(data.other("item", np.arange(2)), [7, 0])
    np.testing.assert_array_equal(data.other("seen", np.arange(2)), [[0.5, 2], [0.25, 1]])
    np.testing.assert_array_equal(data.y, np.array([[4.5], [2]], np.float32))


def test_an_input_of_truth_values_is_read_from_0_and_1(tmp_path: Path) -> None:
    asked = Input(name="asked", shape=(), dtype="bool")
    flags = spec(TableSpec(columns=("a",), label="y"), (1,), others=(asked,))
    data = fitted(written(tmp_path / "d.csv", "a,asked,y\n1,1,0\n2,0,1\n"), flags)

    np.testing.assert_array_equal(data.other("asked", np.arange(2)), [True, False])
    for value, text in (("2", "beyond what bool holds"), ("0.5", "no whole number")):
        with pytest.raises(DataError, match=f"line 2: column 'asked' is '{value}', which is {text}"):
            fitted(written(tmp_path / "d.csv", f"a,asked,y\n1,{value},0\n"), flags)

    counts = msgspec.structs.replace(flags, others=(msgspec.structs.replace(asked, dtype="int64"),))
    with pytest.raises(DataError, match="'9223372036854775808', which is beyond what int64 holds"):
        fitted(written(tmp_path / "d.csv", f"a,asked,y\n1,{2**63},0\n"), counts)


def test_a_missing_column_is_named_with_those_there_are(tmp_path: Path) -> None:
    path = written(tmp_path / "d.csv", "age,buys\n3,yes\n")
    text = r"d\.csv has no column 'height'; it has 'age', 'buys'"

    with pytest.raises(DataError, match=text):
        fitted(path, TABLE)
    with pytest.raises(DataError, match=text):
        fitted(path, TABLE, policy="skip")


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("x,41,Ada,yes", "column 'height' is 'x', which is no number"),
        ("1.7,nan,Ada,yes", "column 'age' is 'nan', which is no number"),
        ("1.7,,Ada,yes", "column 'age' is empty"),
        ("1.7", "column 'age' is empty"),
        ("1,7,41,Ada,yes", "it has 5 fields, and there are 4 columns"),
        ("1.7,41,Ada,maybe", "no class is called 'maybe'; the federation's are no, yes"),
        ("1.7,41,Ada,1", "no class is called '1'"),
        ("1e300,41,Ada,yes", "column 'height' is '1e300', which is beyond what float32 holds"),
        ("1_7,41,Ada,yes", "column 'height' is '1_7', which is no number"),
        (f"{'x' * 999},41,Ada,yes", r"column 'height' is 'x{59}\.\.\., which is no number"),
    ],
)
def test_a_bad_line_is_named_or_left_out(tmp_path: Path, line: str, text: str) -> None:
    path = written(tmp_path / "d.csv", CSV + line + "\n")

    with pytest.raises(DataError, match=rf"d\.csv, line 4: {text}"):
        fitted(path, TABLE)
    data = fitted(path, TABLE, policy="skip")
    assert (len(data), data.skipped.count) == (2, 1)
    assert data.skipped.first[0].where.endswith("d.csv, line 4")


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ('{"age": 3', "it is no JSON"),
        ("[3, 4]", "it is no JSON object"),
        ('{"age": 3, "buys": "yes"}', "column 'height' is empty"),
        ('{"age": [3], "height": 1, "buys": "yes"}', "which is no number"),
        (f'{{"age": 1{"0" * 400}, "height": 1, "buys": "yes"}}', "which is no number"),
        (f'{{"age": {"[" * 100_000}', "it is JSON that is nested too deeply"),
        (f'{{"age": {"1" * 5000}}}', "it has a number of thousands of digits"),
    ],
)
def test_a_bad_line_of_json_is_named(tmp_path: Path, line: str, text: str) -> None:
    path = written(tmp_path / "d.jsonl", '{"age": 3, "height": 1, "buys": "yes"}\n' + line)

    with pytest.raises(DataError, match=rf"d\.jsonl, line 2: .*{text}"):
        fitted(path, TABLE)


def test_whole_numbers_are_whole_and_within_the_vocabulary(tmp_path: Path) -> None:
    whole = spec(TableSpec(columns=("a",), label="y"), (1,), dtype="int64", below=5)

    with pytest.raises(DataError, match=r"line 2: column 'a' is '1\.5', which is no whole number"):
        fitted(written(tmp_path / "d.csv", "a,y\n1.5,0\n"), whole)
    with pytest.raises(DataError, match="column 'a' is 5, the model takes whole numbers from 0 to 4"):
        fitted(written(tmp_path / "d.csv", "a,y\n5,0\n"), whole)
    with pytest.raises(DataError, match="class '2' is no number from 0 to 1"):
        fitted(written(tmp_path / "d.csv", "a,y\n1,2\n"), whole)


def test_no_row_at_all_is_refused_with_the_first_problem(tmp_path: Path) -> None:
    path = written(tmp_path / "d.csv", "age,height,buys\nx,1,yes\n")

    with pytest.raises(DataError, match="has no sample that can be used: 1 row is left out") as caught:
        fitted(path, TABLE, policy="skip")
    assert caught.value.details["problems"].count == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("form", ["csv", "jsonl"])
def test_a_line_in_another_encoding_is_named_or_left_out(tmp_path: Path, form: str) -> None:
    lines = {
        "csv": CSV.replace("Ada", "Zoë"),
        "jsonl": '{"name": "Zoë", "age": 1, "height": 2, "buys": "no"}\n{"age": 9, "height": 2, "buys": "no"}',
    }
    path = written(tmp_path / f"d.{form}", lines[form].encode("latin-1"))

    with pytest.raises(DataError, match=rf"d\.{form}, line [12]: it is no text in UTF-8"):
        fitted(path, TABLE)
    data = fitted(path, TABLE, policy="skip")
    assert (len(data), data.skipped.count) == (1, 1)


def test_a_file_in_utf_16_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"d\.csv cannot be read as text \(UTF-8\)"):
        fitted(written(tmp_path / "d.csv", CSV.encode("utf-16")), TABLE)


def test_a_quotation_mark_that_is_left_open_is_told(tmp_path: Path) -> None:
    path = written(tmp_path / "d.csv", CSV + '1,2,"Eve,yes\n' + "x" * 200_000)

    with pytest.raises(DataError, match=r"d\.csv, line 4: a quotation mark is opened here"):
        fitted(path, TABLE, policy="skip")


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (CSV + '1,2,"Eve"x,no\n3,4,Dan,no\n', r"line 4: it is no line of a CSV"),
        (CSV + '"1,2,Eve,no\n' * 1, r"line 4: a quotation mark is opened here"),
        (CSV.replace(",", ";").replace("1.75", "1,75"), r"separates its columns by ';', expected commas"),
        (CSV.replace(",", "\t"), r"separates its columns by '\\t', expected commas"),
        ("", r"d\.csv has no column 'age'; it has none"),
        (f'"{CSV}', "line 1: a quotation mark is opened here and never closed"),
        (f'{CSV[:7]}"{CSV[7:]}1,2,Eve",no\n', "line 1: a quotation mark is opened here and closed in line 4"),
        (f"sep=;\n{CSV.replace(',', ';')}", r"separates its columns by ';', expected commas"),
    ],
)
def test_what_is_no_csv_is_named_with_its_line(tmp_path: Path, content: str, text: str) -> None:
    with pytest.raises(DataError, match=text):
        fitted(written(tmp_path / "d.csv", content), TABLE)


@pytest.mark.parametrize(
    ("opened", "closed"),
    [
        ('1.7,30,"Eve,yes', '1.8,9,Dan",no'),
        ('1.7,30,"Eve,yes', '1.8,9,"Dan",no'),
        ('1.7,"30,Eve,yes', '1.8,"9",Dan,no'),
        ('1.7,30,Eve,"yes', '1.8,9,Dan,no"'),
    ],
)
@pytest.mark.parametrize("between", [0, 1, 40])
def test_a_closed_quote_hides_no_rows(tmp_path: Path, opened: str, closed: str, between: int) -> None:
    content = CSV + "\n".join([opened, *["1.5,8,Lee,no"] * between, closed])

    with pytest.raises(
        DataError, match=rf"line 4: a quotation mark is opened here and closed in line {5 + between}"
    ):
        fitted(written(tmp_path / "d.csv", content), TABLE, policy="skip")


def test_text_of_several_lines_with_commas_is_no_row(tmp_path: Path) -> None:
    letters = '1.7,30,"Dear Eve,\nthank you, Bo, and Dan, too,\nbye\n\nAda, Lee, Kim, Jo",yes\n'
    data = fitted(written(tmp_path / "d.csv", CSV + letters), TABLE)

    np.testing.assert_array_equal(data.y, [1, 0, 1])


def test_bom_and_blanks_are_no_part_of_the_table(tmp_path: Path) -> None:
    blank = ' height, age ,name, buys\n1.75, 41, "Ada, Lee", yes\n'
    for first in ("sep=,\n", '"sep=,"\r\n', "SEP=;\n", ""):
        data = fitted(written(tmp_path / "d.csv", first + blank), TABLE)
        np.testing.assert_allclose(every(data), [[41, 1.75]])
    with pytest.raises(DataError, match="line 3: column 'age' is 'x'"):
        fitted(written(tmp_path / "d.csv", f"sep=,\n{blank.splitlines()[0]}\n1,x,Ada,yes\n"), TABLE)


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_long_fields_quoted_lines_and_all_line_ends_are_read(tmp_path: Path, end: str) -> None:
    long = f'1.7,30,"{"x" * 200_000}{end}""y"" ",yes\n'
    data = fitted(written(tmp_path / "d.csv", (CSV + long).replace("\n", end)), TABLE)

    np.testing.assert_array_equal(data.y, [1, 0, 1])


@pytest.mark.parametrize("names", [(), ("0", "1"), ("caf\u00e9", "1")])
def test_class_numbers_are_read_as_tables_write_them(tmp_path: Path, names: tuple[str, ...]) -> None:
    plain = spec(TableSpec(columns=("a",), label="y"), (1,), names=names)
    first = "cafe\u0301" if "1" in names and "0" not in names else "0.0"

    np.testing.assert_array_equal(
        fitted(written(tmp_path / "d.csv", f"a,y\n1,{first}\n1, 1.00\n1,1\n"), plain).y, [0, 1, 1]
    )
    for label in ("1.5", "1e0", "-1.0", "2.0", "1.0.0"):
        with pytest.raises(DataError, match=r"line 2: (class|no class)"):
            fitted(written(tmp_path / "e.csv", f"a,y\n1,{label}\n"), plain)


def test_a_column_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"d\.csv has column 'age' more than once"):
        fitted(written(tmp_path / "d.csv", "age,height,age,buys\n1,2,3,yes\n"), TABLE)


@pytest.mark.parametrize(
    ("number", "label", "told"),
    [
        ("9" * 5000, ONE_CLASS, r"class '9{59}\.\.\. is no number from 0 to 1"),
        ("1e39", LabelSpec((), "float32"), "the label is '1e39', which is beyond what float32 holds"),
    ],
    ids=["class", "number"],
)
def test_numbers_of_a_label_are_those_of_its_type(
    tmp_path: Path, number: str, label: LabelSpec, told: str
) -> None:
    plain = spec(TableSpec(columns=("a",), label="y"), (1,))

    with pytest.raises(DataError, match=rf"line 2: {told}"):
        fitted(written(tmp_path / "d.csv", f"a,y\n1,{number}\n"), plain, label)


def test_a_reader_of_other_samples_than_the_models_is_refused(tmp_path: Path) -> None:
    reader = TableSpec(columns=("age",), label="buys")

    with refuses(DataError, found=((1,),), expected=(2,)):
        fitted(written(tmp_path / "d.csv", CSV), spec(reader, (2,)))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(content=st.one_of(st.binary(max_size=80), st.text('age,height,buys\n"{}:01.5yesno\t\0', max_size=80)))
@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_any_bytes_are_data_or_a_data_error(tmp_path: Path, suffix: str, content: str | bytes) -> None:
    head = "age,height,buys\n1,2,yes\n" if suffix == "csv" else '{"age": 1, "height": 2, "buys": "yes"}\n'
    body = content.encode() if isinstance(content, str) else content
    path = written(tmp_path / f"d.{suffix}", head.encode() + body)
    try:
        data = fitted(path, TABLE, policy="skip")
    except DataError:
        return
    assert np.isfinite(every(data)).all()


# -- series ----------------------------------------------------------------------------------------------------

WALK = SeriesSpec(columns=("ax", "ay"), window=3, step=2, label="does")
SERIES = spec(WALK, (2, 3), names=("sit", "walk"))


def recording(does: str, start: int = 0) -> str:
    lines = [f"{start + row},{10 * (start + row)},{what}" for row, what in enumerate(does.split())]
    return "ax,ay,does\n" + "\n".join(lines) + "\n"


def test_windows_are_cut_from_each_recording_with_the_label_of_most_rows(tmp_path: Path) -> None:
    written(tmp_path / "a.csv", recording("sit sit walk walk walk walk sit"))
    written(tmp_path / "b.csv", recording("walk sit", 50))
    data = fitted(tmp_path, SERIES)

    np.testing.assert_array_equal(data.y, [0, 1, 1])
    np.testing.assert_array_equal(every(data)[1], [[2, 3, 4], [20, 30, 40]])
    last = fitted(
        tmp_path, spec(SeriesSpec(**{**_of(WALK), "channels_last": True}), (3, 2), names=SERIES.names)
    )
    np.testing.assert_array_equal(every(last), every(data).transpose(0, 2, 1))


def _of(reader: SeriesSpec) -> dict[str, Any]:
    return {name: getattr(reader, name) for name in reader.__struct_fields__}


def test_folders_may_say_the_class_of_a_recording(tmp_path: Path) -> None:
    written(tmp_path / "walk" / "a.csv", recording("- - -"))
    written(tmp_path / "sit" / "a.csv", recording("- - - - -", 7))
    data = fitted(
        tmp_path, spec(SeriesSpec(columns=("ax",), window=3, step=1), (1, 3), names=("sit", "walk"))
    )

    np.testing.assert_array_equal(data.y, [0, 0, 0, 1])
    np.testing.assert_array_equal(every(data)[0], [[7, 8, 9]])


def test_a_row_beyond_the_vocabulary_is_a_bad_row(tmp_path: Path) -> None:
    whole = spec(SeriesSpec(columns=("a",), window=2, step=2), (1, 2), dtype="int64", below=5)
    path = written(tmp_path / "0" / "d.csv", "a\n1\n2\n3\n9\n").parent.parent

    with pytest.raises(
        DataError, match=r"line 5: column 'a' is 9, the model takes whole numbers from 0 to 4"
    ):
        fitted(path, whole)
    np.testing.assert_array_equal(every(fitted(path, whole, policy="skip")), [[[1, 2]]])


def test_no_window_holds_a_bad_row(tmp_path: Path) -> None:
    content = recording("sit sit sit sit sit sit sit").replace("1,10,sit\n", "?,10,sit\n")
    path = written(tmp_path / "a.csv", content)

    with pytest.raises(DataError, match=r"a\.csv, line 3: column 'ax' is '\?', which is no number"):
        fitted(path, SERIES)
    data = fitted(path, SERIES, policy="skip")
    assert (len(data), data.skipped.count) == (2, 1)
    np.testing.assert_array_equal(every(data)[:, 0, 0], [2, 4])


def test_recordings_that_are_too_short_are_refused(tmp_path: Path) -> None:
    with refuses(DataError, window=3):
        fitted(written(tmp_path / "a.csv", recording("sit sit")), SERIES)
