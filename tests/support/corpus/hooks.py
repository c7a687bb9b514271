# mypy: ignore-errors
"""Kind (e): hooks and patches on instances."""

from __future__ import annotations

import types

import torch
from torch import nn

from tests.support.corpus.building import IMAGE, SEQUENCE, Collection, Net, Rec

_ = Collection()
CASES = _.cases


@_.case("e-hook")
def forward_hook_on_batch_norm():
    model = Net(nn.BatchNorm1d(8))
    model.between.register_forward_hook(lambda part, args, out: out * 0.5 + 1)
    return model


@_.case("e-hook")
def pre_hook_on_batch_norm():
    # Another input for the statistics.
    model = Net(nn.BatchNorm1d(8))
    model.between.register_forward_pre_hook(lambda part, args: (args[0] * 3 - 1,))
    return model


@_.case("e-hook", sample=SEQUENCE)
def forward_hook_on_gru():
    # Gets and returns the tuple.
    model = Rec(nn.GRU(8, 6, batch_first=True))
    model.rnn.register_forward_hook(lambda part, args, out: (out[0].tanh() * 2, out[1]))
    return model


@_.case("e-hook", sample=SEQUENCE)
def pre_hook_on_lstm():
    model = Rec(nn.LSTM(8, 6, batch_first=True))
    model.rnn.register_forward_pre_hook(lambda part, args: (args[0].flip(1),))
    return model


@_.case("e-hook")
def forward_hook_on_sequential_root():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    model.register_forward_hook(lambda part, args, out: out / 0.3)
    return model


@_.case("e-hook")
def pre_hook_on_sequential_root():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    model.register_forward_pre_hook(lambda part, args: (args[0].abs(),))
    return model


@_.case("e-hook")
def hooks_on_root_module():
    model = Net()
    model.register_forward_pre_hook(lambda part, args: (args[0].sin(),))
    model.register_forward_hook(lambda part, args, out: out * 2)
    return model


@_.case("e-hook")
def hook_on_cut_block():
    # Cuts go through the block: nobody calls it as a whole.
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.f, self.g = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return self.g(torch.relu(self.f(x)))

    model = nn.Sequential()
    model.add_module("blocks", nn.Sequential(*(Block() for _ in range(3))))
    model.add_module("head", nn.Linear(8, 3))
    model.blocks[1].register_forward_hook(lambda part, args, out: out + args[0])
    model.blocks.register_forward_hook(lambda part, args, out: out.tanh())
    return model


@_.case("e-hook", sample=SEQUENCE)
def hook_with_kwargs():
    model = Rec(nn.GRU(8, 6, batch_first=True))
    model.rnn.register_forward_hook(lambda part, args, kwargs, out: (-out[0], out[1]), with_kwargs=True)
    return model


@_.case("e-hook", sample=SEQUENCE)
def pre_hook_with_kwargs_on_attention():
    class Att(nn.Module):
        def __init__(self):
            super().__init__()
            self.att, self.head = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 3)

        def forward(self, x):
            return self.head(self.att(query=x, key=x, value=x)[0].mean(1))

    def half_keys(part, args, kwargs):
        return args, {**kwargs, "key": kwargs["key"] * 0.5}

    model = Att()
    model.att.register_forward_pre_hook(half_keys, with_kwargs=True)
    return model


@_.case("e-hook")
def instance_forward_on_batch_norm():
    # bn.forward is replaced on one object.
    model = Net(nn.BatchNorm1d(8))
    plain = model.between.forward
    model.between.forward = lambda x: plain(x) * torch.sigmoid(x)
    return model


@_.case("e-hook", sample=SEQUENCE)
def instance_forward_on_lstm():
    model = Rec(nn.LSTM(8, 6, batch_first=True))

    def reversed_in_time(self, x, hx=None):
        out, last = nn.LSTM.forward(self, x.flip(1), hx)
        return out.flip(1), last

    model.rnn.forward = types.MethodType(reversed_in_time, model.rnn)
    return model


@_.case("e-hook", sample=IMAGE)
def instance_forward_on_group_norm():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
    norm = model[1]
    norm.forward = lambda x: nn.functional.group_norm(x, 4, norm.weight, norm.bias) * 2
    return model


@_.case("e-hook")
def parameter_hook_clamps():
    model = Net()
    model.a.weight.register_hook(lambda g: g.clamp(-1e-3, 1e-3))
    return model


@_.case("e-hook")
def parameter_hook_masks():
    # Half of a weight is frozen by its gradient.
    model = Net()
    mask = torch.ones(8, 8)
    mask[:, ::2] = 0
    model.a.weight.register_hook(lambda g: g * mask)
    return model


@_.case("e-hook", sample=SEQUENCE)
def parameter_hook_on_gru_weight():
    model = Rec(nn.GRU(8, 6, batch_first=True))
    for name, each in model.rnn.named_parameters():
        if "weight_hh" in name:
            each.register_hook(lambda g: g * 0.1)
    return model


@_.case("e-hook")
def parameter_hook_normalises():
    model = Net()
    for each in model.parameters():
        each.register_hook(lambda g: g / (g.norm() + 1e-6))
    return model


@_.case("e-hook")
def parameter_hook_only_looks():
    # Returns nothing.
    model = Net()
    norms = []
    model.a.weight.register_hook(lambda g: norms.append(g.detach().norm()))
    return model


@_.case("e-hook", "refused")
def parameter_hook_with_state():
    # Momentum kept by the hook: not a function of the gradient alone.
    model = Net()
    kept = torch.zeros(8, 8)

    def smooth(g):
        kept.mul_(0.5).add_(g)
        return kept.clone()

    model.a.weight.register_hook(smooth)
    return model


@_.case("e-hook", "refused")
def hook_that_counts():
    # The scale depends on how often it ran.
    model = Net()
    calls = [0]

    def fade(part, args, out):
        calls[0] += 1
        return out / calls[0]

    model.between.register_forward_hook(fade)
    return model


@_.case("e-hook")
class TensorHookInsideForward(Net):
    # Gradient clipping of an activation.
    def forward(self, x):
        h = self.a(x)
        if h.requires_grad:
            h.register_hook(lambda g: g.clamp(-0.01, 0.01))
        return self.b(self.between(h))


@_.case("e-hook", "refused")
def backward_hook_scales():
    # Returns another gradient for the input.
    model = Net()
    model.between.register_full_backward_hook(lambda part, gin, gout: tuple(g * 0.1 for g in gin))
    return model


@_.case("e-hook", "refused")
def backward_pre_hook_scales():
    model = Net()
    model.b.register_full_backward_pre_hook(lambda part, gout: tuple(g * 3 for g in gout))
    return model


@_.case("e-hook")
def backward_hook_only_looks():
    model = Net()
    seen = []
    model.between.register_full_backward_hook(lambda part, gin, gout: seen.append(gout[0].shape))
    return model


@_.case("e-hook")
def forward_hook_only_stores():
    # Feature extraction: stores and returns nothing.
    model = Net(nn.BatchNorm1d(8))
    features = {}

    def store(part, args, out):
        features["h"] = out.detach()

    model.between.register_forward_hook(store)
    return model


@_.case("e-hook")
def hook_removed_again():
    model = Net(nn.BatchNorm1d(8))
    model.between.register_forward_hook(lambda part, args, out: out * 0).remove()
    return model


@_.case("e-hook")
def two_hooks_in_order():
    # Order matters: (x + 1) * 2.
    model = Net(nn.LayerNorm(8))
    model.between.register_forward_hook(lambda part, args, out: out + 1)
    model.between.register_forward_hook(lambda part, args, out: out * 2)
    return model


@_.case("e-hook", sample=IMAGE)
def hook_in_frozen_backbone():
    backbone = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    backbone[1].register_forward_hook(lambda part, args, out: out.relu() - 0.1)
    model = nn.Sequential(backbone, nn.Flatten(), nn.Linear(144, 3))
    backbone.eval().requires_grad_(False)
    return model


@_.case("e-hook", "refused")
def post_accumulate_hook_clips():
    # Runs after the gradient is stored and edits it in place.
    model = Net()

    def clip(p):
        p.grad.clamp_(-1e-3, 1e-3)

    model.a.weight.register_post_accumulate_grad_hook(clip)
    return model


@_.case("e-hook")
def call_of_class_overridden():
    # __call__ itself does more.
    class Doubled(nn.Linear):
        def __call__(self, x):
            return 2 * super().__call__(x)

    return Net(Doubled(8, 8))


class Attending(nn.Module):
    """A residual block with attention that drops while it trains."""

    def __init__(self):
        super().__init__()
        self.a, self.scale = nn.Linear(8, 8), 1.0

    def forward(self, x, options=None):
        rows = torch.tanh(self.a(x)).view(-1, 1, 4, 2) * self.scale * (options.scale if options else 1.0)
        rate = 0.25 if self.training else 0.0
        return x + nn.functional.scaled_dot_product_attention(rows, rows, rows, dropout_p=rate).flatten(1)


class Blocks(nn.Module):
    """Three blocks that drop, and a head."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Attending() for _ in range(3))
        self.head = nn.Linear(8, 3)

    def call(self, number, block, x):
        return block(x)

    def forward(self, x):
        for number, block in enumerate(self.blocks):
            x = self.call(number, block, x)
        return self.head(x)


@_.case("e-hook")
class HooksThatTheFirstCallAdds(Blocks):
    # As transformers does to collect hidden states.
    hooked = False

    def forward(self, x):
        seen = []
        if not self.hooked:
            for block in self.blocks:
                block.register_forward_hook(lambda part, args, out: seen.append(out))
            self.hooked = True
        return super().forward(x)


@_.case("g-reuse")
class DrawingBlockWhoseAttributeChanges(Blocks):
    def call(self, number, block, x):
        block.scale = 0.5 + number
        return block(x)


@_.case("g-reuse")
class DrawingBlockThatTakesAnObject(Blocks):
    def call(self, number, block, x):
        return block(x, types.SimpleNamespace(scale=0.5 + number))
