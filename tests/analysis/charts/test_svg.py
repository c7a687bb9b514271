"""Charts are well-formed SVG that shows what was given and nothing else."""

from __future__ import annotations

import math
from xml.etree import ElementTree

import pytest

from edgefl.analysis.charts import (
    AMOUNT,
    COUNT,
    SHARE,
    bar_chart,
    format_number,
    heatmap,
    line_chart,
    linear,
    logarithmic,
)

NS = "{http://www.w3.org/2000/svg}"


def drawn(text: str, tag: str) -> list[ElementTree.Element]:
    return ElementTree.fromstring(text).findall(f"{NS}{tag}")


def words(text: str) -> list[str]:
    return ["".join(each.itertext()) for each in drawn(text, "text")]


def points(line: ElementTree.Element) -> list[tuple[float, float]]:
    return [tuple(map(float, pair.split(","))) for pair in line.attrib["points"].split()]  # type: ignore[misc]


def test_every_series_is_a_line_with_its_name_and_up_is_more() -> None:
    text = line_chart({"a": [(0, 1), (1, 3)], "b": [(0, 2), (1, 0)]}, title="T", x="round", y="loss")
    first, second = map(points, drawn(text, "polyline"))
    assert first[0][1] > first[1][1] and second[0][1] < second[1][1]
    assert first[0][0] < first[1][0]
    assert {"T", "round", "loss", "a", "b"} <= set(words(text))


def test_a_logarithmic_axis_spaces_ratios_equally() -> None:
    text = line_chart({"a": [(0, 1e-20), (1, 1e-10), (2, 1.0), (3, 0.0)]}, title="", x="", y="", log_y=True)
    (line,) = map(points, drawn(text, "polyline"))
    assert len(line) == 3
    assert line[0][1] - line[1][1] == pytest.approx(line[1][1] - line[2][1], abs=0.2)


def test_points_that_are_no_numbers_are_left_out() -> None:
    text = line_chart({"a": [(0, math.nan), (1, math.inf), (2, 1)]}, title="", x="", y="")
    assert len(drawn(text, "circle")) == 1 and not drawn(text, "polyline")
    with pytest.raises(ValueError, match="no point"):
        line_chart({"a": [(0, -1.0)]}, title="empty", x="", y="", log_y=True)


def test_names_and_titles_are_escaped() -> None:
    hard = '<b> & "c"'
    for text in (
        line_chart({hard: [(0, 1), (1, 2)]}, title=hard, x=hard, y=hard),
        bar_chart({hard: 1.0}, title=hard, y=hard, x=hard),
        heatmap([[1.0]], [hard], [hard], title=hard, x=hard, y=hard),
    ):
        assert hard in words(text)


def test_a_wide_legend_goes_on_in_the_next_row() -> None:
    few, many = ({f"a rather long name {i}": [(0.0, 0.0), (1.0, 1.0)] for i in range(n)} for n in (2, 9))
    tops = [
        min(y for _, y in points(drawn(line_chart(each, title="", x="", y=""), "polyline")[0]))
        for each in (few, many)
    ]
    assert tops[1] > tops[0] + 30


def test_bars_go_up_and_down_from_zero() -> None:
    rects = drawn(bar_chart({"up": 2.0, "down": -1.0, "none": math.nan}, title="", y=""), "rect")[1:]
    up, down = rects
    assert float(up.attrib["height"]) == pytest.approx(2 * float(down.attrib["height"]), abs=0.2)
    assert float(up.attrib["y"]) + float(up.attrib["height"]) == pytest.approx(
        float(down.attrib["y"]), abs=0.2
    )


def test_a_heat_map_has_a_cell_for_every_number_and_says_what_it_is() -> None:
    text = heatmap([[0.0, 1.0], [math.nan, 0.5]], ["r0", "r1"], ["c0", "c1"], title="")
    said = [cell.find(f"{NS}title") for cell in drawn(text, "rect")]
    assert [each.text for each in said if each is not None] == ["r0, c0: 0", "r0, c1: 1", "r1, c1: 0.5"]
    with pytest.raises(ValueError, match="rows"):
        heatmap([[1.0]], ["a", "b"], ["c"], title="")


@pytest.mark.parametrize(
    ("low", "high"),
    [
        (0, 1),
        (-3.7, 12.2),
        (1e-9, 2e-9),
        (5, 5),
        (0, 0),
        (9_999, 10_001),
        (0.11, 0.11000000000000001),
        (-5 - 1e-15, -5),
    ],
)
def test_ticks_enclose_the_values_and_are_few(low: float, high: float) -> None:
    marks = linear(low, high)
    assert marks[0] <= low and marks[-1] >= high and 2 <= len(marks) <= 14
    logs = logarithmic(1e-20, 30.0)
    assert logs[0] <= 1e-20 and logs[-1] >= 30.0 and len(logs) <= 10


def marks(text: str, beside: str) -> list[float]:
    """The numbers on the axis whose texts are anchored so: "end" up, "middle" across."""
    small = [each for each in drawn(text, "text") if each.attrib.get("class") == "small"]
    return [float(each.text or "") for each in small if each.attrib["text-anchor"] == beside]


@pytest.mark.parametrize("accuracy", [0.0, 0.8, 1.0])
def test_an_axis_of_shares_goes_from_0_to_1_and_one_of_amounts_from_0(accuracy: float) -> None:
    text = line_chart({"a": [(37.3, accuracy)]}, title="", x="", y="", x_span=AMOUNT, y_span=SHARE)
    assert marks(text, "end") == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert marks(text, "middle")[0] == 0.0 and marks(text, "middle")[-1] >= 37.3


def test_values_beyond_make_an_axis_longer() -> None:
    text = line_chart({"a": [(0.0, -3.0), (1.0, 5.0)]}, title="", x="", y="", y_span=AMOUNT)
    assert marks(text, "end")[0] <= -3.0
    zero = line_chart({"a": [(0.0, 0.0)]}, title="", x="", y="", x_span=AMOUNT, y_span=AMOUNT)
    assert marks(zero, "end")[0] == marks(zero, "middle")[0] == 0.0
    assert marks(bar_chart({"a": 0.0}, title="", y=""), "end")[0] == 0.0


def test_an_axis_of_counts_has_no_fractions() -> None:
    text = line_chart({"a": [(1.0, 0.0), (2.0, 1.0)]}, title="", x="", y="", x_span=COUNT)
    assert marks(text, "middle") == [0.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (0.25, "0.25"), (1500.0, "1500"), (20_000.0, "20k"), (1e-12, "1e-12"), (2.5e6, "2.5e6")],
)
def test_numbers_on_axes_are_short(value: float, text: str) -> None:
    assert format_number(value) == text
