"""Telemetry of libraries, switched off before they are imported.

onnxruntime's packages since 1.29 report over HTTPS which graphs are loaded on which machine. A user who wants that sets the
variable to 0; a sandboxed engine never reports.
"""

from __future__ import annotations

import os

_VARIABLE = "ORT_DISABLE_TELEMETRY"

if not os.environ.get(_VARIABLE):
    os.environ[_VARIABLE] = "1"
