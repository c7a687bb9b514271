"""Texts and series, as people write models for them."""
# A call of a module is Any, and people return it as it is.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence


class PackedGRU(nn.Module):
    """A class by the last state of a GRU that skips padding, which token 0 is."""

    def __init__(self, words: int, classes: int, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width, padding_idx=0)
        self.gru = nn.GRU(width, width, batch_first=True, bidirectional=True)
        self.fc = nn.Linear(2 * width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        lengths = (tokens != 0).sum(dim=1).clamp(min=1)
        packed = pack_padded_sequence(
            self.embedding(tokens), lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        _, hidden = self.gru(packed)
        return self.fc(torch.cat((hidden[-2], hidden[-1]), dim=1))


class PackedLSTM(nn.Module):
    """A tag for each word by an LSTM that skips padding; lengths are an input."""

    def __init__(self, words: int, tags: int, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True, dropout=0.3)
        self.fc = nn.Linear(width, tags)

    def forward(self, text: Tensor, text_lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(
            self.embedding(text), text_lengths.cpu() + 1, batch_first=True, enforce_sorted=False
        )
        output, (_hidden, _cell) = self.lstm(packed)
        padded, _ = pad_packed_sequence(output, batch_first=True, total_length=text.size(1))
        return self.fc(padded)


class AttentionLSTM(nn.Module):
    """A bidirectional LSTM and attention over its states."""

    def __init__(self, words: int, classes: int, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width, padding_idx=0)
        self.lstm = nn.LSTM(width, width, bidirectional=True, batch_first=True)
        self.attention = nn.Linear(2 * width, 1)
        self.dropout = nn.Dropout(0.5)
        self.fc = nn.Linear(2 * width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        states, _ = self.lstm(self.embedding(tokens))
        scores = self.attention(torch.tanh(states)).squeeze(-1)
        scores = scores.masked_fill(tokens == 0, -1e9)
        weights = F.softmax(scores, dim=1)
        context = torch.bmm(weights.unsqueeze(1), states).squeeze(1)
        return self.fc(self.dropout(context))


class Forecaster(nn.Module):
    """The next value of a series, first states written out as every tutorial does."""

    def __init__(self, channels: int, hidden: int = 16, layers: int = 2) -> None:
        super().__init__()
        self.hidden, self.layers = hidden, layers
        self.lstm = nn.LSTM(channels, hidden, layers, batch_first=True)
        self.fc = nn.Linear(hidden, 1)

    def forward(self, x: Tensor) -> Tensor:
        h0 = torch.zeros(self.layers, x.size(0), self.hidden).to(x.device).requires_grad_()
        c0 = torch.zeros(self.layers, x.size(0), self.hidden).to(x.device).requires_grad_()
        out, _ = self.lstm(x, (h0.detach(), c0.detach()))
        return self.fc(out[:, -1, :])


class CharRNN(nn.Module):
    """nn.RNN over a series, time first."""

    def __init__(self, channels: int, classes: int, hidden: int = 16) -> None:
        super().__init__()
        self.rnn = nn.RNN(channels, hidden, num_layers=2, nonlinearity="relu", dropout=0.1)
        self.fc = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.rnn(x.permute(1, 0, 2))
        return F.log_softmax(self.fc(out[-1]), dim=-1)


class CellSeq2Seq(nn.Module):
    """An encoder's state, unrolled by an LSTMCell that reads what it said."""

    def __init__(self, channels: int, ahead: int = 4, hidden: int = 16) -> None:
        super().__init__()
        self.encoder = nn.LSTM(channels, hidden, batch_first=True)
        self.cell = nn.LSTMCell(1, hidden)
        self.out = nn.Linear(hidden, 1)
        self.ahead = ahead

    def forward(self, x: Tensor) -> Tensor:
        _, (h, c) = self.encoder(x)
        h, c = h.squeeze(0), c.squeeze(0)
        value = x[:, -1, :1]
        outputs = []
        for _ in range(self.ahead):
            h, c = self.cell(value, (h, c))
            value = self.out(h)
            outputs.append(value)
        return torch.cat(outputs, dim=1)


class CausalSelfAttention(nn.Module):
    """Attention of nanoGPT, without flash attention."""

    bias: Tensor

    def __init__(self, width: int, heads: int, block: int) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.attn_dropout, self.resid_dropout = nn.Dropout(0.1), nn.Dropout(0.1)
        self.n_head, self.n_embd = heads, width
        self.register_buffer("bias", torch.tril(torch.ones(block, block)).view(1, 1, block, block))

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        y = self.attn_dropout(F.softmax(att, dim=-1)) @ v
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C)))


class GPTBlock(nn.Module):
    """Attention and an MLP, each beside a skip connection."""

    def __init__(self, width: int, heads: int, block: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = CausalSelfAttention(width, heads, block)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class NanoGPT(nn.Module):
    """nanoGPT: positions by an embedding, the head tied to the words."""

    def __init__(self, words: int, block: int = 64, width: int = 32) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(words, width),
                "wpe": nn.Embedding(block, width),
                "drop": nn.Dropout(0.1),
                "h": nn.ModuleList([GPTBlock(width, 2, block) for _ in range(2)]),
                "ln_f": nn.LayerNorm(width),
            }
        )
        self.lm_head = nn.Linear(width, words, bias=False)
        self.transformer["wte"].weight = self.lm_head.weight

    def forward(self, idx: Tensor) -> tuple[Tensor, None]:
        _, t = idx.size()
        pos = torch.arange(0, t, dtype=torch.long, device=idx.device)
        x = self.transformer["drop"](self.transformer["wte"](idx) + self.transformer["wpe"](pos))
        for block in self.transformer["h"]:  # type: ignore[attr-defined]
            x = block(x)
        return self.lm_head(self.transformer["ln_f"](x)), None


class Translator(nn.Module):
    """nn.Transformer, with all of its masks."""

    def __init__(self, words: int, width: int = 32) -> None:
        super().__init__()
        self.src, self.tgt = nn.Embedding(words, width), nn.Embedding(words, width)
        self.positions = nn.Parameter(torch.randn(1, 64, width) * 0.02)
        self.transformer = nn.Transformer(
            width, nhead=2, num_encoder_layers=1, num_decoder_layers=2, dim_feedforward=64, batch_first=True
        )
        self.fc = nn.Linear(width, words)

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(tgt.size(1)).to(tgt.device)
        out = self.transformer(
            self.src(src) * math.sqrt(32) + self.positions[:, : src.size(1)],
            self.tgt(tgt) * math.sqrt(32) + self.positions[:, : tgt.size(1)],
            tgt_mask=causal,
            src_key_padding_mask=(src == 0).float().masked_fill(src == 0, -1e4),
        )
        return self.fc(out)


class MaskedMean(nn.Module):
    """nn.MultiheadAttention with a padding mask, and the mean of what is no padding."""

    def __init__(self, words: int, classes: int, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.attention = nn.MultiheadAttention(width, 4, dropout=0.1, batch_first=True)
        self.norm = nn.LayerNorm(width)
        self.fc = nn.Linear(width, classes)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        mask = attention_mask.clone()
        mask[:, 0] = 1
        out, _weights = self.attention(x, x, x, key_padding_mask=mask == 0)
        x = self.norm(x + out)
        wide = mask.unsqueeze(-1).expand(x.size()).float()
        return self.fc(torch.sum(x * wide, 1) / torch.clamp(wide.sum(1), min=1e-9))


class WaveNet(nn.Module):
    """Dilated causal convolutions with gates and skip connections."""

    def __init__(self, channels: int, classes: int, width: int = 16) -> None:
        super().__init__()
        self.start = nn.Conv1d(channels, width, 1)
        self.filters = nn.ModuleList(nn.Conv1d(width, width, 2, dilation=2**k) for k in range(4))
        self.gates = nn.ModuleList(nn.Conv1d(width, width, 2, dilation=2**k) for k in range(4))
        self.residuals = nn.ModuleList(nn.Conv1d(width, width, 1) for _ in range(4))
        self.skips = nn.ModuleList(nn.Conv1d(width, width, 1) for _ in range(4))
        self.end = nn.Conv1d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.start(x.transpose(1, 2))
        skip: Tensor | float = 0
        for k in range(4):
            padded = F.pad(x, (2**k, 0))
            gated = torch.tanh(self.filters[k](padded)) * torch.sigmoid(self.gates[k](padded))
            skip = skip + self.skips[k](gated)
            x = x + self.residuals[k](gated)
        assert isinstance(skip, Tensor)
        return self.end(F.relu(skip)).mean(dim=-1)


class NBeatsBlock(nn.Module):
    """Forecast of a series from its past."""

    def __init__(self, back: int, ahead: int, width: int = 16) -> None:
        super().__init__()
        self.back = back
        self.layers = nn.Sequential(
            nn.Linear(back, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, back + ahead),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        theta = self.layers(x)
        return theta[:, : self.back], theta[:, self.back :]


class NBeats(nn.Module):
    """Doubly residual stacks."""

    def __init__(self, back: int, ahead: int) -> None:
        super().__init__()
        self.ahead = ahead
        self.blocks = nn.ModuleList([NBeatsBlock(back, ahead) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        forecast = torch.zeros(x.shape[0], self.ahead, device=x.device)
        for block in self.blocks:
            backcast, predicted = block(x)
            x = x - backcast
            forecast = forecast + predicted
        return forecast
