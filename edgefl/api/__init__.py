"""Python API of edgefl. ``import edgefl`` exports its names; the command line calls the same functions."""
