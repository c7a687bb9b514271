"""The engine of a GPU, to the last bit: torch on the processor, and Triton's kernel in its interpreter."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import edgefl_server.aggregate.cuda
from edgefl.wire.update.form import CodeEncoding, Encoding, FloatEncoding, Form, Section, SparseEncoding
from edgefl_server.aggregate.accumulator import CpuAccumulator
from edgefl_server.aggregate.adders import CheckedArrays
from edgefl_server.aggregate.cuda import TorchAccumulator
from edgefl_server.aggregate.scatter import BLOCK, compile_pieces
from edgefl_server.aggregate.triton_kernels import sign_tables
from tests.server.aggregate.test_kernels import LAYOUT, REGIONS, SIZE, drawn, forms, levels
from tests.support.commands import run_python

ROOT = Path(__file__).parents[3]
CPU = torch.device("cpu")
EVERY: list[Encoding] = [
    *(CodeEncoding(bits, levels(bits, 1)) for bits in range(1, 9)),
    CodeEncoding(1, (-1.0, 1.0), 0.01),
    FloatEncoding(),
    FloatEncoding("float16"),
    FloatEncoding("bfloat16"),
    SparseEncoding(0.03),
    SparseEncoding(1.0),
]


def agree(kind: str, form: Form, clients: int, seed: int) -> bool:
    """Whether torch and numba add the same, in batches of ``clients`` and of one."""
    rng, regions = np.random.default_rng(seed), REGIONS[kind]
    made = compile_pieces(LAYOUT, regions, form)
    updates = [
        CheckedArrays(made, tuple(arrays[name] for name in made.sources))
        for arrays in (drawn(rng, form, regions) for _ in range(clients))
    ]
    factors = rng.integers(1, 70_000, clients) * 2.0**20 * rng.random(clients)
    engines = CpuAccumulator(SIZE, threads=1), TorchAccumulator(SIZE, CPU)
    for engine in engines:
        engine.add(made, updates, factors)
        engine.add(made, updates[-1:], factors[-1:])
    return np.array_equal(engines[0].sums(), engines[1].sums()) and bool(engines[0].sums().any())


@pytest.mark.parametrize("encoding", EVERY, ids=str)
@pytest.mark.parametrize("kind", ["slices", "entries"])
def test_torch_adds_every_encoding(encoding: Encoding, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edgefl_server.aggregate.cuda, "SLAB", 700)
    groups = {name: number for number, name in enumerate(LAYOUT.shapes)}
    assert agree(kind, Form("any", sections=(Section(tuple(sorted(REGIONS[kind])), encoding, groups),)), 3, 4)


@given(st.data(), st.sampled_from(sorted(REGIONS)), st.integers(1, 9), st.integers(0, 2**32))
def test_torch_adds_any_form_as_numba(data: st.DataObject, kind: str, clients: int, seed: int) -> None:
    assert agree(kind, data.draw(forms(REGIONS[kind])), clients, seed)


def test_slabs_hold_every_entry_once_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edgefl_server.aggregate.cuda, "SLAB", 450)
    made = compile_pieces(LAYOUT, REGIONS["whole"])
    [work] = made.works
    found = list(
        edgefl_server.aggregate.cuda.slabs(work, edgefl_server.aggregate.cuda.DeviceBatch(made, [], CPU))
    )
    assert torch.cat([slab.target for slab in found]).tolist() == made.targets().tolist()
    assert [len(slab.target) for slab in found] == [407 + 1, 64, BLOCK + 300 + 15]


def test_a_table_sums_what_four_clients_add() -> None:
    values = np.array([[[-1, 1]], [[-10, 10]], [[-100, 100]], [[-1000, 1000]], [[5, 7]]])
    tables = sign_tables(values)
    assert tables.shape == (1, 2, 16)
    assert tables[0, 0, [0, 1, 0b1010, 15]].tolist() == [-1111, -1109, 909, 1111]
    assert tables[0, 1].tolist() == [5, 7] * 8


@pytest.mark.slow
def test_the_triton_kernel_gives_the_bits_of_a_plain_sum() -> None:
    """Any number of clients, length, first bit, group and target, extremes of int64, and the whole engine around it."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = run_python("-m", "tests.server.aggregate.signs_in_triton", cwd=ROOT, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) == 15
    assert [name for name, same in found.items() if not same] == []


def test_the_triton_kernel_compiles_for_a_gpu_that_is_not_here() -> None:
    """The interpreter takes what the compiler does not. sm_90 is an example, and the assembler comes with triton."""
    from triton import compile as compile_
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from edgefl_server.aggregate.triton_kernels import _add_signs

    types = ("*i32", "i64", "i32", "*u8", "*i64", "*i64", "i64", "*i64", "constexpr")
    source = ASTSource(_add_signs, dict(zip(_add_signs.arg_names, types, strict=True)), {"WORDS": 128})
    made = compile_(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "maxnreg": 128})
    assert made.asm["cubin"] and made.metadata.shared <= 48 << 10
