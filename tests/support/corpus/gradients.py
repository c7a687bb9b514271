# mypy: ignore-errors
"""Kinds (h) and (i): modes and statistics changed inside forward; gradients switched off."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from tests.support.corpus.building import IMAGE, SEQUENCE, Collection

_ = Collection()
CASES = _.cases


class Net(nn.Module):
    """Two layers with a part between them."""

    def __init__(self, between=None):
        super().__init__()
        self.a, self.between, self.b = nn.Linear(8, 8), between or nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.b(self.between(self.a(x)))


def noisy():
    """Return layers whose modes differ in what they compute."""
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))


@_.case("h-flipped")
class BackboneEvalInForward(Net):
    # model.backbone.eval() as the first line of forward.
    def __init__(self):
        super().__init__(noisy())
        self.between[1].running_mean.uniform_(-1, 1)

    def forward(self, x):
        self.between.eval()
        return self.b(self.between(self.a(x)))


@_.case("h-flipped", sample=SEQUENCE)
class TeacherEvalInForward(nn.Module):
    # Distillation: the teacher's mode and gradients are off while it is asked.
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True)
        self.teacher, self.student, self.head = layer, nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        self.teacher.eval()
        with torch.no_grad():
            hint = self.teacher(x)
        return self.head((self.student(x) * hint).mean(1))


@_.case("h-flipped")
class DropoutRateZeroed(Net):
    def __init__(self):
        super().__init__(noisy())

    def forward(self, x):
        self.between[2].p = 0.0
        return self.b(self.between(self.a(x)))


@_.case("h-flipped")
class TrainFlagPassedDown(Net):
    # train(False) and back around one call.
    def __init__(self):
        super().__init__(noisy())

    def forward(self, x):
        mode = self.between.training
        self.between.train(False)
        h = self.between(self.a(x))
        self.between.train(mode)
        return self.b(h)


@_.case("h-flipped")
class StatisticsReadBehindLayer(Net):
    # running_mean as it is after the layer has moved it.
    def __init__(self):
        super().__init__(nn.BatchNorm1d(8))

    def forward(self, x):
        h = self.between(self.a(x))
        return self.b(h + self.between.running_mean)


@_.case("h-flipped")
class VarianceAsPenalty(Net):
    def __init__(self):
        super().__init__(nn.BatchNorm1d(8))

    def forward(self, x):
        h = self.between(self.a(x))
        return self.b(h) * self.between.running_var.mean()


@_.case("h-flipped")
class MomentumOfNormSetInForward(Net):
    def __init__(self):
        super().__init__(nn.BatchNorm1d(8))

    def forward(self, x):
        self.between.momentum = 0.6
        return self.b(self.between(self.a(x)))


@_.case("h-flipped")
class StatisticsResetInForward(Net):
    def __init__(self):
        super().__init__(nn.BatchNorm1d(8))

    def forward(self, x):
        self.between.reset_running_stats()
        return self.b(self.between(self.a(x)))


@_.case("h-flipped")
class NormWithoutTrackingInForward(Net):
    def __init__(self):
        super().__init__(nn.BatchNorm1d(8))

    def forward(self, x):
        self.between.track_running_stats = False
        h = self.between(self.a(x))
        self.between.track_running_stats = True
        return self.b(h)


@_.case("h-flipped")
class FunctionalBatchNormOwnBuffers(Net):
    # F.batch_norm moves buffers that belong to the module itself.
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("var", torch.ones(8))

    def forward(self, x):
        h = F.batch_norm(self.a(x), self.mean, self.var, training=self.training, momentum=0.3)
        return self.b(self.between(h))


@_.case("h-flipped")
class FunctionalBatchNormFrozen(Net):
    # training=False with own statistics, in a module that trains.
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.randn(8))
        self.register_buffer("var", torch.rand(8) + 0.5)

    def forward(self, x):
        h = F.batch_norm(self.a(x), self.mean, self.var, training=False)
        return self.b(self.between(h))


@_.case("h-flipped", "refused")
class RequiresGradToggled(Net):
    # Off for one call, then on again.
    def forward(self, x):
        self.between.requires_grad_(False)
        h = self.between(self.a(x))
        self.between.requires_grad_(True)
        return self.b(self.between(h))


@_.case("i-grad")
class NoGradEncoder(Net):
    def forward(self, x):
        with torch.no_grad():
            h = self.between(self.a(x))
        return self.b(h)


@_.case("i-grad")
class InferenceModeThenClone(Net):
    def forward(self, x):
        with torch.inference_mode():
            h = self.between(self.a(x))
        return self.b(h.clone())


@_.case("i-grad")
class NoGradDecoratedMethod(Net):
    @torch.no_grad()
    def features(self, x):
        return self.between(x).tanh()

    def forward(self, x):
        h = self.a(x)
        return self.b(h * self.features(h))


@_.case("i-grad")
class InferenceModeDecorated(Net):
    @torch.inference_mode()
    def scale(self, h):
        return self.between(h).abs().mean()

    def forward(self, x):
        h = self.a(x)
        return self.b(h / self.scale(h).clone())


@_.case("i-grad")
class DetachedBranch(Net):
    # A gradient stop on one of two branches, as in BYOL.
    def forward(self, x):
        h = self.a(x)
        return self.b(self.between(h).detach() * h)


@_.case("i-grad")
class DetachInPlaceChain(Net):
    def forward(self, x):
        h = self.between(self.a(x))
        target = h.clone().detach_()
        return self.b((h - target) + target * 0.5)


@_.case("i-grad", "refused")
class RequiresGradOffInForward(Net):
    # Frozen by the first call of forward, for good.
    def forward(self, x):
        self.between.requires_grad_(False)
        return self.b(self.between(self.a(x)))


@_.case("i-grad")
class SetGradEnabledByFlag(Net):
    finetune = False

    def forward(self, x):
        with torch.set_grad_enabled(self.finetune):
            h = self.a(x)
        return self.b(self.between(h))


@_.case("i-grad")
class EnableGradInsideNoGrad(Net):
    def forward(self, x):
        with torch.no_grad():
            h = self.a(x)
            with torch.enable_grad():
                h = self.between(h)
        return self.b(h)


@_.case("i-grad")
class WeightDetachedAtUse(Net):
    # Its bias trains, its weight does not.
    def forward(self, x):
        h = F.linear(self.a(x), self.between.weight.detach(), self.between.bias)
        return self.b(h)


@_.case("i-grad")
class WeightDataAtUse(Net):
    def forward(self, x):
        return self.b(F.linear(self.a(x), self.between.weight.data))


@_.case("i-grad")
def bias_only_tuning():
    model = Net(nn.BatchNorm1d(8))
    for name, each in model.named_parameters():
        each.requires_grad_(name.endswith("bias"))
    return model


@_.case("i-grad", sample=SEQUENCE)
class HalfFrozenLstm(nn.Module):
    # Only the recurrent weights train.
    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.LSTM(8, 6, batch_first=True), nn.Linear(6, 3)
        self.rnn.weight_ih_l0.requires_grad_(False)
        self.rnn.bias_ih_l0.requires_grad_(False)

    def forward(self, x):
        return self.head(self.rnn(x)[0].mean(1))


@_.case("i-grad", sample=IMAGE)
class NoGradBackboneWithMovingNorm(nn.Module):
    # Gradients are off, statistics move all the same.
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        with torch.no_grad():
            h = self.backbone(x)
        return self.head(h.mean((2, 3)))


@_.case("i-grad")
class ParameterNeverUsed(Net):
    # Has no gradient at all, and stays.
    def __init__(self):
        super().__init__()
        self.spare = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(3))


@_.case("i-grad")
class StraightThroughRounding(Net):
    def forward(self, x):
        h = self.a(x).sigmoid()
        return self.b(self.between(h + (h.round() - h).detach()))


@_.case("i-grad")
class GradientReversal(Net):
    def forward(self, x):
        class Reverse(torch.autograd.Function):
            @staticmethod
            def forward(ctx, h):
                return h.view_as(h)

            @staticmethod
            def backward(ctx, g):
                return -0.5 * g

        return self.b(Reverse.apply(self.between(self.a(x))))


@_.case("i-grad")
class TeacherBeforeStudent(Net):
    # The student reads the sample after a unit that holds only the teacher.
    def __init__(self):
        super().__init__()
        self.teacher = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)).eval().requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            soft = self.teacher(x).softmax(-1)
        return self.b(self.a(x).tanh()) + soft


@_.case("i-functional")
def gradient_as_feature():
    class Feature(nn.Module):
        def __init__(self):
            super().__init__()
            self.energy = nn.Linear(8, 4)

        def forward(self, h):
            return h + torch.func.grad(lambda z: (self.energy(z) ** 2).sum())(h)

    return Net(Feature())


@_.case("i-functional")
def jacobian_as_feature():
    class Feature(nn.Module):
        def forward(self, h):
            return h + torch.func.vmap(torch.func.jacrev(torch.tanh))(h).sum(1)

    return Net(Feature())
