"""What a run's last lines say of its uplink, from the server's events alone."""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from edgefl.cli.federation import live
from edgefl.config import parse
from edgefl.lab.lab import ServerEvent
from edgefl.wire.update.form import DENSE, SIGNS, CodeEncoding, Form, Section, update_size
from tests.support.events import device_evaluation

SHAPES = {"head.weight": (80, 100), "norm.running_mean": (1024,)}
SIGNED = Form(
    "scaled_sign",
    1,
    (
        Section(("head.weight",), CodeEncoding(1, SIGNS), {"head.weight": 0}),
        Section(
            ("norm.running_mean",), CodeEncoding(6, tuple(map(float, range(64)))), {"norm.running_mean": 0}
        ),
    ),
    change=True,
)


CLOSED = {"reports": 1, "seconds": 1.0, "down_bytes": 1}


def take(view: live.RunView, event: str, **fields: Any) -> Any:
    """The view's answer to an event of the server."""
    return view.take(ServerEvent({"event": event, **fields}))


def last_lines(codec: str, form: Form, capsys: pytest.CaptureFixture[str]) -> str:
    federation = parse({"codec": {"name": codec}, "tiers": {"strong": {"count": 1}}}, source="the test")
    sizes = {"strong": update_size(form, SHAPES, {"norm.running_mean"})}
    view = live.RunView(federation, ["strong-0"], sizes, live=False)
    for number, up in ((1, 2048), (2, 4096)):
        take(view, "deviceseen", device="strong-0", tier="strong", stage="reported", round=number)
        assert take(view, "roundclosed", **CLOSED, round=number, up_bytes=up, up_float32_bytes=30 * 2048)
    take(view, "finished", accuracy=0.75, model="m")
    view.conclude(Path("out"))
    return capsys.readouterr().out


def test_a_coded_run_shows_its_uplink_and_ratio(capsys: pytest.CaptureFixture[str]) -> None:
    said = last_lines("scaled_sign", SIGNED, capsys)

    assert "final accuracy 75.0%" in said
    assert "uplink          3.0 KiB per round (20.0x smaller than float32)" in said
    assert "moving statistics of norms: 0.8 KiB per round" in said  # 768 bytes of codes and a scale


def test_a_dense_run_tells_its_uplink_and_no_ratio(capsys: pytest.CaptureFixture[str]) -> None:
    said = last_lines("dense", DENSE, capsys)

    assert "uplink          3.0 KiB per round\n" in said
    assert "moving statistics of norms: 4.0 KiB per round" in said


@pytest.mark.parametrize(
    ("told", "score"),
    [
        ({"metric": "perplexity", "metrics": {"perplexity": 34.56789, "accuracy": 0.2}}, "perplexity 34.57"),
        ({"metric": "mae", "metrics": {"mae": 0.21349}}, "mae 0.2135"),
        (
            {"metric": "accuracy", "metrics": {"accuracy": 0.75, "f1": 0.7}, "accuracy": 0.75},
            "accuracy 75.0%",
        ),
        ({"metric": "loss", "metrics": {}, "loss": 0.125}, "loss 0.125"),
        ({"metric": "perplexity", "metrics": {}, "accuracy": None, "loss": None}, "not evaluated"),
    ],
)
def test_a_round_and_the_end_show_the_metric_of_the_task(
    capsys: pytest.CaptureFixture[str], told: dict[str, Any], score: str
) -> None:
    view = view_of(["strong-0"])
    take(view, "roundclosed", **CLOSED, **told, round=1, up_bytes=1, up_float32_bytes=1)
    take(view, "finished", model="m", **told)
    view.conclude(Path("out"))

    said = capsys.readouterr().out
    assert f"round   1  {score}  1 reports" in shown(view)
    assert (f"final {score}" in said) == (score != "not evaluated")


def test_an_evaluation_round_shows_its_result_and_counts_as_a_round(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tables = {
        "federation": {"rounds": 10},
        "codec": {"name": "scaled_sign"},
        "evaluate": {"split": 0.2, "every": 5},
        "tiers": {"strong": {"count": 1}},
    }
    view = live.RunView(parse(tables, source="the test"), ["strong-0"], {}, live=False)
    take(view, "roundopened", round=6, goal=5, evaluates=True)
    assert "round 0 of 12" in shown(view)
    assert "round 6 is open for 5 devices, which evaluate the model" in shown(view)
    take(view, "roundclosed", **CLOSED, accuracy=0.5, round=5, up_bytes=2048, up_float32_bytes=20 * 2048)
    found = msgspec.to_builtins(device_evaluation())
    take(view, "roundclosed", **CLOSED, round=6, up_bytes=999, up_float32_bytes=12, evaluation=found)
    take(view, "started", rounds=13)
    take(view, "finished", accuracy=0.5, model="m")
    (tmp_path / "bundles").mkdir()
    for name in ("weak.efl", "weak.evaluate.efl"):
        (tmp_path / "bundles" / name).touch()
    view.conclude(tmp_path)

    result = "on devices: accuracy 78.2%, median 75.5%, worst decile 65.4%, 5 devices"
    assert "round 6 of 13" in shown(view)
    assert f"round   6  {result}  1.0 s  down 0.0 KiB  up 1.0 KiB\n" in shown(view).replace(" " * 9, "")
    printed = capsys.readouterr().out
    assert f"final accuracy 50.0%\n{result}\n" in printed
    assert "2.0 KiB per round (20.0x smaller than float32)" in printed, "of training rounds alone"
    assert "weak.efl" in printed and "weak.evaluate.efl" not in printed


def view_of(devices: list[str], alive: bool = False) -> live.RunView:
    federation = parse({"tiers": {"strong": {"count": len(devices)}}}, source="the test")
    return live.RunView(federation, devices, {}, live=alive)


def shown(view: live.RunView) -> str:
    console = Console(width=200, record=True, file=StringIO())
    console.print(view._draw())
    return console.export_text()


def test_the_view_names_the_devices_that_a_round_waits_for() -> None:
    view = view_of(["strong-0", "strong-1"])
    waiting = {"next_round": 2, "known": 1, "needed": 2}
    take(view, "waiting", **waiting, missing=["strong-1"])
    assert "waiting for strong-1: 1 of 2" in shown(view)
    take(view, "waiting", **waiting)
    assert "waiting for devices: 1 of 2" in shown(view)


def test_the_view_shows_declines_and_that_a_run_ends_unfinished() -> None:
    view = view_of(["strong-0"])
    for text in ("the store is new", ""):
        take(view, "declined", device="strong-0", round=2, reason="no-carry", text=text)
    take(view, "refused", text="round 2 lacks strong-0")
    lines = [line.strip() for line in shown(view).splitlines()]
    assert "strong-0 declined round 2 (no-carry): the store is new" in lines
    assert "strong-0 declined round 2 (no-carry)" in lines and "the run ends unfinished" in lines


def test_the_view_says_once_why_rounds_are_abandoned() -> None:
    view = view_of(["strong-0"])
    for number in (1, 2):
        reason = {"round": number, "reason": "not-finite", "text": "it is NaN"}
        take(view, "rejected", device="strong-0", **reason)
        abandoned = {**reason, "reports": 0, "text": f"round {number} is abandoned: strong-0 (it is NaN)"}
        take(view, "roundclosed", **{**CLOSED, **abandoned}, up_bytes=0)
    text = shown(view)

    assert "strong-0 was refused in round 1 (not-finite): it is NaN" in text
    assert "strong-0 was refused in round 2 (not-finite): as in round 1" in text
    assert text.count("it is NaN") == 2 and text.count("as in round 1") == 2


LOST = {"event": "devicelost", "device": "strong-0", "tier": "strong", "round": 2, "until": 1.0}
AWAITING = {
    "event": "awaiting",
    "round": 2,
    "devices": [
        {"device": "strong-0", "online": False, "stage": "", "since": 1.0},
        {"device": "strong-1", "online": True, "stage": "train 3/10", "since": 1.0},
    ],
    "until": 1.0,
}


def test_the_view_names_devices_that_are_missing() -> None:
    view = view_of(["strong-0", "strong-1"])
    failed = {"event": "devicefailed", "device": "strong-1", "round": 2, "text": "no space"}
    for event in (LOST, failed, AWAITING):
        view.take(ServerEvent(event))

    lines = [line.strip() for line in shown(view).splitlines()]
    assert (
        "strong-0 is gone: it was stopped or killed, or its link broke; round 2 waits for it to come back"
        in lines
    )
    assert "strong-1 failed in round 2 and tries again: no space" in lines
    assert "round 2 waits for strong-0 (offline), strong-1 (train 3/10)" in lines


@pytest.mark.parametrize("alive", [False, True])
def test_off_a_terminal_each_round_is_a_line(capsys: pytest.CaptureFixture[str], alive: bool) -> None:
    view = view_of(["strong-0"], alive)
    closed = {"event": "roundclosed", "round": 1, "reports": 1, "seconds": 1.0, "accuracy": 0.5}
    for event in (
        {"event": "exporting", "tier": "strong", "text": "mine.py:make, tier strong: train"},
        {"event": "roundopened", "round": 1, "goal": 1},
        closed | {"down_bytes": 1024, "up_bytes": 1024},
        AWAITING,
        AWAITING,
    ):
        view.take(ServerEvent(event))

    printed = capsys.readouterr()
    lines, other = (printed.out, printed.err) if alive else (printed.err, printed.out)
    assert [line.split("  ")[0] for line in lines.splitlines()] == [
        "exporting and checking mine.py:make, tier strong",
        "round 1 is open for 1 devices",
        "round",
        "round 2 waits for strong-0 (offline), strong-1 (train 3/10)",
    ]
    assert other == "", "with --json, standard output is the algorithm's"
