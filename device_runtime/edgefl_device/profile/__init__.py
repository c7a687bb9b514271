"""Costs of a bundle on this device, measured without torch in separate processes.

::

    found = profile_bundle(read_bundle(Path("weak.efl")), ProfileSettings(repeat=20))
    found.step_ms, found.peak_bytes

Each graph, and one short round, runs in a fresh process, so that its memory above the idle process is its own.
"""
