"""The formats that graphs are written in. An engine reads one of them and has its name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, get_args

from edgefl.wire.errors import ConfigError

FormatName = Literal["onnx", "executorch"]

Outputs = Literal["caller", "planned"]
"""Whose memory the outputs of an ExecuTorch program are in: the caller's, or that which the program planned."""

FORMATS: tuple[FormatName, ...] = get_args(FormatName)

EXECUTORCH_DTYPES: Mapping[int, str] = {
    0: "uint8",
    1: "int8",
    2: "int16",
    3: "int32",
    4: "int64",
    5: "float16",
    6: "float32",
    7: "float64",
    11: "bool",
    27: "uint16",
    28: "uint32",
    29: "uint64",
}
"""By ExecuTorch's number of an element type, what a port calls it; types that no port has are left out."""


def check_outputs(outputs: Outputs, formats: Iterable[str]) -> None:
    """Raise ConfigError if the outputs are to be planned and none of the formats is ExecuTorch."""
    if outputs == "planned" and "executorch" not in (names := tuple(formats)):
        raise ConfigError(
            f"only ExecuTorch programs have planned outputs, and the format is {', '.join(names)}: choose executorch, or "
            "leave outputs out",
            formats=names,
        )
