"""How a pass is executed: plain PyTorch, or `kernel.cpp`, compiled once for this CPU. One door.

Plain PyTorch always works, and is what trains. For decoding on a CPU the kernel takes over where a C++ compiler is
there: it reads packed weights once per pass and makes a token's numbers independent of what else is in the pass.

Shapes: B rows of N tokens, D width, L layers, G kv heads, E head width, O own tokens the mask speaks of.
"""

import contextlib
import ctypes
import functools
import hashlib
import os
import shlex
import subprocess
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from aquiline.config import AquilineWarning
from aquiline.model.kv_cache import KVCache
from aquiline.model.machine import cache_folder, cpu_flags, large_pages
from aquiline.model.quantised import GROUP, Quantised

_SOURCE = Path(__file__).with_name("kernel.cpp")
NO_WINNER = "no token can be drawn: the target's logits are no numbers, or leave none above -infinity"
_FLAGS = ["-O3", "-march=native", "-ffp-contract=off", "-std=c++17", "-fPIC", "-fopenmp"]
_BUILD_SECONDS = 300
_BLOCK, _STEP = 16, 32  # outputs of a packed block; inputs are padded to a multiple of the other


@functools.cache
def fast_bf16(device_type: str) -> bool:
    """Whether bf16 arithmetic is native on the device, so that bf16 is no slower than float32."""
    if device_type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device_type != "cpu" or "ONEDNN_MAX_CPU_ISA" in os.environ:  # told to do without the newer units
        return False
    return bool(cpu_flags() & {"avx512_bf16", "amx_bf16", "bf16"})  # the last one on 64-bit Arm


# ---------------------------------------------------------------- the compiled kernel


class _Linear(ctypes.Structure):
    _fields_ = [
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("inp", ctypes.c_int32),
        ("out", ctypes.c_int32),
        ("bits", ctypes.c_int32),
    ]


class _Layer(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("input_norm", "feature_norm", "q_norm", "k_norm", "post_norm")),
        *((name, _Linear) for name in ("qkv", "o", "gate_up", "down")),
    ]


class _Model(ctypes.Structure):
    _fields_ = [
        ("layers", ctypes.POINTER(_Layer)),
        *((name, ctypes.c_void_p) for name in ("final_norm", "frequencies")),
        *(
            (name, ctypes.c_int32)
            for name in (
                "num_layers",
                "width",
                "inner",
                "heads",
                "kv_heads",
                "head_dim",
                "bf16",
                "amx",
                "normed_residual",
            )
        ),
        *((name, ctypes.c_float) for name in ("eps", "rotary_scale")),
    ]


class _Pass(ctypes.Structure):
    _fields_ = [
        *((n, ctypes.c_void_p) for n in ("residual", "embeds", "positions", "past_keys", "past_values")),
        ("past_offsets", ctypes.POINTER(ctypes.c_int64)),
        ("past_lengths", ctypes.POINTER(ctypes.c_int32)),
        *((n, ctypes.c_int64) for n in ("past_layer_stride", "past_head_stride")),
        ("mask", ctypes.c_void_p),
        ("mask_row_stride", ctypes.c_int64),
        *((n, ctypes.c_void_p) for n in ("own_keys", "own_values")),
        ("counts", ctypes.POINTER(ctypes.c_int32)),
        *((n, ctypes.c_int32) for n in ("rows", "tokens", "own")),
        ("capture", ctypes.c_void_p),
        *((n, ctypes.c_int32) for n in ("num_captured", "threads")),
        *((n, ctypes.c_void_p) for n in ("aux", "feature", "last")),
    ]


class _Growth(ctypes.Structure):
    _fields_ = [
        *((n, ctypes.POINTER(_Linear)) for n in ("fc", "head")),
        *((n, ctypes.c_void_p) for n in ("embedding", "target_ids", "aux")),
        ("ids", ctypes.POINTER(ctypes.c_int64)),
        *((n, ctypes.POINTER(ctypes.c_int32)) for n in ("counts", "depth", "top_k", "nodes")),
        ("worth", ctypes.POINTER(ctypes.c_float)),
        ("keys", ctypes.POINTER(ctypes.c_uint64)),
        *((n, ctypes.POINTER(ctypes.c_float)) for n in ("temperature", "sharpness")),
        *((n, ctypes.c_int32) for n in ("norm_output", "room")),
        *((n, ctypes.POINTER(ctypes.c_int64)) for n in ("tokens", "parents", "depths")),
        ("scores", ctypes.POINTER(ctypes.c_float)),
        ("made", ctypes.POINTER(ctypes.c_int32)),
        ("seconds", ctypes.POINTER(ctypes.c_float)),
    ]


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled kernel, or None: it is switched off (AQUILINE_KERNEL=off), the CPU is none it is written for, or it
    cannot be built, which a warning says.
    """
    if os.environ.get("AQUILINE_KERNEL") == "off" or not {"avx2", "fma"} <= cpu_flags():
        return None
    try:
        return _load(shlex.split(os.environ.get("CXX", "")) or ["g++"])
    except Exception as error:  # whatever it is, there is another way
        detail = str(getattr(error, "stderr", None) or error).strip() or type(error).__name__
        warnings.warn(
            f"the CPU kernel cannot be used ({detail[:300]}): decoding goes through PyTorch, slower. It needs g++, or "
            "the compiler that CXX names; AQUILINE_KERNEL=off leaves it out",
            AquilineWarning,
            stacklevel=2,
        )
        return None


@functools.cache
def kernel_fingerprint() -> str:
    """Of the kernel's source."""
    return hashlib.sha256(_source().encode()).hexdigest()[:16]


def _source() -> str:
    """What is compiled, with what it includes."""
    return "\0".join(path.read_text("utf-8") for path in (_SOURCE, *sorted(_SOURCE.parent.glob("kernel*.h"))))


def _load(compiler: list[str]) -> ctypes.CDLL:
    openmp = _openmp()
    version = _run([*compiler, "--version"])
    parts = [_source(), version, *compiler, *_FLAGS, *sorted(cpu_flags()), str(openmp)]
    name = f"kernel-{hashlib.sha256(chr(0).join(parts).encode(errors='replace')).hexdigest()[:24]}.so"
    folder = cache_folder()
    if folder is None:  # nowhere to keep it
        with tempfile.TemporaryDirectory() as build:
            return _opened(_compile(compiler, openmp, Path(build)))
    path = folder / name
    if path.is_file():
        with contextlib.suppress(OSError):  # damaged, or of a system that is no longer there
            return _opened(path)
    warnings.warn(f"compiling the CPU kernel into {folder}, once, some seconds", AquilineWarning, stacklevel=3)
    with tempfile.TemporaryDirectory(dir=folder) as build:
        compiled = _compile(compiler, openmp, Path(build))
        lib = _opened(compiled)
        compiled.replace(path)
    return lib


def _compile(compiler: list[str], openmp: Path | None, folder: Path) -> Path:
    unlinked, linked = folder / "kernel.o", folder / "kernel.so"
    _run([*compiler, *_FLAGS, "-c", str(_SOURCE), "-o", str(unlinked)])
    runtime = ["-fopenmp"] if openmp is None else [str(openmp)]
    _run([*compiler, "-shared", "-Wl,-z,defs", str(unlinked), "-o", str(linked), *runtime])
    return linked


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, check=False, timeout=_BUILD_SECONDS)
    if done.returncode:
        raise OSError(f"{command[0]}: {done.stderr.decode(errors='replace').strip() or done.returncode}")
    return done.stdout.decode(errors="replace")


def _opened(path: Path) -> ctypes.CDLL:
    lib = ctypes.CDLL(str(path))
    pointer, number = ctypes.c_void_p, ctypes.c_int
    lib.aq_forward.argtypes = [pointer, pointer]
    lib.aq_grow.argtypes = [pointer, pointer, pointer]
    lib.aq_linear.argtypes = [pointer, pointer, ctypes.c_int64, number, number, *[pointer] * 3, number, number]
    lib.aq_race.argtypes = [pointer, ctypes.c_int64, ctypes.c_double, ctypes.c_uint64, ctypes.c_int64, number]
    lib.aq_race.restype = ctypes.c_int64
    structures = (_Linear, _Layer, _Model, _Pass, _Growth)
    sizes = (ctypes.c_int64 * len(structures))()
    lib.aq_sizes(sizes)
    ours = [ctypes.sizeof(s) for s in structures]
    if list(sizes) != ours:
        raise OSError(f"its structures are {list(sizes)} bytes long, expected {ours}")
    return lib


def _openmp() -> Path | None:
    """The OpenMP runtime that PyTorch brings: with a second one, two pools of threads would fight for the cores."""
    try:
        lines = Path("/proc/self/maps").read_text("utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return None
    files = {fields[5].rstrip() for fields in (line.split(maxsplit=5) for line in lines) if len(fields) == 6}
    found = sorted(Path(f) for f in files if "libgomp" in os.path.basename(f))
    home = Path(torch.__file__).parent.parent  # wheels keep it in torch/lib or in torch.libs beside it
    return next((f for f in found if f.is_relative_to(home)), found[0] if found else None)


@functools.cache
def _tiles() -> bool:
    lib = library()
    return lib is not None and fast_bf16("cpu") and bool(lib.aq_request_tiles())


def describe(dtype: torch.dtype, device: torch.device) -> str:
    """How decoding runs here, for a record."""
    if not usable(dtype, device):
        return "PyTorch"
    width = "AVX-512" if "avx512f" in cpu_flags() else "AVX2"
    units = "matrix tiles" if _tiles() else "bf16 dot products" if "avx512_bf16" in cpu_flags() else ""
    return f"kernel, {width}{f' and {units}' if units and dtype == torch.bfloat16 else ''}"


def winner(logits_V: Tensor, temperature: float, key: int, position: int) -> int:
    """`sampling.race` over the whole distribution of float32 logits `[V]`, where there is a `library`, on the CPU.
    FloatingPointError where nothing can be chosen.
    """
    lib = library()
    assert lib is not None
    logits_V = logits_V.contiguous()
    _fits(logits_V.dtype == torch.float32 and logits_V.dim() == 1, f"logits {tuple(logits_V.shape)}")
    found = int(lib.aq_race(logits_V.data_ptr(), len(logits_V), temperature, key, position, torch.get_num_threads()))
    _check_memory(found == -1)
    if found < 0:
        raise FloatingPointError(NO_WINNER)
    return found


def usable(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernel computes this dtype on this device."""
    return device.type == "cpu" and dtype in (torch.float32, torch.bfloat16) and library() is not None


def eight_bits_pay(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether projections of few rows are faster with weights of 8 bits: of bf16 weights only half is read. Without dot
    products of 8 bits several rows gain nothing; beside matrix tiles it has not been measured.
    """
    return dtype == torch.bfloat16 and usable(dtype, device) and "avx512_vnni" in cpu_flags() and not _tiles()


def _blocks(weight: Tensor) -> Tensor:
    """`[out, in]` to `[out / 16, 16, in]`, both padded with zeros."""
    out, inp = weight.shape
    padded = F.pad(weight.detach(), (0, -inp % _STEP, 0, -out % _BLOCK))
    return padded.view(-1, _BLOCK, padded.shape[1])


def _packed(blocks: Tensor) -> Tensor:
    """Pairs of blocks as the kernel reads them: a line of each in turn, outputs side by side, in bf16 of two inputs."""
    if len(blocks) % 2:
        blocks = F.pad(blocks, (0, 0, 0, 0, 0, 1))
    inputs = 2 if blocks.dtype == torch.bfloat16 else 1
    return large_pages.copy(blocks.unflatten(2, (-1, inputs)).unflatten(0, (-1, 2)).permute(0, 3, 1, 2, 4))


def _packed_integers(matrix: Quantised) -> Tensor:
    """Pieces of 32 outputs by 64 inputs as kernel_integers.h has them, bytes `[pairs, pieces, size]`."""

    def groups(values_OG: Tensor) -> Tensor:
        padded = F.pad(values_OG, (0, -values_OG.shape[1] % 2, 0, -len(values_OG) % (2 * _BLOCK)))
        ordered = padded.view(-1, 2, _BLOCK, padded.shape[1] // 2, 2).permute(0, 3, 4, 1, 2).contiguous()
        return ordered.view(torch.uint8).flatten(2)

    q = F.pad(matrix.q_OI, (0, -matrix.q_OI.shape[1] % (2 * GROUP), 0, -len(matrix.q_OI) % (2 * _BLOCK)))
    lines = q.view(-1, 2, _BLOCK, q.shape[1] // (2 * GROUP), 2, 8, 4).permute(0, 3, 4, 5, 1, 2, 6)
    if matrix.shift_OG is None:
        lines = (lines.short() + 128).to(torch.uint8)
        return large_pages.copy(torch.cat((lines.flatten(2), groups(matrix.scale_OG)), -1))
    lines = lines.to(torch.uint8).unflatten(3, (4, 2))
    lines = lines.select(4, 0) | lines.select(4, 1) << 4
    return large_pages.copy(torch.cat((lines.flatten(2), groups(matrix.scale_OG), groups(matrix.shift_OG)), -1))


def _alternate(gate: Tensor, up: Tensor) -> Tensor:
    """16 rows of one, then 16 of the other."""
    blocks = [F.pad(part, (0, 0, 0, -len(part) % _BLOCK)).unflatten(0, (-1, _BLOCK)) for part in (gate, up)]
    return torch.stack(blocks, dim=1).flatten(0, 2)


class Weights:
    """A projection packed for the kernel."""

    def __init__(
        self, packed: Tensor, bias: Tensor | None, inp: int, out: int, dtype: torch.dtype, bits: int = 0
    ) -> None:
        self.tensor, self.bias = packed, None if bias is None else bias.float().contiguous()
        self.dtype = dtype  # of its inputs
        bias_pointer = None if self.bias is None else self.bias.data_ptr()
        self.struct = _Linear(packed.data_ptr(), bias_pointer, inp, out, bits)

    @staticmethod
    def integers(matrix: Quantised, bias: Tensor | None, dtype: torch.dtype) -> "Weights":
        """Of 8 or 4 bits, for inputs of this dtype."""
        return Weights(_packed_integers(matrix), bias, matrix.inp, len(matrix.q_OI), dtype, matrix.bits)

    @staticmethod
    def stacked(
        weights: Sequence[Tensor] | Sequence[Quantised],
        biases: Sequence[Tensor | None] = (),
        dtype: torch.dtype | None = None,
    ) -> "Weights":
        """Projections `[out_i, in]` that read the same input, one below the other; `dtype` is that of the input where
        the weights have none.
        """
        bias = None
        if any(b is not None for b in biases):
            rows = [w.scale_OG if isinstance(w, Quantised) else w for w in weights]
            bias = torch.cat(
                [w.new_zeros(len(w)) if b is None else b.detach() for w, b in zip(rows, biases, strict=True)]
            )
        matrices = [w for w in weights if isinstance(w, Quantised)]
        if matrices:
            assert dtype is not None
            return Weights.integers(matrices[0].over(lambda *parts: torch.cat(parts), *matrices[1:]), bias, dtype)
        tensors = [w.detach() for w in weights if isinstance(w, Tensor)]
        weight = torch.cat(tensors) if len(tensors) > 1 else tensors[0]
        return Weights(_packed(_blocks(weight)), bias, weight.shape[1], weight.shape[0], weight.dtype)

    @staticmethod
    def alternating(
        gate: Tensor | Quantised,
        up: Tensor | Quantised,
        biases: Sequence[Tensor | None] = (None, None),
        dtype: torch.dtype | None = None,
    ) -> "Weights":
        """Gate and up: a block of one, then a block of the other; `dtype` as for `stacked`."""
        bias = None
        assert (biases[0] is None) == (biases[1] is None)
        if biases[0] is not None:
            bias = torch.stack([_blocks(b[:, None])[..., 0] for b in biases if b is not None], dim=1).flatten()
        if isinstance(gate, Quantised):
            assert isinstance(up, Quantised)
            assert dtype is not None
            return Weights.integers(gate.over(_alternate, up), bias, dtype)
        assert isinstance(up, Tensor)
        pairs = torch.stack((_blocks(gate), _blocks(up)), dim=1).flatten(0, 1)
        return Weights(_packed(pairs), bias, gate.shape[1], _BLOCK * len(pairs), gate.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        """`[..., in]` in the weights' dtype to float32 `[..., out]`."""
        out = torch.empty(*x.shape[:-1], self.struct.out)
        self._run(x, out, None, None, 0)
        return out

    def argmax(self, x: Tensor) -> Tensor:
        """`[..., in]` to the number of the largest output, of equals the first, int64 `[...]`."""
        best = torch.empty(x.shape[:-1], dtype=torch.int64)
        self._run(x, None, best, None, 1)
        return best

    def top(self, x: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """`[..., in]` to the largest of its outputs' log-softmax and their numbers, `[..., count]`, descending, of
        equals the first. NaN where an output is; a number may then come twice.
        """
        ids = torch.empty(*x.shape[:-1], count, dtype=torch.int64)
        log_shares = torch.empty(ids.shape)
        self._run(x, None, ids, log_shares, count)
        return log_shares, ids

    def _run(self, x: Tensor, out: Tensor | None, ids: Tensor | None, log_shares: Tensor | None, top: int) -> None:
        lib = library()
        assert lib is not None
        assert top <= self.struct.out
        x = x.detach().to(self.dtype).contiguous()
        _check_memory(
            lib.aq_linear(
                ctypes.byref(self.struct), x.data_ptr(), x.numel() // self.struct.inp, self.dtype == torch.bfloat16,
                _tiles(), *map(_pointer, (out, ids, log_shares)), top, torch.get_num_threads(),
            )
        )  # fmt: skip


@dataclass
class LayerWeights:
    """One block, packed. `feature_norm` makes it a draft's: attention reads embedding and feature side by side."""

    input_norm: Tensor
    post_norm: Tensor
    qkv: Weights
    o: Weights
    gate_up: Weights
    down: Weights
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    feature_norm: Tensor | None = None


@dataclass
class DecoderOutput:
    """In the weights' dtype."""

    feature_BND: Tensor  # the last layer's output
    last_BND: Tensor  # after the final norm
    aux_BNA: Tensor
    keys_LBGNE: Tensor
    values_LBGNE: Tensor


class Grown(NamedTuple):
    """Trees of B rows, of each its nodes."""

    tokens: list[list[int]]
    parents: list[list[int]]
    depths: list[list[int]]
    scores: list[list[float]]
    seconds: list[float]  # of each level


class Decoder:
    """A stack of blocks that runs in the kernel."""

    def __init__(
        self,
        layers: Sequence[LayerWeights],
        final_norm: Tensor,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        inner: int,
        eps: float,
        frequencies: Tensor,
        rotary_scale: float,
        normed_residual: bool = False,
        capture_after: Sequence[int] = (),
    ) -> None:
        """`frequencies` `[E / 2]` and `rotary_scale` are those of the rotary embedding (`layers.Rotary`)."""
        self._captured = torch.tensor(list(capture_after), dtype=torch.int32)
        self.dtype = layers[0].qkv.dtype
        parts = [part for layer in layers for part in (layer.qkv, layer.o, layer.gate_up, layer.down)]
        assert len({part.struct.bits > 0 for part in parts}) == 1, "of 8 or 4 bits are all projections or none"
        self._kept: list[object] = [layers]
        self._layers = (_Layer * len(layers))()
        for struct, layer in zip(self._layers, layers, strict=True):
            for name in ("input_norm", "feature_norm", "q_norm", "k_norm", "post_norm"):
                setattr(struct, name, self._vector(getattr(layer, name)))
            for name in ("qkv", "o", "gate_up", "down"):
                setattr(struct, name, getattr(layer, name).struct)
        self._shape = (len(layers), kv_heads, head_dim, len(final_norm))
        self._model = _Model(
            self._layers, self._vector(final_norm), self._vector(frequencies),
            len(layers), len(final_norm), inner, heads, kv_heads, head_dim,
            self.dtype == torch.bfloat16, _tiles(), normed_residual, eps, rotary_scale,
        )  # fmt: skip

    def _vector(self, weight: Tensor | None) -> int | None:
        if weight is None:
            return None
        values = weight.detach().float().contiguous()
        self._kept.append(values)
        return values.data_ptr()

    def __call__(
        self,
        residual_BND: Tensor,
        positions_BN: Tensor,
        mask_BNO: Tensor | None,
        cache: KVCache | None,
        slots: list[int] | None,
        *,
        embeds_BND: Tensor | None = None,
        earlier_LBGOE: tuple[Tensor, Tensor] | None = None,
        counts: Sequence[int] | None = None,
    ) -> DecoderOutput:
        """One pass over B rows of N tokens, or of the first `counts` of these: what comes out behind them is anything.
        `mask_BNO` is True where token n may see own token o: those drafted `earlier` in the cycle, then the N of this
        pass; None is causal. All kept tokens of a row are visible.
        """
        lib = library()
        assert lib is not None
        L, G, E, D = self._shape
        B, N = residual_BND.shape[:2]
        earlier = 0 if earlier_LBGOE is None else earlier_LBGOE[0].shape[3]
        own = earlier + N
        keys, values = torch.empty(2, L, B, G, own, E, dtype=self.dtype)
        if earlier_LBGOE is not None:
            keys[..., :earlier, :], values[..., :earlier, :] = earlier_LBGOE
        residual = residual_BND.detach().to(self.dtype).contiguous()
        embeds = None if embeds_BND is None else embeds_BND.detach().to(self.dtype).contiguous()
        positions = positions_BN.expand(B, N).contiguous()
        mask = None if mask_BNO is None else mask_BNO.contiguous()
        _fits(positions.dtype == torch.int64, f"positions of {positions.dtype}")
        counts = [N] * B if counts is None else counts
        _fits(len(counts) == B and all(1 <= count <= N for count in counts), f"{counts} of {B} rows of {N} tokens")
        for x in (residual, embeds):
            _fits(x is None or x.shape == (B, N, D), f"states {residual.shape} for {B} rows of {N} tokens of width {D}")
        if mask is not None:
            _fits(
                mask.dtype == torch.bool and len(mask) in (1, B) and mask.shape[1:] == (N, own),
                f"a mask {tuple(mask.shape)} of {mask.dtype} for {B} rows of {N} tokens that may see {own}",
            )
        aux = torch.empty(B, N, len(self._captured) * D, dtype=self.dtype)
        feature, last = torch.empty(2, B, N, D, dtype=self.dtype)
        done = lib.aq_forward(
            ctypes.byref(self._model),
            ctypes.byref(
                _Pass(
                    *map(_pointer, (residual, embeds, positions)), *self._past(cache, slots, B),
                    _pointer(mask), 0 if mask is None or len(mask) == 1 else N * own,
                    _pointer(keys), _pointer(values), (ctypes.c_int32 * B)(*counts), B, N, own,
                    _pointer(self._captured), len(self._captured), torch.get_num_threads(),
                    *map(_pointer, (aux, feature, last)),
                )
            ),
        )  # fmt: skip
        _check_memory(done)
        return DecoderOutput(feature, last, aux, keys[..., earlier:, :], values[..., earlier:, :])

    def _past(self, cache: KVCache | None, slots: list[int] | None, rows: int) -> list[Any]:
        """What a pass is told of the cache: keys, values, per row offset and length, strides of layers and heads."""
        lengths, offsets = (ctypes.c_int32 * rows)(), (ctypes.c_int64 * rows)()
        if cache is None or slots is None:
            return [None, None, offsets, lengths, 0, 0]
        L, G, E, _ = self._shape
        keys = cache.keys_LGSE
        shape, stride = keys.shape, keys.stride()
        _fits(len(slots) == rows, f"{len(slots)} slots for {rows} rows")
        _fits(keys.dtype == self.dtype and keys.device.type == "cpu", f"a cache of {keys.dtype}")
        _fits((shape[0], shape[1], shape[3]) == (L, G, E) and stride[2:] == (E, 1), f"a cache of {tuple(shape)}")
        lengths[:], offsets[:] = [cache.lengths[s] for s in slots], [cache.starts[s] * E for s in slots]
        return [keys.data_ptr(), cache.values_LGSE.data_ptr(), offsets, lengths, stride[0], stride[1]]

    def grow(
        self,
        fc: Weights,
        head: Weights,
        embedding_VD: Tensor,
        target_ids_W: Tensor,
        norm_output: bool,
        aux_MA: Tensor,
        ids: Sequence[int],
        counts: Sequence[int],
        limits: Sequence[tuple[int, int, int]],
        worth: Sequence[Sequence[float]],
        foresights: Sequence[tuple[int, float, float]],
        cache: KVCache,
        slots: list[int],
    ) -> Grown:
        """Read what is new of each row, `counts` of the M aux and ids, into the cache, and make trees behind it, as
        `TreeBuilder` (tree.py) makes them.

        `limits`: depth, top-k and nodes of each row. `worth`: how likely a row's node must be to be run, and then those
        of depth 1, 2, ... together; nothing is asked of deeper ones. `foresights`: of each row
        what decode/sampling.py calls so.
        """
        lib = library()
        assert lib is not None
        B, M, D, A = len(slots), len(ids), self._shape[3], fc.struct.inp
        room, deepest = max(nodes for _, _, nodes in limits), max(depth for depth, _, _ in limits)
        aux = aux_MA.detach().to(self.dtype).contiguous()
        _fits(len(counts) == len(limits) == len(foresights) == B, f"{B} rows of ids")
        _fits(aux.shape == (M, A) and fc.struct.out == D, f"states {aux.shape} for {M} tokens")
        _fits(target_ids_W.dtype == torch.int64, f"ids of {target_ids_W.dtype}")
        _fits(sum(counts) == M and all(count >= 1 for count in counts), f"{counts} new rows of {M}")
        _fits(embedding_VD.dtype == self.dtype and embedding_VD.shape[1] == D, f"embeddings {embedding_VD.shape}")
        _fits(embedding_VD.is_contiguous() and target_ids_W.is_contiguous(), "strided embeddings or ids")
        _fits(head.struct.out == len(target_ids_W), "ids of another head")
        _fits(all(depth >= 1 and k >= 1 and nodes >= 1 for depth, k, nodes in limits), f"limits {limits}")
        widths = [(depth, min(k, len(target_ids_W)), nodes) for depth, k, nodes in limits]
        depth, top_k, nodes = ((ctypes.c_int32 * B)(*of_rows) for of_rows in zip(*widths, strict=True))
        made, seconds, least = (
            (ctypes.c_int32 * B)(),
            (ctypes.c_float * deepest)(),
            (ctypes.c_float * (B * (1 + deepest)))(),
        )
        for b, of_row in enumerate(worth):
            at, count = b * (1 + deepest), min(1 + deepest, len(of_row))
            least[at : at + count] = list(of_row[:count])
        keys = (ctypes.c_uint64 * B)(*(key for key, _, _ in foresights))
        temperature, sharpness = ((ctypes.c_float * B)(*(of_row[i] for of_row in foresights)) for i in (1, 2))
        ids_made = [(ctypes.c_int64 * (B * room))() for _ in range(3)]  # tokens, parents, depths
        scores_made = (ctypes.c_float * (B * room))()
        for slot, count in zip(slots, counts, strict=True):
            cache.extend(slot, count)  # what stands there is written by the kernel
        cached = _Pass(None, None, None, *self._past(cache, slots, B))
        for b, count in enumerate(counts):
            cached.past_lengths[b] -= count
        cached.rows, cached.threads = B, torch.get_num_threads()
        growth = _Growth(
            ctypes.pointer(fc.struct), ctypes.pointer(head.struct),
            *map(_pointer, (embedding_VD, target_ids_W, aux)), (ctypes.c_int64 * M)(*ids),
            (ctypes.c_int32 * B)(*counts), depth, top_k, nodes, least, keys, temperature, sharpness, norm_output, room,
            *ids_made, scores_made, made, seconds,
        )  # fmt: skip
        _check_memory(lib.aq_grow(ctypes.byref(self._model), ctypes.byref(cached), ctypes.byref(growth)))
        ends = [(b * room, b * room + n) for b, n in enumerate(made)]
        tokens, parents, depths = ([part[start:end] for start, end in ends] for part in ids_made)
        scores = [scores_made[start:end] for start, end in ends]
        return Grown(tokens, parents, depths, scores, [s for s in seconds if s > 0])


def _fits(condition: bool, what: str) -> None:
    """Checked always: past it only addresses are left."""
    if not condition:
        raise ValueError(f"the kernel was given {what}")


def _check_memory(returned: int) -> None:
    if returned:
        raise MemoryError("the CPU kernel found no memory for its pass")


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
