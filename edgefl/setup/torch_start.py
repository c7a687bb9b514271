"""What torch imports while models are traced, and no command that compiles uses: torch's own compiler, 350 modules, and its
tensors on several machines, 150."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from edgefl.system.lazy_modules import absent, is_unused, on_first_use
from edgefl_export.capture.patches import Patch, patched

_DYNAMO = "torch._dynamo"
_DISTRIBUTED = "torch.distributed.tensor"


def without_dynamo() -> None:
    """Leave ``torch._dynamo`` out until somebody compiles with it, such as a model of the user; to be called by a command.

    torch marks its decompositions as not to be compiled, and imports the compiler for that; its fake tensors do so for a
    setting, and its gradients to turn off what nobody has turned on. Each mode that sees torch's ops asks once which class
    a tensor on several machines has: here it is one that has no tensors, also for whoever imports it later.
    """
    on_first_use(_DYNAMO, {"disable": _disable}, alone=("config",))
    if is_unused(_DYNAMO):
        on_first_use(f"{_DYNAMO}.compiled_autograd", {"_disable": nullcontext})
    on_first_use(_DISTRIBUTED, {"DTensor": type("DTensor", (), {})})


def load_export() -> None:
    """Load ``torch.export`` and the compiler that it needs, as torch loads them without Triton and distributed training."""
    without_dynamo()
    on_first_use("networkx", {"DiGraph": object})  # an annotation of the compiler names it
    import torch.distributed
    from torch.utils._triton import has_triton_package

    with (
        patched(Patch(torch.distributed, "is_available", lambda: False)),
        absent("triton", f"{_DISTRIBUTED}._api", "torch.distributed.fsdp._fully_shard"),
    ):
        import torch.export._trace
    if is_unused("networkx"):
        vars(sys.modules["networkx"]).pop("DiGraph", None)  # ExecuTorch's plans need the class
    import torch.distributed._symmetric_memory  # its operators, which a `torch.compile` of the user needs

    has_triton_package.cache_clear()


def _disable(function: Callable[..., Any], recursive: bool = True, *, wrapping: bool = True) -> Any:
    """The function as it is while nobody compiles, then as ``torch._dynamo.disable`` makes it."""
    made: list[Callable[..., Any]] = []

    def called(*args: Any, **kwargs: Any) -> Any:
        if is_unused(_DYNAMO):
            return function(*args, **kwargs)
        if not made:
            import torch._dynamo

            made.append(torch._dynamo.disable(function, recursive, wrapping=wrapping))
        return made[0](*args, **kwargs)

    return called
