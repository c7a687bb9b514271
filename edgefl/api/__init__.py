"""The Python API: objects in, objects out. ``import edgefl`` gives its names; the command line is a thin layer over it."""
