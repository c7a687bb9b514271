"""The torch-free device: agent, round runner, engines, record, store, profiler."""

import edgefl  # noqa: F401 - onnxruntime is told to report to nobody before it is imported
