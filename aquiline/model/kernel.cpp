// One pass of a Llama-like decoder on the CPU: all layers in one parallel region, weights packed once and read once; and
// a draft's part of a cycle, which is several passes with the growing of its trees between them.
//
// A token's numbers do not depend on what else is in the pass: every sum runs in one fixed order (over the input width
// in a projection, over positions in attention; what a token does not see adds exact zeros), and tokens share nothing
// but the weights. So a token verified in a tree has bit for bit the logits it has in plain decoding, in bf16 as in
// float32. Compile with -ffp-contract=off: what is fused is written as fma, everywhere alike.
//
// float32 inside; with bf16 weights, what enters a projection, queries, keys and values are rounded to bf16. With weights
// of 8 or 4 bits what enters a projection is rounded to 8 bits (kernel_integers.h).
//
// Letters: B rows, N places for tokens in each, M tokens computed, H heads, G kv heads, E head width, D width.
// Packed weights: pairs of blocks of 16 outputs; within a pair [in / 2][2][16][2] (bf16: in each block what AMX and
// AVX512-BF16 read), or [in][2][16] (float32). `in` and `out` are padded to a multiple of 32. Those of 8 or 4 bits:
// kernel_integers.h.

#include <omp.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <new>
#include <numeric>
#include <vector>

#include "kernel_integers.h"
#include "kernel_races.h"
#include "kernel_vector.h"

extern "C" {

struct Linear {
  const void* weight;  // packed
  const float* bias;   // or null
  int32_t in, out;
  int32_t bits;  // of a weight: 8, 4, or 0 for the dtype of the model
};

struct Layer {
  const float *input_norm, *feature_norm, *q_norm, *k_norm, *post_norm;  // feature_norm: a draft layer; or null
  Linear qkv, o, gate_up, down;
};

struct Model {
  const Layer* layers;
  const float *final_norm, *frequencies;  // of the rotary embedding, [E / 2]
  int32_t num_layers, width, inner, heads, kv_heads, head_dim, bf16_weights, tiles, normed_residual;
  float eps, rotary_scale;
};

struct Pass {
  const void *residual, *embeds;                // [B * N, D]; embeds only for a draft layer
  const int64_t* positions;                     // [B * N]
  const void *past_keys, *past_values;          // base of [L, slots, G, room, E]
  const int64_t* past_offsets;                  // per row: its slot's first element within a layer
  const int32_t* past_lengths;                  // per row
  int64_t past_layer_stride, past_head_stride;  // elements
  const uint8_t* mask;                          // [B or 1, N, own] bytes, null: causal
  int64_t mask_row_stride;
  void *own_keys, *own_values;                  // [L, B, G, own, E]; the pass writes the last N of `own`
  const int32_t* counts;                        // per row: how many of its N tokens are computed, the first ones
  int32_t rows, tokens, own;                    // B, N, tokens the mask speaks of
  const int32_t* capture;                       // layers whose output goes to aux
  int32_t num_captured, threads;
  void *aux, *feature, *last;                   // [B * N, captured * D], [B * N, D] (the last layer's output), the same
};

// A draft's trees behind its last real rows, of which those not read yet come first. Of a row's tree, at `room` times the
// row, `made` says how many nodes it has.
struct Growth {
  const Linear *fc, *head;
  const void* embedding;                 // of all tokens, [V, D]
  const int64_t* target_ids;             // of the draft's ids
  const void* aux;                       // [M, width of fc's input], of the real rows to be read, one B behind the other
  const int64_t* ids;                    // [M], the tokens these embed
  const int32_t* counts;                 // [B], how many of them there are, at least 1
  const int32_t *depth, *top_k, *nodes;  // [B], the limits of each tree, at least 1
  const float* worth;                    // [B, 1 + deepest]: how likely a node must be to be run, then those of depth
                                         // 1, ... together
  const uint64_t* keys;                  // [B], where each row's random numbers begin
  const float *temperature, *sharpness;  // [B], of their noise, 0: none, and the factor of the logits beside it
  int32_t norm_output, room;
  int64_t *tokens, *parents, *depths;    // [B, room]; a parent of -1 is the root
  float* scores;                         // [B, room]
  int32_t* made;                         // [B]
  float* seconds;                        // [deepest]: of each level made; 0: none was
};

}  // extern "C"

namespace {

// ------------------------------------------------------------ projections

bool tiles_granted = false;

#if defined(__AMX_BF16__) && defined(__AMX_TILE__)
constexpr bool kHasTiles = true;
struct alignas(64) TileConfig {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
};
// GCC's tile intrinsics do not tell the compiler which memory they read: what they are to see is stored first.
inline void stored() { asm volatile("" ::: "memory"); }
void open_tiles() {
  TileConfig c;
  for (int t = 0; t < 8; t++) {
    c.bytes[t] = 64;
    c.rows[t] = kBlock;
  }
  asm volatile("" ::"r"(&c) : "memory");
  _tile_loadconfig(&c);
}
void close_tiles() { _tile_release(); }

// 16 or 32 rows by a pair of blocks: tiles 0-3 sums, 4-5 inputs, 6-7 weights. Out: float32 [row block][block][16][16].
template <bool kTwo>
inline void tile_gemm(const bf16* x, int64_t ldx, const bf16* w, int64_t in, float* out) {
  stored();
  _tile_zero(0);
  _tile_zero(1);
  if (kTwo) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t k = 0; k < in; k += 32) {
    const bf16* at = w + 2 * k * kBlock;
    for (int line = 0; line < 32; line++)
      _mm_prefetch(reinterpret_cast<const char*>(at) + 16384 + line * 64, _MM_HINT_T0);
    _tile_loadd(6, at, 128);
    _tile_loadd(7, at + 2 * kBlock, 128);
    _tile_loadd(4, x + k, ldx * 2);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (kTwo) {
      _tile_loadd(5, x + kBlock * ldx + k, ldx * 2);
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
  stored();
}
#else
constexpr bool kHasTiles = false;
void open_tiles() {}
void close_tiles() {}
template <bool kTwo>
inline void tile_gemm(const bf16*, int64_t, const bf16*, int64_t, float*) {}
#endif

// Packed weights are pairs of blocks of 16 outputs. The lines of a pair take turns, and all pairs lie one behind the
// other: memory is read fastest in one stream. A line has one input of each output of a block, of bf16 two.
constexpr int64_t kLine = 64;  // bytes

// What is fetched while weights are multiplied: with each of their steps so many bytes, up to two lines.
struct Fetch {
  const char* at;
  int64_t step;
  template <int R>
  void next() {  // with a row or two there is no time for it
    if (R <= 2) return;
    _mm_prefetch(at, _MM_HINT_T1);
    if (step > kLine) _mm_prefetch(at + kLine, _MM_HINT_T1);
    at += step;
  }
};

// How many rows share a weight: as many as there are sums in registers. Of more than kMostPairs a pair's blocks are read
// one after the other.
constexpr int kMostRows = kParts == 1 ? 12 : 6, kMostPairs = kParts == 1 ? 12 : 2;

constexpr int kPair = 2 * kBlock;  // outputs of a pair of blocks
constexpr int kMostQueries = 32;                 // of those that are computed together, sharing the keys packed
constexpr int kMostMixed = kParts == 1 ? 6 : 4;  // of those that share a value

// R rows by B blocks of a pair, each sum over `in` in order. Out: float32 [B][R][16].
template <int R, int B>
struct Sums {
  V of[B][R];
  Sums() {
    for (auto& block : of)
      for (V& sum : block) sum = splat(0);
  }
  // One more input of every row: row r's is x[r * ldx].
  __attribute__((always_inline)) void add(const V (&weights)[B], const float* x, int64_t ldx) {
    for (int r = 0; r < R; r++) {
      V input = splat(x[r * ldx]);
      for (int b = 0; b < B; b++) of[b][r] = fma(input, weights[b], of[b][r]);
    }
  }
  void store_to(float* out) const {
    for (int b = 0; b < B; b++)
      for (int r = 0; r < R; r++) store(out + (b * R + r) * kBlock, of[b][r]);
  }
};
template <int R, int B>
inline void gemm(const float* x, int64_t ldx, const float* w, int64_t in, Fetch fetch, float* out) {
  Sums<R, B> sums;
  for (int64_t k = 0; k < in; k++, w += 2 * kBlock) {
    V weights[B];
    fetch.next<R>();
    for (int b = 0; b < B; b++) weights[b] = load(w + b * kBlock);
    sums.add(weights, x + k, ldx);
  }
  sums.store_to(out);
}
template <int R, int B>
inline void gemm(const float* x, int64_t ldx, const bf16* w, int64_t in, Fetch fetch, float* out) {
  Sums<R, B> sums;
  for (int64_t k = 0; k < in; k += 2, w += 4 * kBlock) {
    V weights[B];
    fetch.next<R>();
    for (int b = 0; b < B; b++) weights[b] = lower(w + b * 2 * kBlock);
    sums.add(weights, x + k, ldx);
    for (int b = 0; b < B; b++) weights[b] = upper(w + b * 2 * kBlock);
    sums.add(weights, x + k + 1, ldx);
  }
  sums.store_to(out);
}

#if defined(__AVX512BF16__)
constexpr bool kHasDots = true;
// By dot products of two bf16 each.
template <int R, int B>
inline void gemm(const bf16* x, int64_t ldx, const bf16* w, int64_t in, Fetch fetch, float* out) {
  __m512 acc[B][R];
  for (auto& of_block : acc)
    for (__m512& a : of_block) a = _mm512_setzero_ps();
  for (int64_t k = 0; k < in; k += 2, w += 4 * kBlock) {
    __m512bh weights[B];
    fetch.next<R>();
    for (int b = 0; b < B; b++) weights[b] = (__m512bh)_mm512_loadu_si512(w + b * 2 * kBlock);
    for (int r = 0; r < R; r++) {
      int pair;
      std::memcpy(&pair, x + r * ldx + k, 4);
      for (int b = 0; b < B; b++)
        acc[b][r] = _mm512_dpbf16_ps(acc[b][r], (__m512bh)_mm512_set1_epi32(pair), weights[b]);
    }
  }
  for (int b = 0; b < B; b++)
    for (int r = 0; r < R; r++) _mm512_storeu_ps(out + (b * R + r) * kBlock, acc[b][r]);
}
#else
constexpr bool kHasDots = false;
template <int R, int B>
inline void gemm(const bf16*, int64_t, const bf16*, int64_t, Fetch, float*) {}
#endif

// A pair for R or fewer rows. Out: float32 [2][rows][16].
template <int R, typename X, typename W>
void multiply(const X* x, int64_t ldx, int64_t rows, const W* w, int64_t in, Fetch fetch, float* out) {
  if constexpr (R > 1)
    if (rows < R) return multiply<R - 1>(x, ldx, rows, w, in, fetch, out);
  if constexpr (R <= kMostPairs) {
    gemm<R, 2>(x, ldx, w, in, fetch, out);
  } else {
    fetch.step = (fetch.step + 1) / 2;  // with each block
    gemm<R, 1>(x, ldx, w, in, fetch, out);
    fetch.at += in * kBlock * int64_t(sizeof(W)) / kLine * fetch.step;
    gemm<R, 1>(x, ldx, w + kLine / sizeof(W), in, fetch, out + R * kBlock);
  }
}

// What enters projections: rows padded with zeros to up(width, 32), and up to a multiple of 32 of them, as tiles read
// them. bf16 for tiles and dots, else float32 (rounded to bf16 when the weights are, so that all ways compute the same
// products). For weights of 8 or 4 bits float32, of which `finish` makes groups, and a width of up(width, 64).
struct Inputs {
  std::vector<char> bytes;
  std::vector<Group> groups;
  int64_t ld;
  bool integers, tiles, halves, rounded;
  Inputs(int64_t rows, int64_t width, bool tiles_, bool bf16_weights, bool integers_)
      : ld(up(width, integers_ ? kSpan : 32)), integers(integers_), tiles(tiles_ && !integers),
        halves(!integers && bf16_weights && (tiles_ || kHasDots)), rounded(!integers && bf16_weights) {
    bytes.resize(size_t(up(rows, 32) * ld) * (halves ? 2 : 4));
    if (integers) groups.resize(size_t(rows * ld / kGroup));
  }
  // A row is there as a whole.
  void finish(int64_t row) {
    for (int64_t at = 0; integers && at < ld; at += kGroup)
      quantise(full(row) + at, groups[size_t((row * ld + at) / kGroup)]);
  }
  bf16* half(int64_t row) { return reinterpret_cast<bf16*>(bytes.data()) + row * ld; }
  float* full(int64_t row) { return reinterpret_cast<float*>(bytes.data()) + row * ld; }
  void set(int64_t row, int64_t at, const float* x, int64_t count) {
    if (halves)
      for (int64_t i = 0; i < count; i++) half(row)[at + i] = narrow(x[i]);
    else if (rounded)
      for (int64_t i = 0; i < count; i++) full(row)[at + i] = widen(narrow(x[i]));
    else
      std::copy(x, x + count, full(row) + at);
  }
  void clear(int64_t row, int64_t at, int64_t end) {
    if (halves) std::fill(half(row) + at, half(row) + end, 0);
    else std::fill(full(row) + at, full(row) + end, 0.0f);
  }
};

// Pairs of blocks from `pair` to `end`, for all rows: use(row, pair, 16 outputs, the next 16 or null). Weights serve so
// many rows at once, the others while they are near.
template <typename X, typename W, typename Use>
void multiply_pairs(const X* x, int64_t ldx, int64_t M, const Linear& w, int64_t pair, int64_t end, Use use) {
  int64_t in = up(w.in, 32), chunks = (M + kMostRows - 1) / kMostRows, bytes = 2 * in * kBlock * int64_t(sizeof(W));
  int64_t step = (2 * kLine + chunks - 1) / chunks;
  alignas(64) float out[2 * kMostRows * kBlock];
  for (; pair < end; pair++) {
    bool second = (2 * pair + 1) * kBlock < w.out;
    const W* weight = static_cast<const W*>(w.weight) + 2 * pair * in * kBlock;
    // While a pair is read several times the next one is fetched, a part with each time.
    int64_t ahead = M <= kMostPairs ? kAhead : pair + 1 < end ? bytes : 0;
    for (int64_t chunk = 0; chunk < chunks; chunk++) {
      int64_t m = M * chunk / chunks, rows = M * (chunk + 1) / chunks - m;
      Fetch fetch{reinterpret_cast<const char*>(weight) + ahead + bytes * chunk / chunks, step};
      multiply<kMostRows>(x + m * ldx, ldx, rows, weight, in, fetch, out);
      for (int64_t r = 0; r < rows; r++) {
        const float* row = out + r * kBlock;
        use(m + r, pair, row, second ? row + rows * kBlock : nullptr);
      }
    }
  }
}

// The same by tiles.
template <typename Use>
void tile_pairs(Inputs& x, int64_t M, const Linear& w, int64_t pair, int64_t end, Use use) {
  int64_t in = up(w.in, 32);
  alignas(64) float out[4 * 256];
  for (; pair < end; pair++) {
    bool second = (2 * pair + 1) * kBlock < w.out;
    const bf16* weight = static_cast<const bf16*>(w.weight) + 2 * pair * in * kBlock;
    for (int64_t m = 0; m < M; m += 32) {
      if (M - m > 16) tile_gemm<true>(x.half(m), x.ld, weight, in, out);
      else tile_gemm<false>(x.half(m), x.ld, weight, in, out);
      for (int64_t r = 0; r < std::min<int64_t>(32, M - m); r++) {
        const float* row = out + (r / 16) * 512 + (r % 16) * 16;
        use(m + r, pair, row, second ? row + 256 : nullptr);
      }
    }
  }
}

// The same by whole numbers.
template <typename W, typename Use>
void integer_pairs(const Inputs& x, int64_t M, const Linear& w, int64_t pair, int64_t end, Use use) {
  int64_t pieces = up(w.in, kSpan) / kSpan, ld = x.ld / kGroup, chunks = (M + kMostIntegerRows - 1) / kMostIntegerRows;
  alignas(64) float out[2 * kMostIntegerRows * kBlock];
  for (; pair < end; pair++) {
    bool second = (2 * pair + 1) * kBlock < w.out;
    const W* weight = static_cast<const W*>(w.weight) + pair * pieces;
    for (int64_t chunk = 0; chunk < chunks; chunk++) {
      int64_t m = M * chunk / chunks, rows = M * (chunk + 1) / chunks - m;
      multiply<kMostIntegerRows>(x.groups.data() + m * ld, ld, rows, weight, pieces, out);
      for (int64_t r = 0; r < rows; r++) {
        const float* row = out + r * kBlock;
        use(m + r, pair, row, second ? row + rows * kBlock : nullptr);
      }
    }
  }
}

// The same by what there is for these inputs and weights.
template <typename Use>
void some_pairs(Inputs& x, int64_t M, const Linear& w, bool bf16_weights, int64_t first, int64_t end, Use use) {
  if (w.bits == 8) integer_pairs<Eights>(x, M, w, first, end, use);
  else if (w.bits == 4) integer_pairs<Fours>(x, M, w, first, end, use);
  else if (x.tiles) tile_pairs(x, M, w, first, end, use);
  else if (x.halves) multiply_pairs<bf16, bf16>(x.half(0), x.ld, M, w, first, end, use);
  else if (bf16_weights) multiply_pairs<float, bf16>(x.full(0), x.ld, M, w, first, end, use);
  else multiply_pairs<float, float>(x.full(0), x.ld, M, w, first, end, use);
}

// This thread's share of a projection, by pairs of blocks.
template <typename Use>
void share_pairs(Inputs& x, int64_t M, const Linear& w, bool bf16_weights, Use use) {
  int64_t pairs = (w.out + kPair - 1) / kPair, T = omp_get_num_threads(), t = omp_get_thread_num();
  some_pairs(x, M, w, bf16_weights, pairs * t / T, pairs * (t + 1) / T, use);
}

// This thread's share of a projection: done(row, first column, values, count).
template <typename Done>
void project(Inputs& x, int64_t M, const Linear& w, bool bf16_weights, Done done) {
  share_pairs(x, M, w, bf16_weights, [&](int64_t row, int64_t pair, const float* a, const float* b) {
    for (int half = 0; half < (b ? 2 : 1); half++) {
      int64_t column = (2 * pair + half) * kBlock, count = std::min<int64_t>(kBlock, w.out - column);
      alignas(64) float value[kBlock];
      store(value, load(half ? b : a));
      if (w.bias)
        for (int64_t j = 0; j < count; j++) value[j] += w.bias[column + j];
      done(row, column, value, count);
    }
  });
}

void rms_norm(const float* x, const float* weight, int64_t width, float eps, float* out) {
  V acc = splat(0);
  int64_t i = 0;
  for (; i + kBlock <= width; i += kBlock) acc = fma(load(x + i), load(x + i), acc);
  if (i < width) {
    alignas(64) float tail[kBlock] = {};
    std::copy(x + i, x + width, tail);
    acc = fma(load(tail), load(tail), acc);
  }
  float scale = 1.0f / std::sqrt(sum(acc) / float(width) + eps);
  for (i = 0; i < width; i++) out[i] = x[i] * scale * weight[i];
}

// ------------------------------------------------------------ the pass

// What one thread needs; made before the parallel region, where nothing may throw.
template <typename T>
struct Scratch {
  std::vector<float> row, scores, mixed;
  std::vector<T> last_keys, packed_keys;  // [32, E], and a pair of blocks
  Inputs queries;
  Scratch(int64_t width, int64_t E, int64_t keys_seen, bool tiles)
      : row(size_t(width)), scores(size_t(kMostQueries * (keys_seen + 2 * kPair))), mixed(size_t(kMostMixed * E)),
        last_keys(size_t(kPair * E)), packed_keys(size_t(kPair * up(E, 32))),
        queries(kMostQueries, E, tiles, sizeof(T) == 2, false) {}
};

// Keys as weights are packed: the 32-bit words of 32 of them, [32, words], as [words][32].
inline void pack_keys(const char* keys, int64_t words, char* out) {
  for (int64_t key = 0; key < kPair; key += 8) {
    int64_t w = 0;
    for (; w + 8 <= words; w += 8)
      turn_words(keys + (key * words + w) * 4, words * 4, out + (w * kPair + key) * 4, kPair * 4);
    for (; w < words; w++)
      for (int64_t k = key; k < key + 8; k++) std::memcpy(out + (w * kPair + k) * 4, keys + (k * words + w) * 4, 4);
  }
}

// Sums over positions, in order, of weight times value, for Q queries and C * 16 columns from `e` on; and of the weights,
// once for all columns. Of query i the weights begin at i * ld.
template <typename T, int Q, int C>
inline void mix(const T* value, int64_t count, const float* weight, int64_t ld, int64_t E, int64_t e, V (&acc)[Q][C],
                float (&total)[Q]) {
  for (int64_t s = 0; s < count; s++) {
    V v[C];
    for (int c = 0; c < C; c++) v[c] = load(value + s * E + e + c * kBlock);
    for (int i = 0; i < Q; i++) {
      for (int c = 0; c < C; c++) acc[i][c] = fma(splat(weight[i * ld + s]), v[c], acc[i][c]);
      if (e == 0) total[i] += weight[i * ld + s];
    }
  }
}

// Where the threads of a pass wait for each other. OpenMP's own barrier spins for milliseconds, and where others are on
// the machine, it spins on the core that the late thread needs.
class Meeting {
 public:
  void open(int threads) {
    all = threads;
    missing.store(threads);
  }
  void wait() {
    int now = round.load(std::memory_order_relaxed);
    if (missing.fetch_sub(1, std::memory_order_acq_rel) == 1) {
      missing.store(all, std::memory_order_relaxed);
      round.store(now + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; round.load(std::memory_order_acquire) == now; spins++) {
      if (spins < 2000) _mm_pause();
      else sched_yield();
    }
  }

 private:
  alignas(64) std::atomic<int> missing{0};
  alignas(64) std::atomic<int> round{0};
  alignas(64) int all = 0;
};

template <typename T>
struct Runner {
  const Model& m;
  const Pass& p;
  int64_t M, D, H, G, E, group;
  bool tiles, draft;
  const T *entering, *embeds;  // [B * N, D]
  std::vector<int64_t> first, place;  // of a row its first token; of a token its place among B * N
  std::vector<float> residual, qkv, cos, sin;  // cos, sin: [M, E / 2]
  Inputs x, attended, inner;
  std::vector<Scratch<T>> scratch;
  Meeting meeting;

  Runner(const Model& model, const Pass& pass)
      : m(model), p(pass), M(std::accumulate(pass.counts, pass.counts + pass.rows, int64_t(0))), D(model.width),
        H(model.heads), G(model.kv_heads), E(model.head_dim), group(H / G), tiles(tiles_granted && model.tiles && model.bf16_weights),
        draft(model.layers[0].feature_norm != nullptr), entering(static_cast<const T*>(p.residual)),
        embeds(static_cast<const T*>(p.embeds)), residual(size_t(M * D)),
        qkv(size_t(M * (H + 2 * G) * E)), cos(size_t(M * E / 2)), sin(size_t(M * E / 2)),
        x(inputs(draft ? 2 * D : D)), attended(inputs(H * E)), inner(inputs(model.inner)) {
    int64_t past = 0;
    for (int b = 0; b < p.rows; b++) {
      past = std::max<int64_t>(past, p.past_lengths[b]);
      first.push_back(int64_t(place.size()));
      for (int64_t n = 0; n < p.counts[b]; n++) place.push_back(int64_t(b) * p.tokens + n);
    }
    for (int t = 0; t < p.threads; t++) scratch.emplace_back(std::max(D, E), E, past + p.own, tiles);
  }

  Inputs inputs(int64_t width) const { return {M, width, tiles, m.bf16_weights != 0, m.layers[0].qkv.bits != 0}; }

  Scratch<T>& mine() { return scratch[size_t(omp_get_thread_num())]; }

  T* own(void* base, int64_t layer, int64_t b, int64_t g) const {
    return static_cast<T*>(base) + ((layer * p.rows + b) * G + g) * p.own * E;
  }

  void norm_into_x(const float* source, const float* weight, int64_t token, int64_t at) {
    float* row = mine().row.data();
    rms_norm(source, weight, D, m.eps, row);
    x.set(token, at, row, D);
  }

  float* state(int64_t token) { return residual.data() + token * D; }

  void enter() {
#pragma omp for schedule(static) nowait
    for (int64_t token = 0; token < M; token++) get_many(entering + place[size_t(token)] * D, state(token), D);
  }

  // What attention reads: the residual, normed; in a draft layer the embedding and the feature side by side.
  void attention_input(const Layer& l) {
#pragma omp for schedule(static) nowait
    for (int64_t token = 0; token < M; token++) {
      if (draft) {
        norm_into_x(state(token), l.feature_norm, token, D);
        float* row = mine().row.data();
        if (m.normed_residual) std::copy(row, row + D, state(token));
        get_many(embeds + place[size_t(token)] * D, row, D);
        norm_into_x(row, l.input_norm, token, 0);
      } else {
        norm_into_x(state(token), l.input_norm, token, 0);
      }
      x.finish(token);
    }
  }

  // Rows that several threads wrote; they wait for each other before.
  void finish(Inputs& rows) {
    if (!rows.integers) return;
#pragma omp for schedule(static) nowait
    for (int64_t token = 0; token < M; token++) rows.finish(token);
    meeting.wait();
  }

  void mlp_input(const Layer& l) {
#pragma omp for schedule(static) nowait
    for (int64_t token = 0; token < M; token++) {
      norm_into_x(state(token), l.post_norm, token, 0);
      if (draft) x.clear(token, D, up(D, 32));  // of the feature that stood there
      x.finish(token);
    }
  }

  // Head norm and rotation of one head of one token, in place (halves convention of Transformers).
  void turn(float* head, const float* weight, int64_t token) {
    if (weight) {
      float* row = mine().row.data();
      rms_norm(head, weight, E, m.eps, row);
      std::copy(row, row + E, head);
    }
    int64_t half = E / 2;
    const float *c = cos.data() + token * half, *s = sin.data() + token * half;
    for (int64_t i = 0; i < half; i++) {
      float a = head[i], b = head[i + half];
      head[i] = a * c[i] - b * s[i];
      head[i + half] = b * c[i] + a * s[i];
    }
  }

  void angles() {
    int64_t half = E / 2;
#pragma omp for schedule(static) nowait
    for (int64_t token = 0; token < M; token++)
      for (int64_t i = 0; i < half; i++) {
        float angle = float(p.positions[place[size_t(token)]]) * m.frequencies[i];
        cos[size_t(token * half + i)] = std::cos(angle) * m.rotary_scale;
        sin[size_t(token * half + i)] = std::sin(angle) * m.rotary_scale;
      }
  }

  void rotate(int64_t layer) {
    const Layer& l = m.layers[layer];
#pragma omp for schedule(static) nowait
    for (int64_t token = 0; token < M; token++) {
      float* row = qkv.data() + token * (H + 2 * G) * E;
      int64_t b = place[size_t(token)] / p.tokens, at = p.own - p.tokens + place[size_t(token)] % p.tokens;
      for (int64_t h = 0; h < H; h++) turn(row + h * E, l.q_norm, token);
      for (int64_t g = 0; g < G; g++) {
        turn(row + (H + g) * E, l.k_norm, token);
        put_many(own(p.own_keys, layer, b, g) + at * E, row + (H + g) * E, E);
        put_many(own(p.own_values, layer, b, g) + at * E, row + (H + G + g) * E, E);
      }
    }
  }

  // Scores of this thread's queries against `count` keys, of query i at out + i * ld; behind them, to the end of the last
  // pair of blocks, what nobody sees.
  void score(const T* keys, int64_t count, int64_t queries, Scratch<T>& s, int64_t ld, float* out) const {
    const Linear packed{s.packed_keys.data(), nullptr, int32_t(E), kPair, 0};
    for (int64_t at = 0; at < count; at += kPair) {
      int64_t here = std::min<int64_t>(kPair, count - at);
      const T* from = keys + at * E;
      if (here < kPair) {
        std::fill(std::copy_n(from, here * E, s.last_keys.begin()), s.last_keys.end(), T(0));
        from = s.last_keys.data();
      }
      pack_keys(reinterpret_cast<const char*>(from), E * int64_t(sizeof(T)) / 4,
                reinterpret_cast<char*>(s.packed_keys.data()));
      some_pairs(s.queries, queries, packed, sizeof(T) == 2, 0, 1,
                     [&](int64_t i, int64_t, const float* a, const float* b) {
                       store(out + i * ld + at, load(a));
                       store(out + i * ld + at + kBlock, load(b));
                     });
    }
    for (int64_t i = 0; i < queries; i++)
      std::fill(out + i * ld + count, out + i * ld + up(count, kPair), -std::numeric_limits<float>::infinity());
  }

  // Some queries of one row and kv head. A query that sees nothing at all gets zeros.
  void attend(int64_t layer, int64_t b, int64_t g, int64_t from, int64_t queries) {
    Scratch<T>& s = mine();
    int64_t past = p.past_lengths[b], last_token = (from + queries - 1) / group;
    int64_t seen = p.own - p.tokens + (p.mask ? p.counts[b] : last_token + 1);
    int64_t own_at = up(past, kPair), ld = own_at + up(seen, kPair);
    int64_t at = layer * p.past_layer_stride + p.past_offsets[b] + g * p.past_head_stride;
    const T *past_v = static_cast<const T*>(p.past_values) + at, *own_v = own(p.own_values, layer, b, g);
    float *scores = s.scores.data(), scale = 1.0f / std::sqrt(float(E));
    for (int64_t i = 0; i < queries; i++) {
      int64_t token = first[size_t(b)] + (from + i) / group, h = g * group + (from + i) % group;
      const float* head = qkv.data() + (token * (H + 2 * G) + h) * E;
      float* row = s.row.data();
      for (int64_t e = 0; e < E; e++) row[e] = head[e] * scale;
      s.queries.set(i, 0, row, E);
    }
    score(static_cast<const T*>(p.past_keys) + at, past, queries, s, ld, scores);
    score(own(p.own_keys, layer, b, g), seen, queries, s, ld, scores + own_at);
    for (int64_t i = 0; i < queries; i++) {
      int64_t n = (from + i) / group;
      float *row = scores + i * ld, *own_row = row + own_at;
      for (int64_t o = 0; o < seen; o++) {
        bool sees = p.mask ? p.mask[b * p.mask_row_stride + n * p.own + o] : o <= p.own - p.tokens + n;
        if (!sees) own_row[o] = -std::numeric_limits<float>::infinity();
      }
      V top = splat(-3e38f);
      for (int64_t k = 0; k < ld; k += kBlock) top = most(top, load(row + k));
      top = splat(largest(top));
      for (int64_t k = 0; k < ld; k += kBlock) store(row + k, exp(load(row + k) - top));
    }
    for (int64_t chunks = (queries + kMostMixed - 1) / kMostMixed, chunk = 0; chunk < chunks; chunk++) {
      int64_t i = queries * chunk / chunks, count = queries * (chunk + 1) / chunks - i;
      const float* weight = scores + i * ld;
      float* mixed = s.mixed.data();
      mix_values<kMostMixed>(past_v, past, own_v, seen, weight, own_at, ld, count, mixed);
      for (int64_t q = 0; q < count; q++, mixed += E) {
        int64_t token = first[size_t(b)] + (from + i + q) / group, h = g * group + (from + i + q) % group;
        attended.set(token, h * E, mixed, E);
      }
    }
  }

  // Of Q or fewer queries the means of the values by weights, out [queries, E].
  template <int Q>
  void mix_values(const T* past_v, int64_t past, const T* own_v, int64_t seen, const float* weight, int64_t own_at,
                  int64_t ld, int64_t queries, float* out) const {
    if constexpr (Q > 1)
      if (queries < Q) return mix_values<Q - 1>(past_v, past, own_v, seen, weight, own_at, ld, queries, out);
    float total[Q] = {};
    int64_t e = 0;
    for (; e + kColumns * kBlock <= E; e += kColumns * kBlock)
      mix_columns<Q, kColumns>(past_v, past, own_v, seen, weight, own_at, ld, e, total, out);
    for (; e + kBlock <= E; e += kBlock) mix_columns<Q, 1>(past_v, past, own_v, seen, weight, own_at, ld, e, total, out);
    for (; e < E; e++)
      for (int i = 0; i < Q; i++) {
        float& mixed = out[i * E + e] = 0;
        auto add = [&](const T* value, int64_t count, const float* of) {
          for (int64_t k = 0; k < count; k++) {
            mixed = std::fma(of[k], get(value[k * E + e]), mixed);
            if (e == 0) total[i] += of[k];
          }
        };
        add(past_v, past, weight + i * ld);
        add(own_v, seen, weight + i * ld + own_at);
      }
    for (int i = 0; i < Q; i++) {
      float scale = total[i] == 0 ? 0.0f : 1.0f / total[i];  // 0: it sees nothing
      for (e = 0; e < E; e++) out[i * E + e] *= scale;
    }
  }

  template <int Q, int C>
  void mix_columns(const T* past_v, int64_t past, const T* own_v, int64_t seen, const float* weight, int64_t own_at,
                   int64_t ld, int64_t e, float (&total)[Q], float* out) const {
    V acc[Q][C];
    for (auto& of_query : acc)
      for (V& a : of_query) a = splat(0);
    mix<T, Q, C>(past_v, past, weight, ld, E, e, acc, total);
    mix<T, Q, C>(own_v, seen, weight + own_at, ld, E, e, acc, total);
    for (int i = 0; i < Q; i++)
      for (int c = 0; c < C; c++) store(out + i * E + e + c * kBlock, acc[i][c]);
  }

  void attention(int64_t layer) {
    int64_t queries = p.tokens * group, size = kMostQueries;
    while (size > 1 && p.rows * G * ((queries + size - 1) / size) < p.threads) size /= 2;
    int64_t chunks = (queries + size - 1) / size;
#pragma omp for schedule(dynamic, 1) nowait
    for (int64_t item = 0; item < p.rows * G * chunks; item++) {
      int64_t b = item / (G * chunks), g = item / chunks % G, from = item % chunks * size;
      int64_t left = p.counts[b] * group - from;
      if (left > 0) attend(layer, b, g, from, std::min(size, left));
    }
  }

  // Blocks of gate and up alternate, so that a pair makes 16 inputs of the next projection.
  void gated(const Linear& w) {
    share_pairs(x, M, w, m.bf16_weights, [&](int64_t row, int64_t pair, const float* gate, const float* rise) {
      V a = load(gate), b = load(rise);
      if (w.bias) {
        a = a + load(w.bias + pair * 2 * kBlock);
        b = b + load(w.bias + pair * 2 * kBlock + kBlock);
      }
      alignas(64) float value[kBlock];
      store(value, a / (splat(1.0f) + exp(splat(0) - a)) * b);
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
#pragma omp for schedule(static) nowait
        for (int64_t token = 0; token < M; token++)
          put_many(static_cast<T*>(p.aux) + (place[size_t(token)] * p.num_captured + c) * D, state(token), D);
      }
  }

  void run() {
    unsigned control = _mm_getcsr();  // how denormals are treated: alike in every thread
#pragma omp parallel num_threads(p.threads)
    {
      _mm_setcsr(control);
      if (tiles) open_tiles();
#pragma omp single
      meeting.open(omp_get_num_threads());
      angles();
      enter();
      for (int64_t layer = 0; layer < m.num_layers; layer++) {
        const Layer& l = m.layers[layer];
        attention_input(l);
        meeting.wait();
        project(x, M, l.qkv, m.bf16_weights, [&](int64_t row, int64_t column, const float* value, int64_t count) {
          std::copy(value, value + count, qkv.data() + row * (H + 2 * G) * E + column);
        });
        meeting.wait();
        rotate(layer);
        meeting.wait();
        attention(layer);
        meeting.wait();
        finish(attended);
        add_to_residual(attended, l.o);
        meeting.wait();
        mlp_input(l);
        meeting.wait();
        gated(l.gate_up);
        meeting.wait();
        finish(inner);
        add_to_residual(inner, l.down);
        meeting.wait();
        capture(layer);
      }
#pragma omp for schedule(static) nowait
      for (int64_t token = 0; token < M; token++) {
        float *row = state(token), *normed = mine().row.data();
        put_many(static_cast<T*>(p.feature) + place[size_t(token)] * D, row, D);
        rms_norm(row, m.final_norm, D, m.eps, normed);
        put_many(static_cast<T*>(p.last) + place[size_t(token)] * D, normed, D);
      }
      if (tiles) close_tiles();
    }
  }
};

template <typename T>
Inputs inputs_of(const T* x, int64_t M, const Linear& w, bool bf16_weights, bool tiles) {
  int64_t width = w.in;
  Inputs in(M, width, tiles, bf16_weights, w.bits != 0);
  for (int64_t row = 0; row < M; row++) {
    if (in.halves) std::memcpy(in.half(row), x + row * width, size_t(width) * sizeof(T));
    else
      for (int64_t i = 0; i < width; i++) in.full(row)[i] = get(x[row * width + i]);
    in.finish(row);
  }
  return in;
}

// The largest of a row's outputs, descending, of equals the first; and the sum of e^output over all of them, as that of
// e^(output - highest). An output of NaN or +infinity makes the sum NaN.
struct Best {
  float highest = -std::numeric_limits<float>::infinity(), total = 0;
  std::vector<float> values;
  std::vector<int64_t> ids;

  explicit Best(int count) : values(size_t(count), highest), ids(size_t(count), 0) {}

  void meet(float value, int64_t id) {  // in ascending order of ids
    size_t at = values.size() - 1;
    if (!(value > values[at])) return;
    for (; at > 0 && value > values[at - 1]; at--) values[at] = values[at - 1], ids[at] = ids[at - 1];
    values[at] = value, ids[at] = id;
  }
  void add(const float* value, int64_t count) {
    alignas(64) float x[kBlock];
    std::fill(std::copy(value, value + count, x), x + kBlock, -std::numeric_limits<float>::infinity());
    float top = -std::numeric_limits<float>::infinity();
    for (float v : x) {
      top = std::max(top, v);
      if (!(v < std::numeric_limits<float>::infinity())) total = std::numeric_limits<float>::quiet_NaN();
    }
    if (top > highest || std::isfinite(highest)) add(top, sum(exp(load(x) - splat(top))));
  }
  void add(float other_highest, float other_total) {
    float top = std::max(highest, other_highest);
    auto scaled = [&](float at, float t) { return at == top ? t : t * std::exp(at - top); };
    total = scaled(highest, total) + scaled(other_highest, other_total);
    highest = top;
  }
  float log_total() const { return highest + std::log(total); }
};

// What is done to a row's outputs before the largest are looked for; without noise nothing.
struct Tilt {
  const float* noise = nullptr;
  float factor = 1;
};

// Into out, or the `top` largest of each row into ids and, unless null, the logarithms of their shares of the e^output.
template <typename T>
void linear(const Linear& w, const T* x, int64_t M, bool bf16_weights, bool tiles, float* out, int64_t* ids,
            float* log_shares, int top, int threads, const Tilt* tilts = nullptr) {
  Inputs in = inputs_of(x, M, w, bf16_weights, tiles);
  std::vector<Best> found(ids ? size_t(M * threads) : 0, Best(top));
  unsigned control = _mm_getcsr();
#pragma omp parallel num_threads(threads)
  {
    _mm_setcsr(control);
    if (tiles) open_tiles();
    Best* mine = found.data() + omp_get_thread_num() * M;
    project(in, M, w, bf16_weights, [&](int64_t row, int64_t column, const float* value, int64_t count) {
      if (!ids) {
        std::copy(value, value + count, out + row * w.out + column);
        return;
      }
      alignas(64) float tilted[kBlock];
      if (tilts && tilts[row].noise) {
        for (int64_t j = 0; j < count; j++) tilted[j] = tilts[row].factor * value[j] + tilts[row].noise[column + j];
        value = tilted;
      }
      for (int64_t j = 0; j < count; j++) mine[row].meet(value[j], column + j);
      if (log_shares) mine[row].add(value, count);
    });
    if (tiles) close_tiles();
  }
  for (int64_t row = 0; ids && row < M; row++) {
    Best all(top);
    for (int t = 0; t < threads; t++) {
      const Best& part = found[size_t(t * M + row)];
      for (int i = 0; i < top; i++) all.meet(part.values[size_t(i)], part.ids[size_t(i)]);
      all.add(part.highest, part.total);
    }
    for (int i = 0; i < top; i++) {
      ids[row * top + i] = all.ids[size_t(i)];
      if (log_shares) log_shares[row * top + i] = all.values[size_t(i)] - all.log_total();
    }
  }
}

// ------------------------------------------------------------ trees

// Growth and re-ranking of EAGLE-2, as TreeBuilder (tree.py) does them, which says what is what. A node with a score of
// -infinity, which that one drops in the end, is not made here.
template <typename T>
class Grower {
 public:
  Grower(const Model& model, const Pass& pass, const Growth& growth)
      : m(model), cache(pass), g(growth), B(pass.rows), D(model.width),
        K(*std::max_element(growth.top_k, growth.top_k + pass.rows)), rows(size_t(pass.rows)),
        lengths(pass.past_lengths, pass.past_lengths + pass.rows) {
    cache.past_lengths = lengths.data();
  }

  void run() {
    int64_t deepest = *std::max_element(g.depth, g.depth + B);
    double began = omp_get_wtime();
    read_real_rows();
    for (Row& row : rows) row.ran.assign(1, -1), row.sees.assign(1, {});
    expand(1);
    for (depth = 1, width = 1; depth < deepest; depth++, width = K) {
      bool any = false;
      for (int64_t b = 0; b < B; b++) any |= choose(b, g.worth + b * (1 + deepest));
      began = lap(depth - 1, began);
      if (!any) break;
      run_level();
      expand(K);
    }
    for (int64_t b = 0; b < B; b++) rerank(b);
    if (depth == deepest) lap(depth - 1, began);
  }

 private:
  struct Node {
    int64_t token, parent, depth;
    size_t place;  // of its parent among the nodes run with that one
    float score;
  };
  struct Row {
    std::vector<Node> nodes;                 // in order of creation
    size_t latest = 0;                       // the first one of the last level made
    std::vector<int64_t> ran;                // the nodes run last
    std::vector<std::vector<uint8_t>> sees;  // of each of them: which of all nodes run it may attend to
  };

  // One causal pass over the rows that the target has made since; they go into the cache.
  void read_real_rows() {
    int64_t N = *std::max_element(g.counts, g.counts + B), M = std::accumulate(g.counts, g.counts + B, int64_t(0));
    int64_t G = m.kv_heads, E = m.head_dim;
    std::vector<float> fused(size_t(M * D));
    linear(*g.fc, static_cast<const T*>(g.aux), M, m.bf16_weights, tiles(), fused.data(), nullptr, nullptr, 0,
           cache.threads);
    std::vector<T> residual(size_t(B * N * D)), embeds(residual.size()), next(residual.size());
    std::vector<int64_t> positions(static_cast<size_t>(B * N));
    for (int64_t b = 0, i = 0; b < B; b++)
      for (int64_t n = 0; n < g.counts[b]; n++, i++) {
        size_t place = size_t(b * N + n);
        put_many(&residual[place * size_t(D)], &fused[size_t(i * D)], D);
        embed(g.ids[i], &embeds[place * size_t(D)]);
        positions[place] = lengths[size_t(b)] + n;
      }
    keys.resize(size_t(B * N * m.num_layers * G * E)), values.resize(keys.size()), last.resize(residual.size());
    run_pass(residual, embeds, positions, nullptr, g.counts, N, N, next);
    for (int64_t i = 0; i < m.num_layers * B * G; i++) {
      int64_t layer = i / (B * G), b = i / G % B;
      int64_t at = layer * cache.past_layer_stride + cache.past_offsets[b] + i % G * cache.past_head_stride;
      at += int64_t(lengths[size_t(b)]) * E;
      std::copy_n(&keys[size_t(i * N * E)], g.counts[b] * E, static_cast<T*>(const_cast<void*>(cache.past_keys)) + at);
      std::copy_n(&values[size_t(i * N * E)], g.counts[b] * E,
                  static_cast<T*>(const_cast<void*>(cache.past_values)) + at);
    }
    std::vector<T> hidden;
    for (int64_t b = 0; b < B; b++) {
      int64_t at = (b * N + g.counts[b] - 1) * D;
      const std::vector<T>& out = g.norm_output ? last : next;
      feature.insert(feature.end(), out.begin() + at, out.begin() + at + D);
      hidden.insert(hidden.end(), last.begin() + at, last.begin() + at + D);
      lengths[size_t(b)] += g.counts[b];
    }
    last.swap(hidden);
    keys.clear(), values.clear();
  }

  // One pass, over `counts` of N tokens of each row; what the mask speaks of is `own`, whose keys and values end in theirs.
  void run_pass(const std::vector<T>& residual, const std::vector<T>& embeds, const std::vector<int64_t>& positions,
                const uint8_t* mask, const int32_t* counts, int64_t N, int64_t own, std::vector<T>& next) {
    Pass p = cache;
    p.residual = residual.data(), p.embeds = embeds.data(), p.positions = positions.data();
    p.mask = mask, p.mask_row_stride = N * own;
    p.own_keys = keys.data(), p.own_values = values.data();
    p.counts = counts, p.tokens = int32_t(N), p.own = int32_t(own);
    p.feature = next.data(), p.last = last.data();
    Runner<T>(m, p).run();
  }

  bool tiles() const { return m.bf16_weights && m.tiles && tiles_granted; }
  void embed(int64_t token, T* to) const { std::copy_n(static_cast<const T*>(g.embedding) + token * D, D, to); }

  // Children of the nodes run last, for which a row has so many `places`.
  void expand(int64_t places) {
    std::vector<T> states;
    for (int64_t b = 0; b < B; b++) {
      auto from = last.begin() + b * places * D;
      states.insert(states.end(), from, from + int64_t(rows[size_t(b)].ran.size()) * D);
    }
    int64_t ran = int64_t(states.size()) / D, number = 0;
    std::vector<int64_t> ids(size_t(ran * K));
    std::vector<float> steps(ids.size());
    std::vector<Tilt> tilts = foresee();
    linear(*g.head, states.data(), ran, m.bf16_weights, tiles(), nullptr, ids.data(), steps.data(), int(K),
           cache.threads, tilts.data());
    for (int64_t b = 0; b < B; b++) {
      Row& row = rows[size_t(b)];
      row.latest = row.nodes.size();
      for (size_t place = 0; place < row.ran.size(); place++, number++)
        for (int64_t child = 0; child < g.top_k[b]; child++) {
          size_t at = size_t(number * K + child);
          int64_t parent = row.ran[place];
          float score = (parent < 0 ? 0.0f : row.nodes[size_t(parent)].score) + std::min(steps[at], 0.0f);
          if (score > -std::numeric_limits<float>::infinity())
            row.nodes.push_back({g.target_ids[ids[at]], parent, depth + 1, place, score});
        }
    }
  }

  // For each node run last the noise of its row at the position where its children stand.
  std::vector<Tilt> foresee() {
    int64_t W = g.head->out;
    bool sampled = std::any_of(g.temperature, g.temperature + B, [](float t) { return t > 0; });
    noise.resize(sampled ? size_t(B * W) : 0);
    std::vector<Tilt> tilts;
    for (int64_t b = 0; b < B; b++) {
      Tilt tilt;
      if (g.temperature[b] > 0 && !rows[size_t(b)].ran.empty()) {
        float* to = noise.data() + b * W;
        uint64_t key = count(g.keys[b], lengths[size_t(b)] + depth + 1);
#pragma omp parallel for num_threads(cache.threads) schedule(static)
        for (int64_t at = 0; at < W; at += kBlock)
          noise_of(key, g.target_ids + at, std::min<int64_t>(kBlock, W - at), g.temperature[b], to + at);
        tilt = {to, g.sharpness[b]};
      }
      tilts.insert(tilts.end(), rows[size_t(b)].ran.size(), tilt);
    }
    return tilts;
  }

  std::vector<int64_t> best(const Row& row, size_t from, int32_t count) const {
    std::vector<int64_t> order;
    for (size_t i = from; i < row.nodes.size(); i++) order.push_back(int64_t(i));
    std::stable_sort(order.begin(), order.end(), [&](int64_t i, int64_t j) {
      return row.nodes[size_t(i)].score > row.nodes[size_t(j)].score;
    });
    order.resize(std::min(order.size(), size_t(count)));
    return order;
  }

  double lap(int64_t level, double began) {
    double now = omp_get_wtime();
    g.seconds[level] = float(now - began);
    return now;
  }

  // The nodes to run next, if they are worth it; whether there are any.
  bool choose(int64_t b, const float* worth) {
    Row& row = rows[size_t(b)];
    std::vector<int64_t> chosen;
    if (depth < g.depth[b] && !row.ran.empty()) chosen = best(row, row.latest, g.top_k[b]);
    auto chance = [&](int64_t node) { return std::exp(row.nodes[size_t(node)].score); };
    while (!chosen.empty() && chance(chosen.back()) < worth[0]) chosen.pop_back();
    float likely = 0;
    for (int64_t node : chosen) likely += chance(node);
    row.ran.clear();
    if (likely >= worth[depth]) row.ran = chosen;
    std::vector<std::vector<uint8_t>> sees;
    for (size_t i = 0; i < row.ran.size(); i++) {
      sees.push_back(row.sees[row.nodes[size_t(row.ran[i])].place]);
      sees.back().resize(size_t(depth * K), 0);
      sees.back()[size_t((depth - 1) * K) + i] = 1;
    }
    row.sees = std::move(sees);
    return !row.ran.empty();
  }

  // One pass over the nodes chosen; behind fewer than K of a row there are places that are not computed.
  void run_level() {
    int64_t own = depth * K, M = B * K, per_token = m.num_layers * m.kv_heads * m.head_dim;
    std::vector<T> residual(size_t(M * D)), embeds(size_t(M * D)), next(size_t(M * D));
    std::vector<T> new_keys(size_t(B * own * per_token)), new_values(new_keys.size());
    std::vector<int64_t> positions(static_cast<size_t>(M));
    std::vector<uint8_t> mask(size_t(M * own), 0);
    std::vector<int32_t> counts;
    for (int64_t b = 0; b < B; b++) {
      const Row& row = rows[size_t(b)];
      counts.push_back(int32_t(row.ran.size()));
      for (size_t i = 0; i < row.ran.size(); i++) {
        int64_t token = b * K + int64_t(i);
        positions[size_t(token)] = lengths[size_t(b)] - 1 + depth;
        const Node& node = row.nodes[size_t(row.ran[i])];
        std::copy(row.sees[i].begin(), row.sees[i].end(), mask.begin() + token * own);
        std::copy_n(&feature[size_t((b * width + int64_t(node.place)) * D)], D, &residual[size_t(token * D)]);
        embed(node.token, &embeds[size_t(token * D)]);
      }
    }
    int64_t earlier = (own - K) * m.head_dim, all = own * m.head_dim;
    for (int64_t i = 0; earlier && i < m.num_layers * B * m.kv_heads; i++) {
      std::copy_n(&keys[size_t(i * earlier)], earlier, &new_keys[size_t(i * all)]);
      std::copy_n(&values[size_t(i * earlier)], earlier, &new_values[size_t(i * all)]);
    }
    keys.swap(new_keys), values.swap(new_values);
    last.resize(size_t(M * D));
    run_pass(residual, embeds, positions, mask.data(), counts.data(), K, own, next);
    feature = g.norm_output ? last : std::move(next);
  }

  void rerank(int64_t b) const {
    const Row& row = rows[size_t(b)];
    std::vector<int64_t> order = best(row, 0, g.nodes[b]), place(row.nodes.size());
    g.made[b] = int32_t(order.size());
    for (size_t i = 0; i < order.size(); i++) {
      const Node& node = row.nodes[size_t(order[i])];
      size_t at = size_t(b) * size_t(g.room) + i;
      place[size_t(order[i])] = int64_t(i);
      g.tokens[at] = node.token, g.depths[at] = node.depth, g.scores[at] = node.score;
      g.parents[at] = node.parent < 0 ? -1 : place[size_t(node.parent)];
    }
  }

  const Model& m;
  Pass cache;  // and threads; nothing else of it is read
  const Growth& g;
  const int64_t B, D, K;
  int64_t depth = 0, width = 1;  // of the nodes run last; of what `feature` holds of a row
  std::vector<Row> rows;
  std::vector<int32_t> lengths;  // of the cache
  std::vector<T> feature, last, keys, values;
  std::vector<float> noise;
};

}  // namespace

extern "C" {

// Ask the system for the matrix tiles, once per process; whether they can be used.
int aq_request_tiles() {
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  tiles_granted = kHasTiles && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return tiles_granted;
}

// Sizes of Linear, Layer, Model, Pass, Growth, which the caller lays out again.
void aq_sizes(int64_t* out) {
  for (size_t size : {sizeof(Linear), sizeof(Layer), sizeof(Model), sizeof(Pass), sizeof(Growth)}) *out++ = int64_t(size);
}

// 0, or 1 when there is no memory.
int aq_forward(const Model* model, const Pass* pass) try {
  if (model->bf16_weights) Runner<bf16>(*model, *pass).run();
  else Runner<float>(*model, *pass).run();
  return 0;
} catch (const std::bad_alloc&) {
  return 1;
}

// Trees of as many rows as the pass has; of that only what it says of the cache, and of threads, is read.
int aq_grow(const Model* model, const Pass* cache, const Growth* growth) try {
  if (model->bf16_weights) Grower<bf16>(*model, *cache, *growth).run();
  else Grower<float>(*model, *cache, *growth).run();
  return 0;
} catch (const std::bad_alloc&) {
  return 1;
}

// x [M, w.in] (bf16 or float32, as the weights) times the packed weight, plus bias: into out [M, w.out] float32, or only
// the `top` largest outputs of each row: ids [M, top] and log_shares [M, top] (may be null), their log-softmax.
int aq_linear(const Linear* w, const void* x, int64_t M, int bf16_weights, int tiles, float* out, int64_t* ids,
              float* log_shares, int top, int threads) try {
  bool use_tiles = tiles_granted && tiles && bf16_weights;
  if (bf16_weights)
    linear(*w, static_cast<const bf16*>(x), M, true, use_tiles, out, ids, log_shares, top, threads);
  else linear(*w, static_cast<const float*>(x), M, false, false, out, ids, log_shares, top, threads);
  return 0;
} catch (const std::bad_alloc&) {
  return 1;
}

// sampling.race over the whole distribution of V logits; -1 when there is no memory, -2 when nobody can win. `key`: of
// the request's seed.
int64_t aq_race(const float* logits, int64_t V, double temperature, uint64_t key, int64_t position, int threads) try {
  return race(logits, V, temperature, count(key, position), threads);
} catch (const std::bad_alloc&) {
  return -1;
}

}  // extern "C"
