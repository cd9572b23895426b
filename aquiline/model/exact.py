"""Passes whose operations all have one shape, so that a token's numbers do not depend on what else is in its pass.

PyTorch rounds matrix products of other shapes otherwise, so that in 16 bits speculative text may part from plain text
where two tokens nearly tie. Here the tokens of a pass, of whatever rows, prompts and trees, go ROWS at a time, the last
ones padded. Each attends to keys of its own, gathered in the order of positions (cached ones, its ancestors, itself),
CHUNK at a time, in float32; what lies beyond a token adds exactly 0:

    token         cached             ancestors, itself
    x_n           0 ... n-1          n                         as in plain decoding
    a node        0 ... n-1          n, its ancestors, n+d     as in plain decoding of its path

So a token of a prompt, of plain decoding, of a tree and of a batch meets the same operations with the same numbers.
That they treat their rows alike is nothing PyTorch promises: a target finds out, and refuses, when it is made exact.

Shapes: B rows and N tokens of a pass, R = ROWS, C = CHUNK, L layers, H heads, G kv heads, E head width, S tokens of a
storage, K a multiple of C.
"""

import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from aquiline.model.kv_cache import KVCache

# Text may depend on these two, and on nothing that a request or an engine sets.
ROWS = 16
CHUNK = 128


def padded(x: Tensor) -> Tensor:
    """With zeros behind, a multiple of ROWS long."""
    return F.pad(x, (0, 0) * (x.ndim - 1) + (0, -len(x) % ROWS))


def by_rows(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`function` of `[..., D]`, ROWS rows at a time."""
    rows = x.reshape(-1, x.shape[-1])
    parts = [function(part) for part in padded(rows).split(ROWS)]
    return torch.cat(parts)[: len(rows)].view(*x.shape[:-1], -1)


class Gathered:
    """What the tokens of a pass attend to, ROWS tokens at a time; takes the place of `layers.Context`.

    Whole chunks that every row has cached are read from the cache; all behind them from `beside`, which has the cached
    tokens of each row there, and then those of the pass:

        |row 0 row 0 |row 1 row 1 row 1 |tokens of the pass, and those that pad it|
    """

    def __init__(
        self,
        B: int,
        N: int,
        mask_BNN: Tensor | None,
        cache: KVCache | None,
        slots: list[int] | None,
        device: torch.device,
    ) -> None:
        self._shape, self._device, self._cache = (B, N), device, cache
        self._lengths, starts = [0] * B, [0] * B
        if cache is not None and slots is not None:
            self._lengths, starts = [cache.lengths[s] for s in slots], [cache.starts[s] for s in slots]
        self._shared = min(self._lengths) // CHUNK * CHUNK
        rest = [range(start + self._shared, start + n) for start, n in zip(starts, self._lengths, strict=True)]
        self._rest = torch.tensor([at for of_row in rest for at in of_row], dtype=torch.long, device=device)
        begins = list(itertools.accumulate(map(len, rest), initial=0))[:-1]
        self._lengths_B, self._starts_B, self._begins_B = torch.tensor([self._lengths, starts, begins], device=device)
        # Of each token the tokens of the pass that it sees, in their order, which is that of positions, then the others
        self._order_BNN = torch.arange(N, device=device).expand(B, N, N)
        self._seen_BN = torch.arange(1, N + 1, device=device).expand(B, N)
        if mask_BNN is not None:
            self._order_BNN = mask_BNN.int().argsort(dim=-1, descending=True, stable=True).expand(B, N, N)
            self._seen_BN = mask_BNN.sum(-1).expand(B, N)
        self._beside: list[tuple[Tensor, Tensor]] = []  # keys and values of each layer, [G, S, E]

    def blocks(self) -> Iterator[slice]:
        """Those of the pass in turn; `attend` is for the tokens of the last one given."""
        B, N = self._shape
        for at in range(0, B * N, ROWS):
            self._at = slice(at, at + ROWS)
            place_R1 = len(self._rest) + torch.arange(at, at + ROWS, device=self._device)[:, None]
            token_R = torch.arange(at, at + ROWS, device=self._device).clamp(max=B * N - 1)  # padding sees what it sees
            row_R, n_R = token_R // N, token_R % N
            length_R1, start_R1, begin_R1 = (x[row_R, None] for x in (self._lengths_B, self._starts_B, self._begins_B))
            count_R1 = length_R1 + self._seen_BN[row_R, n_R, None]
            most = max(self._lengths[t // N] + t % N + 1 for t in range(at, min(at + ROWS, B * N)))
            j_K = torch.arange(most + -most % CHUNK, device=self._device)  # the j-th key of a token
            seen_RK = self._order_BNN[row_R, n_R].gather(1, (j_K - length_R1).clamp(0, N - 1))
            beside_RK = torch.where(
                j_K < length_R1, begin_R1 + j_K - self._shared, len(self._rest) + row_R[:, None] * N + seen_RK
            )
            beside_RK = beside_RK.where(j_K < count_R1, place_R1)  # hidden: whatever is a number where the token's are
            index_RK = torch.where(j_K < self._shared, start_R1 + j_K, beside_RK)
            hidden_RK = j_K >= count_R1
            self._chunks = [
                (c < self._shared, index_RK[:, c : c + CHUNK].flatten(), hidden_RK[:, None, c : c + CHUNK])
                for c in range(0, len(j_K), CHUNK)
            ]
            yield self._at

    def attend(self, layer: int, q_BRHE: Tensor, k_BGRE: Tensor, v_BGRE: Tensor) -> Tensor:
        """Attention output `[1, R, H*E]` of one layer. Keys and values of the block are kept for those behind it."""
        _, R, H, E = q_BRHE.shape
        G = k_BGRE.shape[1]
        if layer == len(self._beside):
            self._beside.append(self._new(layer, k_BGRE))
        for beside_GSE, new_BGRE in zip(self._beside[layer], (k_BGRE, v_BGRE), strict=True):
            beside_GSE[:, len(self._rest) :][:, self._at] = new_BGRE[0]
        q = _wide(q_BRHE[0].float() * E**-0.5).view(R, G, H // G, -1).transpose(0, 1).reshape(G * R, H // G, -1)
        scores = []
        for cached, index, hidden_R1C in self._chunks:
            keys = self._read(layer, 0, cached, index)
            scores.append((q @ keys.transpose(1, 2)).masked_fill_(hidden_R1C.repeat(G, 1, 1), -torch.inf))
        highest = torch.stack([s.amax(-1, keepdim=True) for s in scores]).amax(0)
        total, out = torch.zeros_like(highest), torch.zeros_like(q)
        for (cached, index, _), s in zip(self._chunks, scores, strict=True):
            weights = torch.exp(s - highest)
            total += weights.sum(-1, keepdim=True)
            out += weights @ self._read(layer, 1, cached, index)
        out = (out / total)[..., :E].view(G, R, H // G, E).transpose(0, 1).reshape(1, R, H * E)
        return out.to(q_BRHE.dtype)

    def _new(self, layer: int, like_BGRE: Tensor) -> tuple[Tensor, Tensor]:
        """A layer's `beside`, as yet without the tokens of the pass."""
        B, N = self._shape
        _, G, _, E = like_BGRE.shape
        keys, values = like_BGRE.new_empty(2, G, len(self._rest) + B * N + -(B * N) % ROWS, E)
        if self._cache is not None:
            keys[:, : len(self._rest)] = self._cache.keys_LGSE[layer].index_select(1, self._rest)
            values[:, : len(self._rest)] = self._cache.values_LGSE[layer].index_select(1, self._rest)
        return keys, values

    def _read(self, layer: int, which: int, cached: bool, index: Tensor) -> Tensor:
        """Float32 keys (0) or values (1) `[G*R, C, E]` of a chunk, E as `_wide` has it."""
        if cached:
            assert self._cache is not None
            stored_GSE = (self._cache.keys_LGSE, self._cache.values_LGSE)[which][layer]
        else:
            stored_GSE = self._beside[layer][which]
        return _wide(stored_GSE.index_select(1, index).float().view(-1, CHUNK, stored_GSE.shape[-1]))

    def keys_values(self) -> tuple[Tensor, Tensor]:
        """`[L, B, G, N, E]` of the tokens of the pass."""
        B, N = self._shape
        own = slice(len(self._rest), len(self._rest) + B * N)
        keys, values = (
            torch.stack([x[:, own] for x in of_layers]).unflatten(2, (B, N)).transpose(1, 2)
            for of_layers in zip(*self._beside, strict=True)
        )
        return keys, values

    def silu(self, x: Tensor) -> Tensor:
        """PyTorch's own computes the last elements of a tensor otherwise than the others."""
        y = x.float()
        return (y / (1 + torch.exp(-y))).to(x.dtype)


def _wide(x_E: Tensor) -> Tensor:
    """With zeros, to whole 64 bytes: of a batch of products, MKL computes those that begin elsewhere otherwise."""
    return F.pad(x_E, (0, -x_E.shape[-1] % 16))
