"""docs/protocol.md against the code: what a device in another language looks up there has to be there."""

from __future__ import annotations

import re

from tests.docs.documents import DOCS, ROOT

PROTOCOL = (DOCS / "protocol.md").read_text()
REASON = re.compile(r'"((?:already|bad|closed|malformed|no|not|too|unknown|wrong)(?:-[a-z]+)*)"')
OF_PROFILES = ROOT / "server" / "edgefl_server" / "profiling"


def sent() -> set[str]:
    """Reasons of refusals in the server's source; those of profiles go to no device."""
    files = (file for file in (ROOT / "server").rglob("*.py") if not file.is_relative_to(OF_PROFILES))
    return {reason for file in files for reason in REASON.findall(file.read_text()) if "-" in reason}


def test_every_reason_of_a_refusal_has_a_row() -> None:
    tables = (line.split(" | ")[0] for line in PROTOCOL.splitlines() if line.startswith("| `"))
    rows = {code for cell in tables for code in re.findall(r"`([a-z-]+)`", cell)}

    assert {"wrong-shape", "closed-round", "no-tier"} <= sent()
    assert sent() | {"malformed"} <= rows
