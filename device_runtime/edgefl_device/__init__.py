"""The torch-free device: agent, round runner, engines, record, store, profiler."""

import edgefl.system as _system  # noqa: F401 - switches telemetry off before a runtime is imported
