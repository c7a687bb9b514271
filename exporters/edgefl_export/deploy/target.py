"""Format and options of a deployed file. Checked before torch is loaded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from edgefl.errors import ConfigError
from edgefl_export.releases import RELEASES

Format = Literal["onnx", "executorch", "safetensors"]
Quantize = Literal["none", "int8", "float16"]
Backend = Literal["xnnpack", "portable"]

SUFFIXES: dict[str, Format] = {".onnx": "onnx", ".pte": "executorch", ".safetensors": "safetensors"}
"""Format of a file by its suffix."""
FACTS, LOADER = ".json", ".py"
"""Suffixes of the files beside a model: its facts, and the loader of a .safetensors file."""
OPSET = 18
"""Default opset: the oldest one that torch.onnx writes without a conversion, so that old runtimes load the file."""


@dataclass(frozen=True, kw_only=True)
class DeployTarget:
    """Format and options of a deployed file.

    Attributes:
        format: format of the file: ``onnx``, ``executorch`` (.pte) or ``safetensors``.
        batch: number of samples of one call.
        dynamic_batch: accept any number of samples in one call; ``batch`` must then be 1.
        quantize: ``int8`` (static, ranges measured on calibration data), ``float16``, or ``none``.
        opset: opset of an ONNX file; None for :data:`OPSET`.
        backend: kernels of a .pte file: ``xnnpack``, with portable kernels for the rest, or ``portable`` alone.
        preprocessing: include the preprocessing of samples in the file, as far as its operators allow.

    Raises:
        ConfigError: if options contradict each other.
    """

    format: Format = "onnx"
    batch: int = 1
    dynamic_batch: bool = False
    quantize: Quantize = "none"
    opset: int | None = None
    backend: Backend = "xnnpack"
    preprocessing: bool = False

    def __post_init__(self) -> None:
        suffix = next(suffix for suffix, each in SUFFIXES.items() if each == self.format)
        if self.opset is not None and self.format != "onnx":
            raise ConfigError(f"expected an .onnx file for `opset`, found {suffix}; leave `opset` out")
        if self.opset is not None and self.opset not in RELEASES:
            raise ConfigError(
                f"expected `opset` {min(RELEASES)} to {max(RELEASES)}, found {self.opset}; leave it out for {OPSET}",
                opset=self.opset,
            )
        if self.backend != "xnnpack" and self.format != "executorch":
            raise ConfigError(f"expected a .pte file for `backend`, found {suffix}; leave `backend` out")
        if self.quantize == "int8" and self.format == "safetensors":
            raise ConfigError(
                "expected `quantize` float16 for a .safetensors file, found int8; write int8 as .onnx or .pte"
            )
        if self.quantize == "int8" and self.backend == "portable":
            raise ConfigError(
                "expected `backend` xnnpack for `quantize` int8, found portable, which has no int8 kernels; use xnnpack"
            )
        if self.dynamic_batch and self.batch != 1:
            raise ConfigError(
                f"expected either `batch` or `dynamic_batch`, found both (batch {self.batch}); leave one out"
            )


def target_of(path: str | Path, **options: Any) -> DeployTarget:
    """Return the target whose format follows from the suffix of ``path``.

    Args:
        path: file to write; it ends in .onnx, .pte or .safetensors.
        options: other fields of :class:`DeployTarget`.

    Raises:
        ConfigError: if the suffix is unknown, or if options contradict each other.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in SUFFIXES:
        known = ", ".join(SUFFIXES)
        raise ConfigError(
            f"expected a file that ends in {known}, found {Path(path).name!r}; the suffix decides the format",
            path=str(path),
        )
    return DeployTarget(format=SUFFIXES[suffix], **options)


def files_of(path: str | Path) -> tuple[Path, ...]:
    """Return the paths that a deployment to ``path`` writes: model, facts (.json), and .py loader for .safetensors."""
    file = Path(path)
    loader = (file.with_suffix(LOADER),) if file.suffix.lower() == ".safetensors" else ()
    return (file, file.with_suffix(FACTS), *loader)


def refuse_existing(files: Iterable[Path]) -> None:
    """Raise ConfigError if one of ``files`` exists as a file or link. Devices such as /dev/stdout are accepted."""
    if found := [file for file in files if file.is_file() or file.is_symlink()]:
        raise ConfigError(
            f"expected new files, found {', '.join(map(str, found))}; choose another `out`, or overwrite with `force`",
            files=tuple(map(str, found)),
        )
