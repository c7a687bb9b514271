"""What the logs of supervised processes hold."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from edgefl.config import parse
from edgefl.errors import ConfigError, EdgeflError
from edgefl.lab.lab import Lab, ServerEvent
from edgefl.lab.processes import Supervisor
from tests.wire.mqtt.events import wait_until

CHILD = """
import sys
print('{"event": "progress", "text": "", "step": 1}', flush=True)
print('{"event": "declined", "text": "row 2: no class is called wolf"}', flush=True)
print("error: the data do not fit", file=sys.stderr, flush=True)
print('{"event": "offline", "text": "goodbye"}', flush=True)
sys.exit(%d)
"""


def test_a_log_has_the_texts_of_a_process_and_the_error_is_its_own(tmp_path: Path) -> None:
    supervisor = Supervisor(tmp_path)
    code = ConfigError.exit_code
    supervisor.start_program("strong-0", [sys.executable, "-c", CHILD % code])
    log = tmp_path / "logs" / "strong-0.log"
    wait_until(lambda: "goodbye" in log.read_text(), "the last text")

    with pytest.raises(EdgeflError, match=r"strong-0 stopped with code .*: the data do not fit") as raised:
        wait_until(lambda: supervisor.check() != [], "the end")
    assert raised.value.exit_code == code
    lines = set(log.read_text().splitlines())
    assert lines == {
        "declined  row 2: no class is called wolf",
        "error: the data do not fit",
        "offline  goodbye",
    }


def test_a_run_says_which_row_a_device_refuses(tmp_path: Path) -> None:
    """The server gets a code alone, so that the text must come from the device's own process."""
    lab = Lab(parse({"tiers": {"strong": {"count": 1}}}, source="the test"), tmp_path)
    lab.supervisor.lines.put(("strong-0", b'{"event": "progress", "text": "", "step": 1}\n'))
    lab.supervisor.lines.put(("strong-0", b'{"event": "data", "text": "d.csv, line 3: no number"}\n'))
    said = next(lab.events(patience_s=300))

    assert (
        isinstance(said, ServerEvent)
        and said.event["text"] == "strong-0 refuses its data: d.csv, line 3: no number"
    )
