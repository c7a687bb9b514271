# mypy: ignore-errors
"""Kinds (c) and (d): Python state and buffers that change from call to call, weights that forward writes."""

from __future__ import annotations

import random

import torch
from torch import nn

from tests.support.corpus.building import SEQUENCE, Collection, TwoLayers

_ = Collection()
CASES = _.cases


class Net(TwoLayers):
    """Two layers; subclasses change what lies between."""

    def forward(self, x):
        return self.b(self.between(torch.tanh(self.a(x))))

    def between(self, h):
        return h


@_.case("c-state", "refused")
class WarmUpCounter(Net):
    # The scale of the first call is in the graph for ever.
    step = 0

    def between(self, h):
        self.step += 1
        return h * min(1.0, self.step / 5)


@_.case("c-state", "refused")
class GumbelTemperatureSchedule(Net):
    def __init__(self):
        super().__init__()
        self.tau = 4.0

    def between(self, h):
        self.tau = max(0.5, self.tau * 0.7)
        return (h / self.tau).softmax(-1)


@_.case("c-state", "refused")
class PreviousBatchInAttribute(Net):
    # The last batch's mean, as a tensor that is no buffer.
    last = None

    def between(self, h):
        out = h if self.last is None else h - self.last
        self.last = h.detach().mean(0)
        return out


@_.case("c-state", "refused")
class ScheduleInDict(Net):
    # The state is inside a dictionary: __setattr__ sees nothing.
    def __init__(self):
        super().__init__()
        self.info = {"calls": 0}

    def between(self, h):
        self.info["calls"] += 1
        return h + 0.3 * self.info["calls"]


@_.case("c-state", "refused")
class ListGrows(Net):
    def __init__(self):
        super().__init__()
        self.seen = []

    def between(self, h):
        self.seen.append(1)
        return h * (1.0 / len(self.seen))


@_.case("c-state", "refused")
class AlternatingBranches(Net):
    # GAN-like: even calls take another path.
    flip = False

    def between(self, h):
        self.flip = not self.flip
        return h if self.flip else torch.relu(-h)


@_.case("c-state", "refused")
class ClassAttributeCounter(Net):
    calls = 0

    def __init__(self):
        super().__init__()
        type(self).calls = 0

    def between(self, h):
        type(self).calls += 1
        return h * (1 + type(self).calls)


@_.case("c-state", "refused")
class IteratorOfScales(Net):
    def __init__(self):
        super().__init__()
        self.scales = iter([1.0, 0.5, 0.25, 0.1] * 10)

    def between(self, h):
        return h * next(self.scales)


@_.case("c-state", "refused")
class LateSwitch(Net):
    # Nothing changes in the first two calls.
    step = 0

    def between(self, h):
        self.step += 1
        return h if self.step <= 2 else h * 0.0 + h.detach() * 3


@_.case("c-state")
class LoggingCounter(Net):
    # Counted and never read by arithmetic.
    def __init__(self):
        super().__init__()
        self.calls, self.seen_rows = 0, []

    def between(self, h):
        self.calls += 1
        self.seen_rows.append(h.shape[0])
        return h


@_.case("c-state")
class LastActivationKept(Net):
    # Kept for inspection: what forward leaves behind and never reads.
    def between(self, h):
        self.activations = h.detach()
        self.attention = h
        return h


@_.case("c-state")
class CacheWithinOneCall(Net):
    # Set and read inside one forward.
    def between(self, h):
        self.h = h * 2
        return self.h.relu()


@_.case("c-state", sample=SEQUENCE)
class CellWithStatePerCall(nn.Module):
    # The cell keeps its own h, which forward resets each time.
    def __init__(self):
        super().__init__()
        self.cell, self.head, self.h = nn.GRUCell(8, 6), nn.Linear(6, 3), None

    def step(self, x):
        self.h = self.cell(x, self.h)

    def forward(self, x):
        self.h = None
        for t in range(x.shape[1]):
            self.step(x[:, t])
        return self.head(self.h)


@_.case("c-state", sample=SEQUENCE)
class DepthIndexInAttribute(nn.Module):
    # A counter that every forward begins anew.
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        self.depth = 0
        for block in self.blocks:
            self.depth += 1
            x = x + block(x).tanh() / self.depth
        return self.head(x.mean(1))


@_.case("c-state", "refused")
class PythonRandomDepth(Net):
    def between(self, h):
        return h * random.choice([0.5, 1.0, 2.0])


@_.case("c-buffer")
class EmaOfActivations(Net):
    # A float buffer that forward reads and moves.
    def __init__(self):
        super().__init__()
        self.register_buffer("ema", torch.zeros(8))

    def between(self, h):
        if self.training:
            self.ema.mul_(0.7).add_(0.3 * h.detach().mean(0))
        return h - self.ema


@_.case("c-buffer")
class EmaByAssignment(Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("ema", torch.ones(8))

    def between(self, h):
        self.ema = 0.5 * self.ema + 0.5 * h.detach().abs().mean(0)
        return h / self.ema


@_.case("c-buffer")
class IntegerStepBufferRead(Net):
    # An int64 buffer that decides a warm-up.
    def __init__(self):
        super().__init__()
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))

    def between(self, h):
        self.step += 1
        return h * (self.step.float() / 5).clamp(max=1.0)


@_.case("c-buffer")
class IntegerStepInSubmodule(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.warm, self.b = nn.Linear(8, 8), IntegerStepBufferRead(), nn.Linear(3, 3)

    def forward(self, x):
        return self.b(self.warm(self.a(x)))


@_.case("c-buffer")
class IntegerCounterUnread(Net):
    # Like num_batches_tracked: moves and decides nothing.
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(1, dtype=torch.long))

    def between(self, h):
        self.count.add_(h.shape[0])
        return h


@_.case("c-buffer")
class VectorQuantiserEma(nn.Module):
    # A codebook that moves by averages, with a straight-through gradient.
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 4), nn.Linear(4, 3)
        self.register_buffer("codes", torch.randn(5, 4))

    def forward(self, x):
        h = self.a(x)
        near = ((h.unsqueeze(1) - self.codes) ** 2).sum(-1).argmin(1)
        one = nn.functional.one_hot(near, 5).float()
        if self.training:
            with torch.no_grad():
                total = one.sum(0).unsqueeze(1)
                mean = (one.t() @ h) / total.clamp(min=1)
                self.codes.copy_(torch.where(total > 0, 0.8 * self.codes + 0.2 * mean, self.codes))
        return self.b(h + (self.codes[near] - h).detach())


@_.case("c-buffer")
class NonPersistentMovingBuffer(Net):
    # Outside of the state dictionary, and still moves: no server can average it.
    def __init__(self):
        super().__init__()
        self.register_buffer("running", torch.zeros(8), persistent=False)

    def between(self, h):
        self.running.lerp_(h.detach().mean(0), 0.5)
        return h + 2 * self.running


@_.case("c-pointer")
class RingBufferQueue(Net):
    # MoCo's queue: rows at a moving pointer are replaced.
    def __init__(self):
        super().__init__()
        self.register_buffer("queue", torch.randn(12, 8))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    def between(self, h):
        queue = self.queue.clone()
        out = h + 0.1 * (h @ queue.t()).softmax(-1) @ queue
        with torch.no_grad():
            rows = (self.pointer + torch.arange(h.shape[0])) % 12
            self.queue[rows] = h.detach()
            self.pointer.copy_((self.pointer + h.shape[0]) % 12)
        return out


class Written(Net):
    """Forward writes a weight before it is used."""

    def forward(self, x):
        with torch.no_grad():
            self.write()
        return self.b(torch.tanh(self.a(x)))


@_.case("d-write", "refused")
class WganClipping(Written):
    # Weight clipping of every parameter.
    def write(self):
        for each in self.parameters():
            each.clamp_(-0.15, 0.15)


@_.case("d-write", "refused")
class MaxNormRows(Written):
    def write(self):
        norm = self.b.weight.norm(dim=1, keepdim=True)
        self.b.weight.mul_((0.4 / norm).clamp(max=1.0))


@_.case("d-write", "refused")
class RenormedInPlace(Written):
    def write(self):
        self.a.weight.copy_(torch.renorm(self.a.weight, 2, 0, 0.5))


@_.case("d-write", "refused")
class WeightDataAssigned(Written):
    # By .data, outside of every no_grad.
    def write(self):
        self.a.weight.data = self.a.weight.data / self.a.weight.data.norm()


@_.case("d-write", "refused")
class OneRowZeroed(Written):
    # A padding row is set to zero.
    def write(self):
        self.b.weight[0] = 0.0


@_.case("d-write", "refused")
class DecayedAfterUse(Net):
    # Written behind its use.
    def forward(self, x):
        out = super().forward(x)
        self.b.bias.data.mul_(0.5)
        return out


def clip(part, args):
    """Clip the weights before each use."""
    part.weight.data.clamp_(-0.05, 0.05)


@_.case("d-write", "refused")
class ClippedByPreHook(Net):
    def __init__(self):
        super().__init__()
        self.b.register_forward_pre_hook(clip)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


@_.case("d-write", "refused")
class MomentumEncoderInForward(nn.Module):
    # The target network follows the online one inside forward.
    def __init__(self):
        super().__init__()
        self.online, self.target, self.head = nn.Linear(8, 6), nn.Linear(8, 6), nn.Linear(6, 3)
        self.target.requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            for slow, fast in zip(self.target.parameters(), self.online.parameters(), strict=True):
                slow.mul_(0.6).add_(fast, alpha=0.4)
        return self.head(self.online(x) * self.target(x))


@_.case("c-state")
class Slots(Net):
    # A class without a dictionary for what it declares.
    __slots__ = ("factor",)

    def __init__(self):
        super().__init__()
        self.factor = 0.5

    def between(self, h):
        return h * self.factor


@_.case("c-state", "refused")
class SlotCounter(Slots):
    def between(self, h):
        self.factor += 0.5
        return h * self.factor
