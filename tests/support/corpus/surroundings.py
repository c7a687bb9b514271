# mypy: ignore-errors
"""Tensors in one memory, state in objects of C and of the system, and additions to the wrapper of a module."""

from __future__ import annotations

import ctypes
import io
import os
import threading

import torch
from torch import nn

from tests.support.corpus.building import Collection
from tests.support.corpus.state import Net

_ = Collection()
CASES = _.cases


def doubled(module, inputs, out):
    return 2 * out


@_.case("g-reuse", "refused")
class DecoderIsTransposedView(Net):
    def __init__(self):
        super().__init__()
        self.c = nn.Linear(8, 8)
        self.c.weight = nn.Parameter(self.a.weight.t())

    def between(self, h):
        return torch.tanh(self.c(h))


@_.case("g-reuse", "refused")
class TeacherInTheStudentsMemory(Net):
    def __init__(self):
        super().__init__()
        self.teacher = nn.Linear(8, 8).requires_grad_(False)
        for mine, its in zip(self.a.parameters(), self.teacher.parameters(), strict=True):
            its.data = mine.data

    def between(self, h):
        return h - self.teacher(h)


@_.case("g-reuse", "refused")
class SnapshotIsView(Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("snapshot", self.a.weight.data)

    def between(self, h):
        return h + h @ self.snapshot


@_.case("g-reuse")
class ColumnsOfOneTensor(Net):
    def __init__(self):
        super().__init__()
        whole = torch.randn(8, 16)
        self.c = nn.Linear(8, 8)
        self.a.weight.data, self.c.weight.data = whole[:, :8], whole[:, 8:]

    def between(self, h):
        return torch.tanh(self.c(h))


@_.case("c-state", "refused")
class CountsInText(Net):
    log = io.StringIO()

    def between(self, h):
        self.log.write("x")
        return h if self.log.tell() < 12 else 0.1 * h


@_.case("c-state", "refused")
class CountsInC(Net):
    calls = ctypes.c_int(0)

    def between(self, h):
        self.calls.value += 1
        return h if self.calls.value < 500 else 0.1 * h


@_.case("c-state", "refused")
class TakesPermits(Net):
    permits = threading.BoundedSemaphore(9)

    def between(self, h):
        return h if self.permits.acquire(blocking=False) else 0.1 * h


@_.case("c-state")
class WritesLog(Net):
    log, lock = io.StringIO(), threading.Lock()

    def between(self, h):
        with self.lock:
            self.log.write(f"{tuple(h.shape)} {os.environ.get('HOME')}\n")
        return h


@_.case("p-root")
def hook_on_data_parallel():
    model = nn.DataParallel(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)))
    model.register_forward_hook(doubled)
    return model


@_.case("p-root")
def data_parallel_of_data_parallel():
    return nn.DataParallel(nn.DataParallel(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))))


@_.case("p-root", "refused")
def hook_on_compiled():
    model = torch.compile(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)), backend="eager")
    model.register_forward_hook(doubled)
    return model
