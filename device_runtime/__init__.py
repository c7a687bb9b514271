"""The torch-free device: agent, round runner, engines, record, store, profiler."""
