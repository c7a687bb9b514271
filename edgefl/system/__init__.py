"""Utilities of all packages: files, processes, memory, sizes. Imports nothing else of edgefl."""

import os

# onnxruntime's packages since 1.29 report over HTTPS which graphs are loaded on which machine. A user who wants that sets
# the variable to 0; a sandboxed engine never reports.
if not os.environ.get("ORT_DISABLE_TELEMETRY"):
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"
