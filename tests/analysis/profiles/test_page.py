"""The page, opened in a real browser."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from benchmarks.browser import Browser, LoadedPage
from edgefl.analysis.profiles import rows
from edgefl.analysis.profiles.accuracy import TierAccuracy
from edgefl.analysis.profiles.rows import page
from edgefl.wire.bundle.profiles import BundleProfile, MemoryTimeline, StageTimes
from tests.device_runtime.profile import made

_SVGS = "[...document.querySelectorAll('svg')].map(s => { const b = s.getBoundingClientRect(); return [b.width, b.height] })"


@pytest.fixture(scope="module")
def measured() -> BundleProfile:
    return made.measured()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def profiles(measured: BundleProfile) -> list[BundleProfile]:
    strong = made.tier_of(measured, "strong", measured.peak_bytes + (40 << 20), 9)
    return [strong, msgspec.structs.replace(measured, tier="<weak> & co")]


@pytest.fixture(scope="module")
def opened(
    profiles: list[BundleProfile], browser: Browser, tmp_path_factory: pytest.TempPathFactory
) -> LoadedPage:
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(page("Profile of <tiny>", profiles), encoding="utf-8")
    return browser.open(path)


def test_the_page_asks_for_nothing_but_itself_and_has_no_errors(opened: LoadedPage) -> None:
    outside = [url for url in opened.requests if not url.startswith(("file:", "data:"))]
    assert outside == []
    assert [url for url in opened.requests if url.startswith("file:")] == opened.requests[:1]
    assert opened.problems == []


def test_every_picture_has_a_size_and_draws_something(opened: LoadedPage, browser: Browser) -> None:
    sizes = browser.until(f"(all => all.length && all.every(([width]) => width) && all)({_SVGS})")
    assert len(sizes) == 1 + 2 * 2
    assert all(width > 100 and height > 100 for width, height in sizes), sizes
    lines = browser.value(
        "[...document.querySelectorAll('figure.memory')].map(f => f.querySelectorAll('polyline').length)"
    )
    assert all(count >= 3 for count in lines)


def test_chunks_of_the_multi_step_forward_have_own_lines(opened: LoadedPage, browser: Browser) -> None:
    told = browser.value("document.querySelector('figure.memory').textContent")
    for label in ("chunk 1 of 2", "chunk 2 of 2", "training (p0)"):
        assert label in told
    colours = browser.value(
        "[...document.querySelectorAll('figure.memory')[0].querySelectorAll('polyline, circle')]"
        ".map(p => getComputedStyle(p).stroke + getComputedStyle(p).fill)"
    )
    assert len(set(colours)) == len(colours) >= 4


def test_figures_equal_the_json(profiles: list[BundleProfile], opened: LoadedPage, browser: Browser) -> None:
    data = json.loads(browser.value("document.getElementById('profiles').textContent"))
    assert msgspec.convert(data, list[BundleProfile]) == profiles
    shown = browser.value(
        "[...document.querySelectorAll('table.summary tr')].slice(1).map(r => [...r.cells].map(c => c.textContent))"
    )
    assert shown == [list(row.values()) for row in rows.summary(profiles)]
    medians = browser.value(
        "[...document.querySelectorAll('table.graphs')[0].rows].slice(1).map(r => r.cells[3].textContent)"
    )
    assert medians == [rows.ms(graph["run"]["median_ms"]) for graph in data[0]["graphs"]]
    bars = browser.value(
        "[...document.querySelectorAll('figure.times')[0].querySelectorAll('rect title')].map(t => t.textContent)"
    )
    assert bars[0] == f"{data[0]['graphs'][0]['name']}: {data[0]['graphs'][0]['run']['median_ms']:g}"


def test_names_are_text_and_never_markup(opened: LoadedPage, browser: Browser) -> None:
    assert browser.value("document.querySelector('h1').textContent") == "Profile of <tiny>"
    assert browser.value("document.querySelectorAll('weak').length") == 0


def test_without_a_run_the_page_says_what_memory_stands_against(profiles: list[BundleProfile]) -> None:
    assert "No run has the accuracy" in page("p", profiles)
    told = page("p", profiles, TierAccuracy({"strong": 0.75}, "right in all", "Of the samples here."))
    other = page(
        "p", profiles, TierAccuracy({"small": 0.75, "large": 0.5}, "right in all", "Of the samples here.")
    )
    assert "Memory against what is trained" in other and "other tiers: small, large" in other
    assert "Memory against accuracy" in told and "right in all" in told and "Of the samples here." in told


def test_accuracy_goes_from_0_to_1_and_memory_from_0(profiles: list[BundleProfile]) -> None:
    told = page("p", profiles, TierAccuracy({"strong": 0.75}, "right in all", "Of the samples here."))
    picture = re.search(r'<figure class="tiers">(.*?)</figure>', told, re.DOTALL)
    assert picture is not None
    assert re.findall(r'text-anchor="end">([^<]*)<', picture[1]) == ["0", "0.2", "0.4", "0.6", "0.8", "1"]
    assert re.findall(r'class="small"[^>]*text-anchor="middle">([^<]*)<', picture[1])[0] == "0"


@pytest.mark.parametrize(("width", "phone"), [(1280, False), (390, True)])
def test_no_column_of_the_summary_is_cut(
    width: int, phone: bool, profiles: list[BundleProfile], browser: Browser, tmp_path: Path
) -> None:
    path = tmp_path / "report.html"
    path.write_text(page("p", profiles), encoding="utf-8")
    browser.screen(width, 900, phone=phone)
    browser.open(path)
    widths = browser.value(
        "(box => [box.scrollWidth - box.clientWidth, document.documentElement.scrollWidth])"
        "(document.querySelector('table.summary').parentElement)"
    )
    assert widths[0] == 0 and widths[1] <= width


def test_memory_that_is_unknown_is_not_drawn_at_zero(measured: BundleProfile) -> None:
    unknown = msgspec.structs.replace(measured, tier="mystery", peak_bytes=0)
    shown = page("p", [measured, unknown])
    assert "Memory is unknown: mystery." in shown
    assert shown.partition('class="tiers"')[2].partition("</figure>")[0].count("<circle") == 1
    assert 'class="tiers"' not in page("p", [unknown])


def test_memory_of_a_round_is_never_negative(measured: BundleProfile) -> None:
    below = msgspec.structs.replace(measured, idle_bytes=1 << 40)
    picture = page("p", [below]).partition('class="memory"')[2].partition("</figure>")[0]
    assert re.findall(r'text-anchor="end">([^<]*)<', picture)[0] == "0"


def test_an_empty_page_is_refused(measured: BundleProfile) -> None:
    with pytest.raises(ValueError, match="no profile"):
        page("p", [])
    bare = msgspec.structs.replace(measured, timeline=MemoryTimeline(moments=(), spans=()), io=())
    assert 'class="memory"' not in page("p", [bare])


def test_steps_are_shown_in_their_parts_and_estimates_are_called_so(measured: BundleProfile) -> None:
    split = made.graph("train", "step", 8.0).split
    assert split is not None
    guessed = made.graph("train", "step", 8.0, split=msgspec.structs.replace(split, how="estimated"))
    told = page(
        "p", [msgspec.structs.replace(measured, graphs=(guessed, made.graph("evaluate", "evaluate", 2.0)))]
    )
    for bar in ("forward: 2", "backward: 5", "update: 1", "evaluate: 2"):
        assert f"<title>{bar}</title>" in told
    assert "are estimated" in told


def test_each_part_of_a_step_has_its_median_and_its_p90(measured: BundleProfile) -> None:
    split = StageTimes(
        forward_ms=2.0,
        backward_ms=5.0,
        update_ms=1.0,
        how="measured",
        forward_p90_ms=2.5,
        backward_p90_ms=0.0,
        update_p90_ms=0.0,
    )
    step = made.graph("train", "step", 8.0, split=split)
    found = msgspec.structs.replace(measured, graphs=(step,))

    assert rows.parts(found)[0] == {
        "graph": "train",
        "part": "forward",
        "median ms": "2.000",
        "p90 ms": "2.500",
        "time is": "measured",
    }
    assert [row["part"] for row in rows.parts(found)] == ["forward", "backward", "update"]
    assert 'class="parts"' in page("p", [found])


def test_a_step_of_several_phases_counts_the_slowest_once(measured: BundleProfile) -> None:
    phases = (made.graph("warmup", "step", 8.0, macs=7), made.graph("binarize", "step", 9.0, macs=5))
    [row] = rows.summary([msgspec.structs.replace(measured, graphs=phases)])

    assert (row["step ms"], row["MACs a step"]) == ("9.000", "5")


def test_notes_of_several_machines_say_whose_they_are(measured: BundleProfile) -> None:
    other = msgspec.structs.replace(measured, machine=msgspec.structs.replace(measured.machine, cores=77))
    told = page("p", [measured, other], names=["phone-1", "phone-2"])
    assert "phone-1: energy" in told and "phone-2: " in told and "77 cores" in told
    assert "phone-1: energy" not in page("p", [measured, measured], names=["phone-1", "phone-2"])


def test_profiles_of_one_tier_keep_apart(measured: BundleProfile) -> None:
    other = msgspec.structs.replace(measured, engine="executorch")
    assert rows.names_of([measured, other]) == ["weak · onnx", "weak · executorch"]
    assert rows.names_of([measured, measured]) == ["weak (1)", "weak (2)"]


def test_the_browser_would_tell_of_requests_and_errors(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "bad.html"
    path.write_text(
        '<html><body><img src="http://127.0.0.1:9/x.png"><script>missing()</script></body></html>'
    )
    opened = browser.open(path)
    assert "http://127.0.0.1:9/x.png" in opened.requests
    assert any("Uncaught" in problem for problem in opened.problems)
