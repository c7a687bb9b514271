"""Writer of programs: partition, memory, instructions, bytes."""

from edgefl_export.executorch import silent_import as _silent  # noqa: F401 - before any module that imports executorch
