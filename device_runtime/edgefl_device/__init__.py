"""The torch-free device: agent, round runner, engines, record, store, profiler."""

from edgefl.system import silence as _silence  # noqa: F401
