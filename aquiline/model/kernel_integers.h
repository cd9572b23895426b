// Products of 8-bit activations with weights of 8 or 4 bits, summed as integers within groups of 32 inputs.
//
// A weight is scale * q (8 bits: q from -128 to 127) or scale * q + shift (4 bits: q from 0 to 15), scale and shift
// being float16 and the group's: what llama.cpp calls Q8_0 and Q4_1. An activation is scale * a, a from -127 to 127,
// scale float32 and the group's. So an output is, group by group in their order,
//
//     + weight scale * activation scale * sum of q a  + shift * activation scale * sum of a
//
// where the sums are exact: on whatever units they are made, they are the same.

#pragma once

#include <type_traits>

#include "kernel_vector.h"

namespace {

constexpr int kGroup = 32;              // inputs that share a scale
constexpr int64_t kSpan = 2 * kGroup;   // inputs of a packed piece
constexpr int kMostIntegerRows = 8;     // that share a weight
constexpr int64_t kAhead = 4096;        // bytes from what is read to what is fetched

// 32 activations.
struct Group {
  int8_t of[kGroup];
  float scale, total;  // total: the activations' own sum
  int32_t below;       // what q + 128 in place of q makes too much of the sum of q a, negated
};

// Pieces of packed weights: a pair of blocks of 16 outputs, by 64 inputs. All pieces of a pair, and all pairs, lie one
// behind the other: memory is read fastest in one stream. A line has four inputs of each output of a block; with 4 bits
// twice four, those of the next step in the upper halves.
struct Eights {
  uint8_t lines[2][8][2][64];  // [group][step][block], q + 128
  uint16_t scale[2][2][kBlock];
};
struct Fours {
  uint8_t lines[2][4][2][64];
  uint16_t scale[2][2][kBlock], shift[2][2][kBlock];
};
static_assert(sizeof(Eights) % 64 == 0 && sizeof(Fours) % 64 == 0, "whole cache lines");

// 64 bytes, four for each of 16 outputs; and a whole number for each.
struct Bytes {
  IntPart p[kParts];
};

template <typename F>
inline Bytes each_bytes(F f) {
  Bytes r;
  for (int i = 0; i < kParts; i++) r.p[i] = f(i);
  return r;
}
#if defined(__AVX512F__)
inline IntPart line_part(const uint8_t* line, int) { return _mm512_loadu_si512(line); }
inline IntPart both(IntPart x, IntPart y) { return _mm512_and_si512(x, y); }
inline Part half_part(const uint16_t* p, int) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
#else
inline IntPart line_part(const uint8_t* line, int i) { return _mm256_loadu_si256((const __m256i*)line + i); }
inline IntPart both(IntPart x, IntPart y) { return _mm256_and_si256(x, y); }
inline Part half_part(const uint16_t* p, int i) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p + i)); }
#endif

// The four inputs of step 0 to 7 of a group, of one block.
inline Bytes step_of(const Eights& w, int group, int step, int block) {
  return each_bytes([&](int i) { return line_part(w.lines[group][step][block], i); });
}
inline Bytes step_of(const Fours& w, int group, int step, int block) {
  return each_bytes([&](int i) {
    IntPart line = line_part(w.lines[group][step / 2][block], i);
    return both(step % 2 ? AQ(srli_epi16)(line, 4) : line, AQ(set1_epi8)(15));
  });
}
inline V halves(const uint16_t* p) {
  return each([&](int i) { return half_part(p, i); });
}

// sum + the four products of each output. Without units for it, pairs are added in 16 bits first: of weights below 16
// two products fit, of others too when they are |q| times the activation with q's sign.
#if defined(__AVX512VNNI__)
template <typename W>
inline IntPart add_dots(IntPart sum, IntPart q, IntPart a) {
  return _mm512_dpbusd_epi32(sum, q, a);
}
#elif defined(__AVXVNNI__) && !defined(__AVX512F__)
template <typename W>
inline IntPart add_dots(IntPart sum, IntPart q, IntPart a) {
  return _mm256_dpbusd_avx_epi32(sum, q, a);
}
#else
#define AQ_PAIRS
#if defined(__AVX512F__)
inline IntPart with_sign(IntPart a, IntPart q) {
  return _mm512_mask_sub_epi8(a, _mm512_movepi8_mask(q), _mm512_setzero_si512(), a);
}
#else
inline IntPart with_sign(IntPart a, IntPart q) { return _mm256_sign_epi8(a, q); }
#endif
template <typename W>
inline IntPart add_dots(IntPart sum, IntPart q, IntPart a) {
  if constexpr (std::is_same_v<W, Eights>) {
    q = AQ(sub_epi8)(q, AQ(set1_epi8)(-128));
    a = with_sign(a, q);
    q = AQ(abs_epi8)(q);
  }
  return AQ(add_epi32)(sum, AQ(madd_epi16)(AQ(maddubs_epi16)(q, a), AQ(set1_epi16)(1)));
}
#endif

// What the integer sums begin with.
inline int32_t start_of(const Group& x, const Eights*) {
#if defined(AQ_PAIRS)
  return (void)x, 0;
#else
  return x.below;
#endif
}
inline int32_t start_of(const Group&, const Fours*) { return 0; }

// R rows by a pair of blocks, whose pieces are given, the sum over groups in order. Out: float32 [2][R][16].
template <int R, typename W>
inline void gemm(const Group* x, int64_t ldx, const W* w, int64_t pieces, float* out) {
  constexpr int kFetched = sizeof(w->lines) / 64 / 16;  // lines, with each of the 16 steps
  V sums[2][R];
  for (auto& block : sums)
    for (V& sum : block) sum = splat(0);
  for (int64_t k = 0; k < pieces; k++, w++) {
    const char* ahead = reinterpret_cast<const char*>(w) + kAhead;
    for (size_t at = sizeof(w->lines); at < sizeof(W); at += 64) _mm_prefetch(ahead + at, _MM_HINT_T1);
    for (int g = 0; g < 2; g++) {
      const Group* group = x + 2 * k + g;
      Bytes dots[2][R];
      for (int r = 0; r < R; r++)
        for (int b = 0; b < 2; b++)
          dots[b][r] = each_bytes([&](int) { return AQ(set1_epi32)(start_of(group[r * ldx], w)); });
#pragma GCC unroll 8
      for (int step = 0; step < 8; step++) {
        for (int line = 0; line < kFetched; line++)
          _mm_prefetch(ahead + ((g * 8 + step) * kFetched + line) * 64, _MM_HINT_T1);
        Bytes q[2];
        for (int b = 0; b < 2; b++) q[b] = step_of(*w, g, step, b);
        for (int r = 0; r < R; r++) {
          int four;
          std::memcpy(&four, group[r * ldx].of + 4 * step, 4);
          for (int b = 0; b < 2; b++)
            dots[b][r] = each_bytes(
                [&](int i) { return add_dots<W>(dots[b][r].p[i], q[b].p[i], AQ(set1_epi32)(four)); });
        }
      }
      for (int b = 0; b < 2; b++) {
        V scale = halves(w->scale[g][b]);
        for (int r = 0; r < R; r++) {
          const Group& of_row = group[r * ldx];
          V dot = each([&](int i) { return AQ(cvtepi32_ps)(dots[b][r].p[i]); });
          sums[b][r] = fma(dot, scale * splat(of_row.scale), sums[b][r]);
          if constexpr (std::is_same_v<W, Fours>)
            sums[b][r] = fma(halves(w->shift[g][b]), splat(of_row.total), sums[b][r]);
        }
      }
    }
  }
  for (int b = 0; b < 2; b++)
    for (int r = 0; r < R; r++) store(out + (b * R + r) * kBlock, sums[b][r]);
}

template <int R, typename W>
void multiply(const Group* x, int64_t ldx, int64_t rows, const W* w, int64_t pieces, float* out) {
  if constexpr (R > 1)
    if (rows < R) return multiply<R - 1>(x, ldx, rows, w, pieces, out);
  gemm<R>(x, ldx, w, pieces, out);
}

#if defined(__AVX512F__)
inline __m128i whole_bytes(V x) { return _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x.p[0])); }
inline __m256i larger_half(V x) {
  __m512i all = as_int(x.p[0]);
  return _mm256_max_epi32(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64(all, 1));
}
#else
inline __m128i whole_bytes(V x) {
  __m256i words = _mm256_packs_epi32(_mm256_cvtps_epi32(x.p[0]), _mm256_cvtps_epi32(x.p[1]));
  words = _mm256_permute4x64_epi64(words, 0xd8);  // it packs within halves
  return _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
}
inline __m256i larger_half(V x) { return _mm256_max_epi32(as_int(x.p[0]), as_int(x.p[1])); }
#endif

template <typename F>
inline int32_t across(__m256i x, F f) {
  __m128i y = f(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  y = f(y, _mm_shuffle_epi32(y, 0x4e));
  return _mm_cvtsi128_si32(f(y, _mm_shuffle_epi32(y, 0xb1)));
}

// 32 activations rounded, to even where it is a tie. What is no finite number makes the group's scale a NaN.
inline void quantise(const float* x, Group& to) {
  V a = load(x), b = load(x + kBlock);
  V sizes = each([&](int i) {  // without their signs; the bits then are in the order of the numbers, NaN above all
    IntPart mask = AQ(set1_epi32)(0x7fffffff);
    return as_float(AQ(max_epi32)(both(as_int(a.p[i]), mask), both(as_int(b.p[i]), mask)));
  });
  int32_t bits = across(larger_half(sizes), [](__m128i l, __m128i r) { return _mm_max_epi32(l, r); });
  float top;
  std::memcpy(&top, &bits, 4);
  float inverse = top < 1e-30f ? 0.0f : 127.0f / top;
  __m256i bytes = _mm256_set_m128i(whole_bytes(b * splat(inverse)), whole_bytes(a * splat(inverse)));
  _mm256_storeu_si256((__m256i*)to.of, bytes);
  __m256i fours = _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_set1_epi8(1), bytes), _mm256_set1_epi16(1));
  int total = across(fours, [](__m128i l, __m128i r) { return _mm_add_epi32(l, r); });
  to.scale = bits >= 0x7f800000 ? std::numeric_limits<float>::quiet_NaN() : top < 1e-30f ? 0.0f : top / 127.0f;
  to.total = to.scale * float(total);
  to.below = -128 * total;
}

}  // namespace
