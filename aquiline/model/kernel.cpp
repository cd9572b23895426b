// One pass of a Llama-like decoder on the CPU: all layers in one parallel region, weights packed once and read once.
//
// A token's numbers do not depend on what else is in the pass: every sum runs in one fixed order (over the input width
// in a projection, over positions in attention), and nothing is shared between tokens but the weights. So a token
// verified in a tree has bit for bit the logits it has in plain decoding, in bf16 as in float32.
//
// float32 inside; with bf16 weights, what enters a projection and what is cached is rounded to bf16.
//
// Letters: M tokens of the pass, B rows, N = M / B, H heads, G kv heads, E head width, S cached slots of a row.
// Packed weights: blocks of 16 outputs; within a block [in / 2][16][2] (bf16: what AMX and AVX512-BF16 read), or
// [in][16] (float32). `in` is padded to a multiple of 32, `out` to one of 16.

#include <immintrin.h>
#include <omp.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace {

constexpr int kBlock = 16;  // outputs of a block, rows of a tile

typedef float V __attribute__((vector_size(64), aligned(4)));
typedef uint32_t U __attribute__((vector_size(64), aligned(4)));
typedef int32_t I __attribute__((vector_size(64), aligned(4)));
typedef uint16_t bf16;

inline V splat(float x) { return V{} + x; }
inline V load(const float* p) { return *reinterpret_cast<const V*>(p); }
inline void store(float* p, V v) { *reinterpret_cast<V*>(p) = v; }

inline V fma(V a, V b, V c) {  // one rounding everywhere, so that no two loops differ
#if defined(__AVX512F__)
  return reinterpret_cast<V>(_mm512_fmadd_ps(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b),
                                             reinterpret_cast<__m512>(c)));
#elif defined(__FMA__)
  V r;
  for (int i = 0; i < 16; i += 8) {
    auto half = [i](V& v) { return reinterpret_cast<float*>(&v) + i; };
    _mm256_storeu_ps(half(r), _mm256_fmadd_ps(_mm256_loadu_ps(half(a)), _mm256_loadu_ps(half(b)), _mm256_loadu_ps(half(c))));
  }
  return r;
#else
  V r;
  for (int i = 0; i < 16; i++) r[i] = std::fma(a[i], b[i], c[i]);
  return r;
#endif
}

inline float sum(V v) {
  float s = 0;
  for (int width = 8; width; width /= 2)
    for (int i = 0; i < width; i++) v[i] += v[i + width];
  s = v[0];
  return s;
}

inline float largest(V v) {
  float m = v[0];
  for (int i = 1; i < 16; i++) m = std::max(m, v[i]);
  return m;
}

inline float widen(bf16 x) {
  uint32_t bits = uint32_t(x) << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}
inline bf16 narrow(float f) {  // to nearest, ties to even; a NaN stays one
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return bf16(bits >> 16 | 0x40);
  return bf16((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline float get(const float* p, int64_t i) { return p[i]; }
inline float get(const bf16* p, int64_t i) { return widen(p[i]); }
inline void put(float* p, int64_t i, float x) { p[i] = x; }
inline void put(bf16* p, int64_t i, float x) { p[i] = narrow(x); }
inline V load16(const float* p) { return load(p); }
inline V load16(const bf16* p) {
  typedef uint16_t H __attribute__((vector_size(32), aligned(2)));
  return reinterpret_cast<V>(__builtin_convertvector(*reinterpret_cast<const H*>(p), U) << 16);
}

// e^x for x <= 0 or so: 2^n times a polynomial on [-ln2/2, ln2/2], within 2 units in the last place.
inline V exp(V x) {
  x = x < -87.0f ? splat(-87.0f) : x;
  x = x > 88.0f ? splat(88.0f) : x;
  V n = x * 1.44269504f;
  n = (n + 12582912.0f) - 12582912.0f;  // to the nearest whole number
  V r = fma(n, splat(-0.693145752f), x);
  r = fma(n, splat(-1.42860677e-6f), r);
  V p = splat(1.98756915e-4f);
  p = fma(p, r, splat(1.39819995e-3f));
  p = fma(p, r, splat(8.33345196e-3f));
  p = fma(p, r, splat(4.16657962e-2f));
  p = fma(p, r, splat(1.66666657e-1f));
  p = fma(p, r, splat(0.5f));
  p = fma(p, r * r, r + 1.0f);
  I bits = reinterpret_cast<I>(p) + (__builtin_convertvector(n, I) << 23);
  return reinterpret_cast<V>(bits);
}

}  // namespace

extern "C" {

struct Linear {
  const void* weight;  // packed; null: absent
  const float* bias;
  int32_t in, out;
};

struct Layer {
  const float *input_norm, *feature_norm, *q_norm, *k_norm, *post_norm;  // feature_norm: a draft layer
  Linear qkv, o, gate_up, down;
};

struct Model {
  const Layer* layers;
  const float* final_norm;
  int32_t num_layers, width, inner, heads, kv_heads, head_dim, bf16_weights, amx, normed_residual;
  float eps;
};

struct Pass {
  const float *residual, *embeds;  // [M, D]; embeds only for a draft layer
  const float *cos, *sin;          // [M, E]
  const void *past_keys, *past_values;      // base of [L, slots, G, room, E]
  const int64_t *past_offsets;               // per row: its slot's first element within a layer
  const int32_t *past_lengths;               // per row
  int64_t past_layer_stride, past_head_stride;  // elements
  const uint8_t* mask;             // [B or 1, N, own] bytes, null: causal
  int64_t mask_row_stride;
  void *own_keys, *own_values;     // [L, B, G, own, E]; the pass writes the last N of `own`
  int32_t rows, tokens, own;       // B, N, tokens the mask speaks of
  const int32_t* capture;          // layers whose output goes to aux
  int32_t num_captured, threads;
  void *aux, *feature, *last;      // [M, captured * D], [M, D] (layer output; may be null), [M, D]
};

}  // extern "C"

namespace {

inline int64_t up(int64_t n, int64_t m) { return (n + m - 1) / m * m; }

#if defined(__AMX_BF16__) && defined(__AMX_TILE__)
constexpr bool kHasAmx = true;
struct alignas(64) TileConfig {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
};
void open_tiles() {
  TileConfig c;
  for (int t = 0; t < 8; t++) c.bytes[t] = 64, c.rows[t] = 16;
  _tile_loadconfig(&c);
}
void close_tiles() { _tile_release(); }

// [16 or 32 rows] x [32 outputs]: tiles 0-3 sums, 4-5 inputs, 6-7 weights. Out: float32 [row block][out block][16][16].
template <bool kTwo>
inline void tile_gemm(const bf16* x, int64_t ldx, const bf16* w0, const bf16* w1, int in, float* out) {
  _tile_zero(0);
  _tile_zero(1);
  if (kTwo) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int k = 0; k < in; k += 32) {
    const bf16 *a = w0 + k * 16, *b = w1 + k * 16;
    for (int line = 0; line < 16; line++) {
      _mm_prefetch(reinterpret_cast<const char*>(a) + 8192 + line * 64, _MM_HINT_T0);
      _mm_prefetch(reinterpret_cast<const char*>(b) + 8192 + line * 64, _MM_HINT_T0);
    }
    _tile_loadd(6, a, 64);
    _tile_loadd(7, b, 64);
    _tile_loadd(4, x + k, ldx * 2);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (kTwo) {
      _tile_loadd(5, x + 16 * ldx + k, ldx * 2);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, out, 64);
  _tile_stored(1, out + 256, 64);
  if (kTwo) {
    _tile_stored(2, out + 512, 64);
    _tile_stored(3, out + 768, 64);
  }
}

// scores [keys][16 queries] = keys [16, E] x queries, the queries packed as [E / 2][16][2].
inline void tile_scores(const bf16* keys, int64_t ld, const bf16* q, int E, float* out) {
  _tile_zero(0);
  for (int e = 0; e < E; e += 32) {
    _tile_loadd(4, keys + e, ld * 2);
    _tile_loadd(6, q + e * 16, 64);
    _tile_dpbf16ps(0, 4, 6);
  }
  _tile_stored(0, out, 64);
}
#else
constexpr bool kHasAmx = false;
void open_tiles() {}
void close_tiles() {}
template <bool kTwo>
inline void tile_gemm(const bf16*, int64_t, const bf16*, const bf16*, int, float*) {}
inline void tile_scores(const bf16*, int64_t, const bf16*, int, float*) {}
#endif

// R rows x 16 outputs by fused multiply-add, the sum over `in` in order.
template <int R>
inline void fma_gemm(const float* x, int64_t ldx, const float* w, int in, float* out) {
  V acc[R] = {};
  for (int k = 0; k < in; k++) {
    V weight = load(w + int64_t(k) * 16);
    for (int r = 0; r < R; r++) acc[r] = fma(splat(x[r * ldx + k]), weight, acc[r]);
  }
  for (int r = 0; r < R; r++) store(out + r * 16, acc[r]);
}
template <int R>
inline void fma_gemm(const float* x, int64_t ldx, const bf16* w, int in, float* out) {
  V acc[R] = {};
  for (int k = 0; k < in; k += 2) {
    U pair = *reinterpret_cast<const U*>(w + int64_t(k) * 16);
    V even = reinterpret_cast<V>(pair << 16), odd = reinterpret_cast<V>(pair & 0xffff0000u);
    for (int r = 0; r < R; r++) {
      acc[r] = fma(splat(x[r * ldx + k]), even, acc[r]);
      acc[r] = fma(splat(x[r * ldx + k + 1]), odd, acc[r]);
    }
  }
  for (int r = 0; r < R; r++) store(out + r * 16, acc[r]);
}

// What enters projections: rows padded with zeros to up(width, 32), and up to a multiple of 32 of them. bf16 for AMX,
// else float32 (rounded to bf16 when the weights are, so that both ways compute the same products).
struct Inputs {
  std::vector<char> bytes;
  int64_t ld = 0;
  bool tiles = false, rounded = false;
  void shape(int64_t rows, int64_t width, bool tiles_, bool rounded_) {
    tiles = tiles_, rounded = rounded_, ld = up(width, 32);
    bytes.assign(size_t(up(rows, 32) * ld) * (tiles ? 2 : 4), 0);
  }
  bf16* half(int64_t row) { return reinterpret_cast<bf16*>(bytes.data()) + row * ld; }
  float* full(int64_t row) { return reinterpret_cast<float*>(bytes.data()) + row * ld; }
  void set(int64_t row, int64_t at, const float* x, int64_t count) {
    if (tiles)
      for (int64_t i = 0; i < count; i++) half(row)[at + i] = narrow(x[i]);
    else if (rounded)
      for (int64_t i = 0; i < count; i++) full(row)[at + i] = widen(narrow(x[i]));
    else
      for (int64_t i = 0; i < count; i++) full(row)[at + i] = x[i];
  }
};

#if defined(__AVX512F__)
constexpr int kRows = 8;  // rows that share a weight: as many sums as hide the latency of a multiply-add
#else
constexpr int kRows = 4;
#endif

template <typename T>
void multiply_add(Inputs& x, int64_t m, int64_t rows, const T* weight, int in, float* out) {
  if (rows == 1) return fma_gemm<1>(x.full(m), x.ld, weight, in, out);
  if (rows == 2) return fma_gemm<2>(x.full(m), x.ld, weight, in, out);
  if (rows <= 4) return fma_gemm<4>(x.full(m), x.ld, weight, in, out);
  fma_gemm<kRows>(x.full(m), x.ld, weight, in, out);
}

// Blocks 2 * pair and 2 * pair + 1 of a projection, for all rows: use(row, 16 outputs, the next 16 or null).
template <typename Use>
void block_pair(Inputs& x, int64_t M, const Linear& w, bool bf16_weights, int64_t pair, Use use) {
  int64_t in = up(w.in, 32), step = in * kBlock, at = 2 * pair * step;
  bool second = 2 * pair + 1 < up(w.out, kBlock) / kBlock;
  alignas(64) float out[4 * 256];  // the padding rows of `x` take part where that saves a case
  if (x.tiles) {
    const bf16* a = static_cast<const bf16*>(w.weight) + at;
    const bf16* b = second ? a + step : a;
    for (int64_t m = 0; m < M; m += 32) {
      if (M - m > 16) tile_gemm<true>(x.half(m), x.ld, a, b, int(in), out);
      else tile_gemm<false>(x.half(m), x.ld, a, b, int(in), out);
      for (int64_t r = 0; r < std::min<int64_t>(32, M - m); r++) {
        const float* row = out + (r / 16) * 512 + (r % 16) * 16;
        use(m + r, row, second ? row + 256 : nullptr);
      }
    }
    return;
  }
  constexpr int kHalf = kRows * kBlock;
  for (int64_t m = 0; m < M; m += kRows) {
    int64_t rows = std::min<int64_t>(kRows, M - m);
    for (int half = 0; half < 1 + second; half++) {
      if (bf16_weights)
        multiply_add(x, m, rows, static_cast<const bf16*>(w.weight) + at + half * step, int(in), out + half * kHalf);
      else
        multiply_add(x, m, rows, static_cast<const float*>(w.weight) + at + half * step, int(in), out + half * kHalf);
    }
    for (int64_t r = 0; r < rows; r++) use(m + r, out + r * kBlock, second ? out + kHalf + r * kBlock : nullptr);
  }
}

// This thread's share of a projection: done(row, first column, values, count).
template <typename Done>
void project(Inputs& x, int64_t M, const Linear& w, bool bf16_weights, Done done) {
  int64_t pairs = (w.out + 2 * kBlock - 1) / (2 * kBlock), T = omp_get_num_threads(), t = omp_get_thread_num();
  for (int64_t pair = pairs * t / T; pair < pairs * (t + 1) / T; pair++)
    block_pair(x, M, w, bf16_weights, pair, [&](int64_t row, const float* a, const float* b) {
      for (int half = 0; half < (b ? 2 : 1); half++) {
        int64_t column = (2 * pair + half) * kBlock, count = std::min<int64_t>(kBlock, w.out - column);
        alignas(64) float value[kBlock];
        for (int j = 0; j < kBlock; j++) value[j] = (half ? b : a)[j];
        if (w.bias)
          for (int j = 0; j < count; j++) value[j] += w.bias[column + j];
        done(row, column, value, count);
      }
    });
}

float inverse_rms(const float* x, int64_t width, float eps) {
  V acc = {};
  int64_t i = 0;
  for (; i + 16 <= width; i += 16) acc = fma(load(x + i), load(x + i), acc);
  if (i < width) {
    alignas(64) float tail[16] = {};
    std::copy(x + i, x + width, tail);
    acc = fma(load(tail), load(tail), acc);
  }
  return 1.0f / std::sqrt(sum(acc) / float(width) + eps);
}

void rms_norm(const float* x, const float* weight, int64_t width, float eps, float* out) {
  float scale = inverse_rms(x, width, eps);
  for (int64_t i = 0; i < width; i++) out[i] = x[i] * scale * weight[i];
}

template <typename T>
void put_many(T* to, const float* x, int64_t count) {
  for (int64_t i = 0; i < count; i++) put(to, i, x[i]);
}

// Weighted values of Q queries, E columns from `e` on, summed over positions in order: the past, then the visible own.
template <typename T, int Q, int C>
void mix(const T* past_v, int64_t past, const T* own_v, const std::vector<int32_t>* visible, const float* const* weight,
         int64_t E, int64_t e, float* const* out) {
  V acc[Q][C] = {};
  for (int64_t s = 0; s < past; s++) {
    V value[C];
    for (int c = 0; c < C; c++) value[c] = load16(past_v + s * E + e + 16 * c);
    for (int i = 0; i < Q; i++) {
      V w = splat(weight[i][s]);
      for (int c = 0; c < C; c++) acc[i][c] = fma(w, value[c], acc[i][c]);
    }
  }
  for (int i = 0; i < Q; i++) {
    const float* w = weight[i] + past;
    for (int32_t o : visible[i]) {
      V one = splat(*w++);
      for (int c = 0; c < C; c++) acc[i][c] = fma(one, load16(own_v + o * E + e + 16 * c), acc[i][c]);
    }
    for (int c = 0; c < C; c++) store(out[i] + e + 16 * c, acc[i][c]);
  }
}

template <typename T>
struct Runner {
  const Model& m;
  const Pass& p;
  int64_t M, D, H, G, E, group;
  bool tiles;
  std::vector<float> residual, qkv;
  Inputs x, attended, inner;

  Runner(const Model& model, const Pass& pass)
      : m(model), p(pass), M(int64_t(pass.rows) * pass.tokens), D(model.width), H(model.heads), G(model.kv_heads),
        E(model.head_dim), group(H / G), tiles(kHasAmx && model.amx && model.bf16_weights) {
    bool draft = m.layers[0].feature_norm != nullptr, rounded = m.bf16_weights;
    residual.assign(p.residual, p.residual + M * D);
    qkv.resize(size_t(M * (H + 2 * G) * E));
    x.shape(M, draft ? 2 * D : D, tiles, rounded);
    attended.shape(M, H * E, tiles, rounded);
    inner.shape(M, m.inner, tiles, rounded);
  }

  T* own(void* base, int64_t layer, int64_t b, int64_t g) const {
    return static_cast<T*>(base) + ((layer * p.rows + b) * G + g) * p.own * E;
  }

  void norm_into_x(const float* source, const float* weight, int64_t token, int64_t at) {
    thread_local std::vector<float> row;
    row.resize(size_t(D));
    rms_norm(source + token * D, weight, D, m.eps, row.data());
    x.set(token, at, row.data(), D);
  }

  // What attention reads: the residual, normed; in a draft layer the embedding and the feature side by side.
  void attention_input(const Layer& l) {
#pragma omp for schedule(static)
    for (int64_t token = 0; token < M; token++) {
      if (!l.feature_norm) {
        norm_into_x(residual.data(), l.input_norm, token, 0);
        continue;
      }
      norm_into_x(p.embeds, l.input_norm, token, 0);
      norm_into_x(residual.data(), l.feature_norm, token, D);
      if (m.normed_residual) rms_norm(p.residual + token * D, l.feature_norm, D, m.eps, residual.data() + token * D);
    }
  }

  // Head norm and rotation of one head of one token, in place (halves convention of Transformers).
  void turn(float* head, const float* weight, int64_t token) const {
    if (weight) rms_norm(head, weight, E, m.eps, head);
    const float *cos = p.cos + token * E, *sin = p.sin + token * E;
    for (int64_t i = 0, half = E / 2; i < half; i++) {
      float a = head[i], b = head[i + half];
      head[i] = a * cos[i] - b * sin[i];
      head[i + half] = b * cos[i + half] + a * sin[i + half];
    }
  }

  void rotate(int64_t layer) {
    const Layer& l = m.layers[layer];
#pragma omp for schedule(static)
    for (int64_t token = 0; token < M; token++) {
      float* row = qkv.data() + token * (H + 2 * G) * E;
      int64_t b = token / p.tokens, place = p.own - p.tokens + token % p.tokens;
      for (int64_t h = 0; h < H; h++) turn(row + h * E, l.q_norm, token);
      for (int64_t g = 0; g < G; g++) {
        turn(row + (H + g) * E, l.k_norm, token);
        put_many(own(p.own_keys, layer, b, g) + place * E, row + (H + g) * E, E);
        put_many(own(p.own_values, layer, b, g) + place * E, row + (H + G + g) * E, E);
      }
    }
  }

  // Scores of up to 16 queries against `count` keys: out[key * 16 + query].
  void score(const T* keys, int64_t count, const float* q, const bf16* packed, int64_t queries, float* out) const {
    if constexpr (sizeof(T) == 2) {
      if (tiles && E % 32 == 0) {
        int64_t s = 0;
        for (; s + 16 <= count; s += 16) tile_scores(keys + s * E, E, packed, int(E), out + s * 16);
        if (s < count) {
          thread_local std::vector<bf16> tail;
          tail.assign(size_t(16 * E), 0);
          std::memcpy(tail.data(), keys + s * E, size_t((count - s) * E) * 2);
          tile_scores(tail.data(), E, packed, int(E), out + s * 16);
        }
        return;
      }
    }
    for (int64_t s = 0; s < count; s++)
      for (int64_t i = 0; i < queries; i++) {
        V acc = {};
        int64_t e = 0;
        for (; e + 16 <= E; e += 16) acc = fma(load16(keys + s * E + e), load(q + i * E + e), acc);
        float total = sum(acc);
        for (; e < E; e++) total = std::fma(get(keys, s * E + e), q[i * E + e], total);
        out[s * 16 + i] = total;
      }
  }

  // In place: scores of `count` keys to weights that sum to 1. `w` has room up to a multiple of 16.
  static void softmax(float* w, int64_t count) {
    int64_t end = up(count, 16);
    std::fill(w + count, w + end, -std::numeric_limits<float>::infinity());
    V top = load(w), total = {};
    for (int64_t s = 16; s < end; s += 16) {
      V v = load(w + s);
      top = v > top ? v : top;
    }
    V high = splat(largest(top));
    for (int64_t s = 0; s < end; s += 16) {
      V v = load(w + s);
      v = v < -3e38f ? V{} : exp(v - high);
      store(w + s, v);
      total += v;
    }
    V inverse = splat(1.0f / sum(total));
    for (int64_t s = 0; s < end; s += 16) store(w + s, load(w + s) * inverse);
  }

  template <int Q>
  void mix_all(const T* past_v, int64_t past, const T* own_v, const std::vector<int32_t>* visible,
               const float* const* weight, float* const* out) const {
    int64_t e = 0;
    for (; e + 64 <= E; e += 64) mix<T, Q, 4>(past_v, past, own_v, visible, weight, E, e, out);
    for (; e + 16 <= E; e += 16) mix<T, Q, 1>(past_v, past, own_v, visible, weight, E, e, out);
    for (; e < E; e++)
      for (int i = 0; i < Q; i++) {
        float total = 0;
        for (int64_t s = 0; s < past; s++) total = std::fma(weight[i][s], get(past_v, s * E + e), total);
        for (size_t o = 0; o < visible[i].size(); o++)
          total = std::fma(weight[i][past + int64_t(o)], get(own_v, visible[i][o] * E + e), total);
        out[i][e] = total;
      }
  }

  // Up to 16 queries of one row and kv head: query i is head i % group of the row's token i / group.
  void attend(int64_t layer, int64_t b, int64_t g, int64_t first, int64_t queries) {
    int64_t past = p.past_lengths[b], ld = up(past + p.own, 16);
    int64_t at = layer * p.past_layer_stride + p.past_offsets[b] + g * p.past_head_stride;
    const T *past_k = static_cast<const T*>(p.past_keys) + at, *past_v = static_cast<const T*>(p.past_values) + at;
    const T *own_k = own(p.own_keys, layer, b, g), *own_v = own(p.own_values, layer, b, g);
    thread_local std::vector<float> q, past_scores, own_scores, weights, out;
    thread_local std::vector<bf16> packed;
    thread_local std::vector<int32_t> visible[16];
    q.assign(size_t(16 * E), 0), packed.assign(size_t(16 * E), 0), out.resize(size_t(16 * E));
    past_scores.resize(size_t(up(past, 16) * 16)), own_scores.resize(size_t(up(p.own, 16) * 16));
    weights.resize(size_t(16 * ld));
    float scale = 1.0f / std::sqrt(float(E));
    for (int64_t i = 0; i < queries; i++) {
      int64_t token = b * p.tokens + (first + i) / group, h = g * group + (first + i) % group;
      const float* head = qkv.data() + (token * (H + 2 * G) + h) * E;
      for (int64_t e = 0; e < E; e++) {
        float value = head[e] * scale;
        if (m.bf16_weights) {
          packed[size_t((e / 2) * 32 + i * 2 + e % 2)] = narrow(value);
          value = widen(narrow(value));
        }
        q[size_t(i * E + e)] = value;
      }
    }
    score(past_k, past, q.data(), packed.data(), queries, past_scores.data());
    score(own_k, p.own, q.data(), packed.data(), queries, own_scores.data());
    const float* weight[16];
    float* result[16];
    for (int64_t i = 0; i < queries; i++) {
      float* w = weights.data() + i * ld;
      for (int64_t s = 0; s < past; s++) w[s] = past_scores[size_t(s * 16 + i)];
      int64_t n = (first + i) / group;
      visible[i].clear();
      for (int32_t o = 0, end = p.mask ? p.own : int32_t(p.own - p.tokens + n + 1); o < end; o++)
        if (!p.mask || p.mask[b * p.mask_row_stride + n * p.own + o]) {
          w[past + int64_t(visible[i].size())] = own_scores[size_t(o * 16 + i)];
          visible[i].push_back(o);
        }
      softmax(w, past + int64_t(visible[i].size()));
      weight[i] = w, result[i] = out.data() + i * E;
    }
    int64_t i = 0;
    for (; i + 4 <= queries; i += 4) mix_all<4>(past_v, past, own_v, visible + i, weight + i, result + i);
    for (; i < queries; i++) mix_all<1>(past_v, past, own_v, visible + i, weight + i, result + i);
    for (i = 0; i < queries; i++) {
      int64_t token = b * p.tokens + (first + i) / group, h = g * group + (first + i) % group;
      attended.set(token, h * E, result[i], E);
    }
  }

  void attention(int64_t layer) {
    int64_t queries = p.tokens * group, chunks = (queries + 15) / 16;
#pragma omp for schedule(dynamic, 1)
    for (int64_t item = 0; item < p.rows * G * chunks; item++) {
      int64_t b = item / (G * chunks), g = item / chunks % G, first = item % chunks * 16;
      attend(layer, b, g, first, std::min<int64_t>(16, queries - first));
    }
  }

  // Blocks of gate and up alternate, so that a pair makes 16 inputs of the next projection.
  void gated(const Linear& w) {
    int64_t pairs = (m.inner + kBlock - 1) / kBlock, count = omp_get_num_threads(), t = omp_get_thread_num();
    for (int64_t pair = pairs * t / count; pair < pairs * (t + 1) / count; pair++)
      block_pair(x, M, w, m.bf16_weights, pair, [&](int64_t row, const float* gate, const float* rise) {
        V a = load(gate), b = load(rise);
        if (w.bias) a += load(w.bias + pair * 32), b += load(w.bias + pair * 32 + 16);
        alignas(64) float value[kBlock];
        store(value, a / (1.0f + exp(-a)) * b);
        inner.set(row, pair * kBlock, value, std::min<int64_t>(kBlock, m.inner - pair * kBlock));
      });
  }

  void add_to_residual(Inputs& from, const Linear& w) {
    project(from, M, w, m.bf16_weights, [&](int64_t row, int64_t column, const float* value, int64_t count) {
      for (int64_t j = 0; j < count; j++) residual[size_t(row * D + column + j)] += value[j];
    });
  }

  void capture(int64_t layer) {
    for (int64_t c = 0; c < p.num_captured; c++)
      if (p.capture[c] == layer) {
#pragma omp for schedule(static)
        for (int64_t token = 0; token < M; token++)
          put_many(static_cast<T*>(p.aux) + (token * p.num_captured + c) * D, residual.data() + token * D, D);
      }
  }

  void run() {
#pragma omp parallel num_threads(p.threads)
    {
      if (tiles) open_tiles();
      for (int64_t layer = 0; layer < m.num_layers; layer++) {
        const Layer& l = m.layers[layer];
        attention_input(l);
        project(x, M, l.qkv, m.bf16_weights, [&](int64_t row, int64_t column, const float* value, int64_t count) {
          std::copy(value, value + count, qkv.data() + row * (H + 2 * G) * E + column);
        });
#pragma omp barrier
        rotate(layer);
        attention(layer);
        add_to_residual(attended, l.o);
#pragma omp barrier
#pragma omp for schedule(static)
        for (int64_t token = 0; token < M; token++) norm_into_x(residual.data(), l.post_norm, token, 0);
        gated(l.gate_up);
#pragma omp barrier
        add_to_residual(inner, l.down);
#pragma omp barrier
        capture(layer);
      }
#pragma omp for schedule(static)
      for (int64_t token = 0; token < M; token++) {
        float* row = residual.data() + token * D;
        if (p.feature) put_many(static_cast<T*>(p.feature) + token * D, row, D);
        rms_norm(row, m.final_norm, D, m.eps, row);
        put_many(static_cast<T*>(p.last) + token * D, row, D);
      }
      if (tiles) close_tiles();
    }
  }
};

}  // namespace

extern "C" {

// Whether tiles can be used here; asks the kernel for them, once per process.
int aq_amx() {
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  return kHasAmx && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

void aq_forward(const Model* model, const Pass* pass) {
  if (model->bf16_weights) Runner<bf16>(*model, *pass).run();
  else Runner<float>(*model, *pass).run();
}

// out [M, w.out] float32 = x [M, w.in] (bf16 or float32, as the weights) times the packed weight, plus bias.
void aq_linear(const Linear* w, const void* x, int64_t M, int bf16_weights, int amx, float* out, int threads) {
  bool tiles = kHasAmx && amx && bf16_weights;
  Inputs in;
  in.shape(M, w->in, tiles, bf16_weights);
  for (int64_t row = 0; row < M; row++) {
    if (tiles) std::memcpy(in.half(row), static_cast<const bf16*>(x) + row * w->in, size_t(w->in) * 2);
    else
      for (int64_t i = 0; i < w->in; i++)
        in.full(row)[i] = bf16_weights ? get(static_cast<const bf16*>(x), row * w->in + i)
                                       : get(static_cast<const float*>(x), row * w->in + i);
  }
#pragma omp parallel num_threads(threads)
  {
    if (tiles) open_tiles();
    project(in, M, *w, bf16_weights, [&](int64_t row, int64_t column, const float* value, int64_t count) {
      std::copy(value, value + count, out + row * w->out + column);
    });
    if (tiles) close_tiles();
  }
}

}  // extern "C"
