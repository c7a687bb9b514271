"""Faster start of torch: without its compiler (350 modules) and distributed tensors (150), which no command needs."""

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
    """Delay the import of ``torch._dynamo`` until some code compiles with it, such as a model of the user. Called by
    commands.

    torch imports its compiler to mark decompositions as not compiled, for a setting of fake tensors, and to switch
    compiled gradients off. Each mode that intercepts torch's ops asks for the class of distributed tensors: it is
    replaced by a class without instances, also for later imports.
    """
    on_first_use(_DYNAMO, {"disable": _disable}, alone=("config",))
    if is_unused(_DYNAMO):
        on_first_use(f"{_DYNAMO}.compiled_autograd", {"_disable": nullcontext})
    on_first_use(_DISTRIBUTED, {"DTensor": type("DTensor", (), {})})


def load_export() -> None:
    """Import ``torch.export`` and the compiler that it needs, but neither Triton nor distributed training, which take
    longer.
    """
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
    """Return ``function`` with the behaviour of ``torch._dynamo.disable``, without importing the compiler now.

    Until torch compiles, the result just calls ``function``.
    """
    made: list[Callable[..., Any]] = []

    def called(*args: Any, **kwargs: Any) -> Any:
        if is_unused(_DYNAMO):
            return function(*args, **kwargs)
        if not made:
            import torch._dynamo

            made.append(torch._dynamo.disable(function, recursive, wrapping=wrapping))
        return made[0](*args, **kwargs)

    return called
