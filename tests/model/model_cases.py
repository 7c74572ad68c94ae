"""Small models, each with one thing that makes partitioning hard.

``CASES`` names a factory and the inputs of one batch; no case draws random numbers in its
forward unless its name says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS = 4


class Block(nn.Module):
    """Conv, BatchNorm, ReLU in place, and a residual sum in place."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(width)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn(self.conv(x))
        y += x
        return self.act(y)


def sequential() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(inplace=True), Block(6),
        nn.Sequential(Block(6), nn.MaxPool2d(2)),
        nn.Flatten(), nn.LayerNorm(96), nn.Linear(96, 5),
    )  # fmt: skip


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.body = nn.Sequential(Block(6), Block(6))
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu_(self.stem(x))
        x = self.body(x)
        return self.head(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.register_buffer("mask", torch.tril(torch.ones(length, length)).bool())

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = (
            t.view(rows, length, self.heads, width // self.heads).transpose(1, 2)
            for t in self.qkv(x).split(width, dim=2)
        )
        scores = q @ k.transpose(-2, -1) / (width // self.heads) ** 0.5
        scores = scores.masked_fill(~self.mask[:length, :length], float("-inf"))
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(rows, length, width))


class TinyGPT(nn.Module):
    """Tied embedding, positions made in the forward, integer input."""

    def __init__(self, vocabulary: int = 11, width: int = 8, length: int = 6, depth: int = 2) -> None:
        super().__init__()
        self.tok = nn.Embedding(vocabulary, width)
        self.pos = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "ln": nn.LayerNorm(width),
                    "attn": Attention(width, 2, length),
                    "ff": nn.Linear(width, width),
                }
            )
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tok.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tok(ids) + self.pos(torch.arange(ids.size(1), device=ids.device))
        for block in self.blocks:
            x = x + block["attn"](block["ln"](x))
            x = x + F.gelu(block["ff"](x))
        return self.head(self.norm(x))


class Recurrent(nn.Module):
    """LSTM with a state made from the batch size, tuples between layers, a GRU on top."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(5, 6, num_layers=2, batch_first=True)
        self.gru = nn.GRU(6, 4, batch_first=True, bidirectional=True)
        self.head = nn.Linear(8 + 6, 3)

    def forward(self, x: Tensor) -> Tensor:
        zeros = torch.zeros(2, x.size(0), 6, dtype=x.dtype, device=x.device)
        out, (h, _) = self.lstm(x, (zeros, zeros.clone()))
        out, _ = self.gru(out)
        return self.head(torch.cat([out[:, -1], h[-1]], dim=1))


class Dictionary(nn.Module):
    """Keyword inputs with None and a number, a boolean mask that crosses, a dictionary returned."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.head = nn.Linear(6, 7)
        self.scale = nn.Parameter(torch.ones(6))

    def forward(
        self, ids: Tensor, mask: Tensor, extra: Tensor | None = None, factor: float = 1.0
    ) -> dict[str, Any]:
        x = self.embed(ids) * factor
        keep = mask.unsqueeze(-1)
        if extra is not None:
            x = x + extra
        x = torch.where(keep, self.first(x), x)
        count = mask.sum(1, keepdim=True)
        x = torch.where(keep, self.second(x) * self.scale, x)
        pooled = (x * keep).sum(1) / count
        return {"logits": self.head(pooled), "hidden": [x, None], "count": count, "factor": 2}


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x * grad  # wrong on purpose: only the user's own backward gives this


class Squares(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return Square.apply(self.linear(x)) + 1


class Custom(nn.Module):
    """Custom autograd functions inside of a submodule that cannot be looked into."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Squares(), Squares()
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.b(torch.tanh(self.a(x)))))


class InPlace(nn.Module):
    """Writes through views, into slices, and into what later layers read again."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 4)
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.a(x))
        kept = y
        y.mul_(2)
        z = self.b(kept)
        z[:, :2] = 0.5
        z[:, 2].add_(1.0)
        out = torch.zeros(x.size(0), 6, dtype=x.dtype, device=x.device)
        out[:, 1:] = z[:, 1:] * kept[:, 1:]
        half = out.view(-1, 2, 3)[:, 0]
        half += 1
        columns = torch.zeros(6, dtype=x.dtype, device=x.device)
        columns[2:4].fill_(3.0)
        return self.c(torch.sigmoid(out) + torch.relu(y) + columns)


class Diamonds(nn.Module):
    """Branches side by side, an output nobody reads, an auxiliary output from the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        self.right = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        self.unused = nn.Linear(5, 2)
        self.never = nn.Linear(3, 3)
        self.aux = nn.Linear(5, 3)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        aux = None
        for i, (left, right) in enumerate(zip(self.left, self.right, strict=True)):
            first = x
            x = torch.tanh(left(x)) * torch.sigmoid(right(x)) + first
            if i == 1:
                self.unused(x)
                aux = self.aux(x)
        assert aux is not None
        return self.head(x), aux


class Shared(nn.Module):
    """One module called twice, a weight read by a function, a module under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 4)
        self.mix = nn.Linear(4, 4)
        self.again = self.mix
        self.bias = nn.Parameter(torch.randn(6) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.mix(self.embed(x)))
        x = torch.tanh(self.again(x))
        return F.linear(x, self.embed.weight.t()) + self.bias


class Frozen(nn.Module):
    """A frozen front, a part without gradients, weights under parametrisation."""

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)).requires_grad_(False)
        self.middle = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))
        self.teacher = nn.Linear(6, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.front(x)
        y = torch.relu(self.middle(x))
        with torch.no_grad():
            t = torch.tanh(self.teacher(y)) * 2
        return self.head(y + t.detach())


class Shapes(nn.Module):
    """Boundaries that are transposed, expanded, empty, integer or views."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        wide = y[:, :1].expand(-1, 6)
        empty = y[:, :0]
        order = y.detach().argsort(dim=1)
        turned = y.t()
        z = torch.tanh(self.b(turned.t() + wide))
        z = torch.gather(z, 1, order)
        z = torch.cat([z, empty, wide], dim=1)
        first, second = self.c(z).chunk(2, dim=0)
        return torch.cat([second, first], dim=0)


class Sorter(nn.Module):
    """Branches on values: one layer, whose output has a fixed shape."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y * 2 if float(y.detach().abs().max()) > 1e9 else y.tanh()


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.sorter, self.b = nn.Linear(5, 5), Sorter(), nn.Linear(5, 3)
        self.register_buffer("table", torch.linspace(0, 1, 5))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.table.max().item() if bool((self.table > 0.5).any()) else 3.0
        return self.b(self.sorter(torch.relu(self.a(x)))) * scale


class Modes(nn.Module):
    """Does other things in evaluation than in training."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)
        self.aux = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Any:
        y = F.relu(self.norm(self.a(x)))
        y = F.dropout(y, 0.0, self.training)
        if self.training:
            return self.b(y), self.aux(y)
        return self.b(y)


class RandomMasks(nn.Module):
    """Dropout as a module, as a function, inside of an LSTM and after it, and noise made in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.drop = nn.Linear(6, 6), nn.Dropout(0.4)
        self.lstm = nn.LSTM(6, 6, num_layers=2, dropout=0.3, batch_first=True)
        self.in_place = nn.Dropout(0.2, inplace=True)
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.a(x))
        x = self.drop(torch.tanh(x)) + float(self.training) * torch.randn_like(x)
        x = F.dropout(x, 0.2, self.training)
        out, _ = self.lstm(x.unsqueeze(1).expand(-1, 3, -1))
        out = self.drop(out)  # which is transposed in memory, until it crosses a boundary
        out = self.in_place(self.norm(out).transpose(1, 2))
        return self.head(out[..., -1])


class Encoder(nn.Module):
    """torch's own transformer layers, with a padding mask."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.embed = nn.Embedding(9, 8, padding_idx=0)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 9)

    def forward(self, ids: Tensor) -> Tensor:
        padding = ids == 0
        x = self.encoder(self.embed(ids), src_key_padding_mask=padding)
        y, _ = self.attend(x, x, x, key_padding_mask=padding, need_weights=False)
        return self.head(x + y)


class Case(NamedTuple):
    factory: Callable[[], nn.Module]
    batch: Callable[[int], Any]


def _ids(high: int, *shape: int) -> Callable[[int], Tensor]:
    def make(rows: int) -> Tensor:
        ids = torch.randint(1, high, (rows, *shape), generator=torch.Generator().manual_seed(5))
        return ids.masked_fill_(torch.arange(shape[0]) >= shape[0] - 1, 0)

    return make


def _floats(*shape: int) -> Callable[[int], Tensor]:
    return lambda rows: torch.randn(
        rows, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3)
    )


def _keywords(rows: int) -> Mapping[str, Any]:
    mask = torch.ones(rows, 4, dtype=torch.bool)
    mask[0, 2:] = False
    return {"ids": _ids(7, 4)(rows), "mask": mask, "extra": None, "factor": 0.5}


CASES: Mapping[str, Case] = {
    "sequential": Case(sequential, _floats(3, 8, 8)),
    "residual": Case(Residual, _floats(3, 8, 8)),
    "gpt": Case(TinyGPT, _ids(11, 6)),
    "recurrent": Case(Recurrent, _floats(4, 5)),
    "dictionary": Case(Dictionary, _keywords),
    "custom": Case(Custom, _floats(6)),
    "in_place": Case(InPlace, _floats(6)),
    "diamonds": Case(Diamonds, _floats(5)),
    "shared": Case(Shared, _floats(6)),
    "frozen": Case(Frozen, _floats(6)),
    "shapes": Case(Shapes, _floats(4)),
    "branching": Case(Branching, _floats(5)),
    "modes": Case(Modes, _floats(5)),
    "encoder": Case(Encoder, _ids(9, 5)),
    "random_masks": Case(RandomMasks, _floats(6)),
}
