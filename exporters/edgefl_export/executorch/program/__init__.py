"""Writer of programs: partition into steps, plan of the arena, instructions, bytes."""

from edgefl_export.executorch import silent_import as _silent  # noqa: F401 - before any module that imports executorch
