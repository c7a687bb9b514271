"""Libraries that report to their makers are told not to, before they are imported: what a device tells is its owner's alone.

onnxruntime's packages since 1.29 say which graphs are loaded on which machine, over HTTPS. Whoever wants that sets the
variable to 0; an engine in a process of its own never does.
"""

from __future__ import annotations

import os

_VARIABLE = "ORT_DISABLE_TELEMETRY"

if not os.environ.get(_VARIABLE):
    os.environ[_VARIABLE] = "1"
