"""The LLaMA of the studies: its attention and feed-forward sub-modules have one output projection each, so that taps can
stand right behind it, and every kernel that a fault may sit in is a module or an operation of its own."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from unsilent.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Widths of a model, and the batch that it reads per step: ``samples`` of ``length`` tokens."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int = 256
    samples: int = 4
    length: int = 64

    @property
    def tokens(self) -> int:
        """Tokens that are read per step."""
        return self.samples * self.length


SHAPES = {
    shape.name: shape
    for shape in (
        # LLaMA-3-8B's widths with 16 layers, as in the paper's study of sub-modules; for GPUs.
        Shape(name="paper", hidden=4096, layers=16, heads=32, kv_heads=8, ffn=14336, vocabulary=128_256, samples=1,
              length=8192),
        # The same with 32 layers, as in its study of single steps.
        Shape(name="paper-32", hidden=4096, layers=32, heads=32, kv_heads=8, ffn=14336, vocabulary=128_256, samples=1,
              length=8192),
        Shape(name="small", hidden=64, layers=4, heads=4, kv_heads=2, ffn=176),
        # Another width than the one that the units were fitted on.
        Shape(name="small-wide", hidden=96, layers=3, heads=4, kv_heads=4, ffn=256),
        Shape(name="million", hidden=128, layers=6, heads=4, kv_heads=4, ffn=344, length=128),
    )
}  # fmt: skip


def shape_of(name: str) -> Shape:
    """The shape of that name."""
    if name not in SHAPES:
        raise UsageError(f"there is no model shape {name!r}: one of {', '.join(SHAPES)}")
    return SHAPES[name]


class Norm(nn.Module):
    """RMSNorm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, 1e-5)


class Attention(nn.Module):
    """Causal self-attention with rotary positions and grouped key and value heads.

    With ``scores=True`` the scores are computed step by step (two products and a softmax), so that they can be looked at
    and hit; otherwise by torch's fused kernel.
    """

    def __init__(self, shape: Shape, *, scores: bool = False) -> None:
        super().__init__()
        self.width, self.scores = shape.hidden // shape.heads, scores
        self.q = nn.Linear(shape.hidden, shape.heads * self.width, bias=False)
        self.k = nn.Linear(shape.hidden, shape.kv_heads * self.width, bias=False)
        self.v = nn.Linear(shape.hidden, shape.kv_heads * self.width, bias=False)
        self.o = nn.Linear(shape.heads * self.width, shape.hidden, bias=False)
        if scores:
            self.logits = nn.Identity()  # the product of queries and keys passes here, the future not yet masked
        self.largest_logit = 0.0  # of the last forward, where scores are computed step by step

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        samples, length, _ = x.shape
        q, k, v = (f(x).view(samples, length, -1, self.width).transpose(1, 2) for f in (self.q, self.k, self.v))
        cos, sin = _angles(length, self.width, x.device)
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        if self.scores:
            y = self._step_by_step(q, k, v)
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return self.o(y.transpose(1, 2).reshape(samples, length, -1))

    def _step_by_step(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        logits = self.logits(q @ k.transpose(-1, -2)) / math.sqrt(self.width)
        future = torch.ones(logits.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        logits = logits.masked_fill(future, -math.inf)
        self.largest_logit = float(logits.detach().masked_fill(future, 0.0).abs().max())
        return logits.softmax(-1) @ v


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.up = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.down = nn.Linear(shape.ffn, shape.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """One layer."""

    def __init__(self, shape: Shape, *, scores: bool = False) -> None:
        super().__init__()
        self.attention_norm, self.attention = Norm(shape.hidden), Attention(shape, scores=scores)
        self.ffn_norm, self.ffn = Norm(shape.hidden), FeedForward(shape)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.ffn(self.ffn_norm(x))


class Llama(nn.Module):
    """Token ids, int64[samples, length], to logits, fp32[samples, length, vocabulary]. Same seed, same bits; the global
    generators are not moved."""

    def __init__(self, shape: Shape, *, seed: int, scores: bool = False) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            self.embedding = nn.Embedding(shape.vocabulary, shape.hidden)
            self.blocks = nn.ModuleList(Block(shape, scores=scores) for _ in range(shape.layers))
            self.norm = Norm(shape.hidden)
            self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)
            for name, parameter in self.named_parameters():
                if parameter.dim() == 2:
                    into_residual = name.endswith(("attention.o.weight", "ffn.down.weight"))
                    nn.init.normal_(parameter, 0.0, 0.02 / math.sqrt(2 * shape.layers) if into_residual else 0.02)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of the next token; ``batch`` is int64[samples, length + 1]."""
    logits = model(batch[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())


def _angles(length: int, width: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    frequency = 10_000.0 ** (-torch.arange(0, width, 2, dtype=torch.float32, device=device) / width)
    angle = torch.arange(length, dtype=torch.float32, device=device)[:, None] * frequency
    return angle.cos(), angle.sin()


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    one, two = x.chunk(2, -1)
    return torch.cat([one * cos - two * sin, two * cos + one * sin], -1)
