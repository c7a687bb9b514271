"""``python -m edgefl.web``: serve the page with the :class:`edgefl.web.page.WebSettings` in JSON on standard input."""

from __future__ import annotations

import sys

import msgspec

from edgefl.errors import EdgeflError
from edgefl.system.processes import end_by_signal
from edgefl.web.page import WebSettings
from edgefl.web.serve import serve

if __name__ == "__main__":
    end_by_signal()
    try:
        serve(msgspec.json.decode(sys.stdin.buffer.read(), type=WebSettings))
    except EdgeflError as error:
        sys.stderr.write(f"error: {error.message}\n")
        sys.exit(error.exit_code)
