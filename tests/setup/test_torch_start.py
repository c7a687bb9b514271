"""Torch's own compiler stays out of a process that compiles for devices, and is whole where somebody asks for it."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module

import pytest

import edgefl

_COMPILED = """
import json, sys
from edgefl.setup.torch_start import without_dynamo
from edgefl.system.lazy_modules import is_unused
without_dynamo()
import edgefl, torch
digest = edgefl.compile("mlp").digest
unused = is_unused("torch._dynamo") and is_unused("torch.distributed.tensor")
{more}
print(json.dumps([digest, unused, result]))
"""
_USED = """
import torch._dynamo.utils, torch._dynamo.config as config
assert torch._dynamo.utils is sys.modules["torch._dynamo.utils"] and torch._dynamo.config is config
assert torch._dynamo.utils.config is config and torch._dynamo.compiled_autograd.in_compiled_autograd_region is False
result = torch.compile(lambda x: torch.ones_like(x) + x, backend="eager")(torch.ones(2)).tolist()
"""


def _compiled(more: str, folder: str) -> list[object]:
    found = subprocess.run(
        [sys.executable, "-c", _COMPILED.format(more=more)],
        capture_output=True,
        text=True,
        check=True,
        env={"EDGEFL_CACHE": folder, "PATH": "", "PYTHONPATH": ":".join(sys.path)},
    )
    answer: list[object] = json.loads(found.stdout.splitlines()[-1])
    return answer


_EXPORTED = """
import sys
from edgefl.setup.torch_start import load_export
load_export()
load_export()
import torch
algorithm = torch.export.export(torch.nn.Linear(2, 3), (torch.ones(4, 2),))
assert "triton" not in sys.modules and "torch.distributed.tensor._ops" not in sys.modules
import networkx
import torch._inductor.lowering
assert not networkx.DiGraph().nodes
assert torch.distributed.is_available() and torch.compile(torch.sin, backend="eager")(torch.zeros(2)).sum() == 0
"""


@pytest.mark.slow
def test_export_loads_without_distributed_training_and_leaves_torch_whole() -> None:
    subprocess.run([sys.executable, "-c", _EXPORTED], check=True, env={"PYTHONPATH": ":".join(sys.path)})


@pytest.mark.slow
def test_a_bundle_is_compiled_without_torchs_compiler_and_is_the_same(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    without, unused, result = _compiled(_USED, str(tmp_path_factory.mktemp("without")))

    monkeypatch.setenv("EDGEFL_CACHE", str(tmp_path_factory.mktemp("with")))
    import_module("torch._dynamo.eval_frame")
    assert unused is True and without == edgefl.compile("mlp").digest
    assert result == [2.0, 2.0]  # what the user compiles is compiled
