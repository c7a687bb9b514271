"""A bundle's variants compute what torch does; one that does not is left out."""

from __future__ import annotations

from collections import OrderedDict

import onnx
import pytest
import torch
from torch import nn

from edgefl.algorithms.baselines.sgd import sgd
from edgefl.contract.algorithm import Algorithm
from edgefl.contract.tensors import TensorSpec
from edgefl.models.split import split
from edgefl.objective.objective import Objective
from edgefl.wire.bundle.archive import Bundle
from edgefl.wire.bundle.manifest import DataSpec
from edgefl.wire.bundle.variants import unfolded
from edgefl_export.onnx import target
from edgefl_export.onnx.blocked.images import blocked
from edgefl_export.verify.graphs import verify
from tests.support.bundles import build_bundle

SHAPE = (3, 8, 8)


@pytest.fixture(scope="module")
def algorithm() -> Algorithm:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        parts = [nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.Flatten()]
        net = nn.Sequential(OrderedDict(body=nn.Sequential(*parts), head=nn.Linear(1024, 4)))
        spec = split(net, sample=TensorSpec(SHAPE), classes=4)
    return sgd(Objective(spec.module, spec.sample), batch=4, momentum=0.9)


def built(algorithm: Algorithm) -> Bundle:
    data = DataSpec(shape=SHAPE, dtype="float32", classes=4)
    return build_bundle(algorithm, ("body", "head"), model="net", tier="strong", data=data)


def test_a_variant_computes_what_torch_does_and_travels_as_changes(algorithm: Algorithm) -> None:
    bundle = built(algorithm)
    graph = bundle.manifest.graph("train")
    [variant] = graph.variants

    other = unfolded(variant, bundle.blobs[variant.blob.sha256], base=bundle.graph_bytes("train"))

    assert variant.name == "blocked" and variant.blob.size < variant.raw / 4
    assert variant.blob in bundle.manifest.blobs
    assert verify(algorithm.phases[0].function, other, 1, graph.in_place).worst < 1e-4
    assert not any(each.variants for each in bundle.manifest.graphs if each.name != "train")


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["another layout", "ops that nobody has"])
def test_a_wrong_one_is_left_out(algorithm: Algorithm, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged(model: bytes) -> bytes:
        proto = onnx.load_from_string(blocked(model) or b"")
        for node in proto.graph.node:
            if kind == "another layout" and node.op_type == "ReorderInput" and "w" not in node.input[0]:
                node.op_type, node.domain = "Identity", ""
            elif kind != "another layout" and node.op_type == "ReorderInput":
                node.op_type = "NobodyHasIt"
        return bytes(proto.SerializeToString())

    monkeypatch.setattr(target, "blocked", damaged)

    assert not built(algorithm).manifest.graph("train").variants
