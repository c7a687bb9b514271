"""Files of the user with the names of modules that edgefl imports. Imports nothing that such a file could replace."""

from __future__ import annotations

import os
import sys

_REQUIRED = {
    *(
        "amqtt",
        "backports",
        "cryptography",
        "executorch",
        "google",
        "immutables",
        "msgspec",
        "numba",
        "numpy",
        "onnx",
    ),
    *(
        "onnx_ir",
        "onnxruntime",
        "onnxscript",
        "packaging",
        "paho",
        "psutil",
        "pydantic",
        "rich",
        "safetensors",
        "scipy",
    ),
    *("sqlalchemy", "starlette", "torch", "torchao", "torchvision", "typer", "typing_extensions", "uvicorn"),
}


def user_folders() -> list[str]:
    """Return the entries of ``sys.path`` that Python itself added: the folder of the script, or the working folder."""
    chosen = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    try:
        here = os.getcwd()
    except OSError:  # a folder that was deleted holds no files
        return []
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    script = os.path.dirname(os.path.realpath(file)) if file else here
    first = [each for each in sys.path[:1] if each in (script, here) and not sys.flags.safe_path]
    return [
        each for each in dict.fromkeys(("", *first)) if each in sys.path and (not each or each not in chosen)
    ]


def prefer_installed_modules() -> None:
    """Move a folder of :func:`user_folders` to the end of ``sys.path`` if a file in it replaces a standard or a required
    module: a ``random.py`` or ``numpy.py`` beside a script would otherwise be imported by every library."""
    for folder in user_folders():
        try:
            with os.scandir(folder or ".") as entries:
                names = {entry.name.removesuffix(".py") for entry in entries if entry.name.endswith(".py")}
        except OSError:
            continue
        if names & (sys.stdlib_module_names | _REQUIRED):
            sys.path.remove(folder)
            sys.path.append(folder)
