"""Settings of the benchmark of a training step."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from edgefl.bench.common.machine import quiet_environment
from edgefl.wire.errors import ConfigError
from exporters.memory.recompute import Budget


@dataclass(frozen=True)
class TrainStepSettings:
    """Settings of the benchmark. ``ort_training``, ``jax`` and ``onnxsim`` are Python interpreters of environments that have
    onnxruntime-training, JAX, and onnxsim with onnxruntime.

    Raises ConfigError for an interpreter that is not there.
    """

    batch: int = 32
    target: str = "onnx"
    threads: int = 1
    repeat: int = 5
    tier: str = "strong"
    # Of sequences: for samples of which no more tokens count; 0 is whole ones.
    length: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    ort_training: str = ""
    jax: str = ""
    onnxsim: str = ""
    # Whether ExecuTorch's own training export runs too, which takes minutes.
    et_training: bool = False
    # Torch's step through torch.compile, which needs a C++ compiler and takes a minute or more to compile.
    compile: bool = False
    # Torch's step on images whose channels lie innermost in memory.
    channels_last: bool = False
    # Whether the variants of the step are tried first, as on a device, and the fastest form is measured.
    tune: bool = False
    # How values wait for the backward pass of the exported step.
    activations: str = "float32"
    # Recomputation and paging until the peak over idle fits; None is as fast as it can be.
    memory_budget: Budget | None = None

    def __post_init__(self) -> None:
        others = {"onnxruntime-training": self.ort_training, "JAX": self.jax, "onnxsim": self.onnxsim}
        for package, python in others.items():
            if python and shutil.which(python) is None:
                raise ConfigError(
                    f"there is no Python interpreter {python!r} for {package}; give the path of one, such as "
                    "environment/bin/python",
                    python=python,
                )

    @property
    def environment(self) -> dict[str, str]:
        """Variables of every measured process."""
        return quiet_environment(self.threads)
