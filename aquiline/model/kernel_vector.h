// What the kernel computes with: 16 floats at a time, in one AVX-512 register or two of AVX2, and bf16.

#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace {

constexpr int kBlock = 16;  // outputs of a block, rows of a tile, floats of a V
typedef uint16_t bf16;

inline int64_t up(int64_t n, int64_t m) { return (n + m - 1) / m * m; }

// ------------------------------------------------------------ 16 floats: one AVX-512 register, or two of AVX2

#if defined(__AVX512F__)
typedef __m512 Part;
typedef __m512i IntPart;
constexpr int kParts = 1, kColumns = 4;  // Vs that share a weight in mix
#define AQ(name) _mm512_##name
inline IntPart widen_part(const bf16* p) { return _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)); }
inline IntPart int_part(const bf16* p) { return _mm512_loadu_si512(p); }
inline Part keep_above(Part x, Part limit, Part value) {  // value where x >= limit, else 0
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, limit, _CMP_GE_OQ), value);
}
inline Part as_float(IntPart x) { return _mm512_castsi512_ps(x); }
inline IntPart as_int(Part x) { return _mm512_castps_si512(x); }
inline IntPart high_half(IntPart x) { return _mm512_and_si512(x, _mm512_set1_epi32(int(0xffff0000u))); }
#else
typedef __m256 Part;
typedef __m256i IntPart;
constexpr int kParts = 2, kColumns = 1;
#define AQ(name) _mm256_##name
inline IntPart widen_part(const bf16* p) { return _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)); }
inline IntPart int_part(const bf16* p) { return _mm256_loadu_si256((const __m256i*)p); }
inline Part keep_above(Part x, Part limit, Part value) {
  return _mm256_and_ps(_mm256_cmp_ps(x, limit, _CMP_GE_OQ), value);
}
inline Part as_float(IntPart x) { return _mm256_castsi256_ps(x); }
inline IntPart as_int(Part x) { return _mm256_castps_si256(x); }
inline IntPart high_half(IntPart x) { return _mm256_and_si256(x, _mm256_set1_epi32(int(0xffff0000u))); }
#endif
constexpr int kPart = kBlock / kParts;

struct V {
  Part p[kParts];
};

template <typename F>
inline V each(F f) {
  V r;
  for (int i = 0; i < kParts; i++) r.p[i] = f(i);
  return r;
}
inline V splat(float x) {
  return each([&](int) { return AQ(set1_ps)(x); });
}
inline V load(const float* p) {
  return each([&](int i) { return AQ(loadu_ps)(p + i * kPart); });
}
inline V load(const bf16* p) {
  return each([&](int i) { return as_float(AQ(slli_epi32)(widen_part(p + i * kPart), 16)); });
}
// Of 16 pairs the one halves.
inline V lower(const bf16* p) {
  return each([&](int i) { return as_float(AQ(slli_epi32)(int_part(p + i * 2 * kPart), 16)); });
}
inline V upper(const bf16* p) {
  return each([&](int i) { return as_float(high_half(int_part(p + i * 2 * kPart))); });
}
inline void store(float* p, V v) {
  for (int i = 0; i < kParts; i++) AQ(storeu_ps)(p + i * kPart, v.p[i]);
}
inline V operator+(V a, V b) {
  return each([&](int i) { return AQ(add_ps)(a.p[i], b.p[i]); });
}
inline V operator-(V a, V b) {
  return each([&](int i) { return AQ(sub_ps)(a.p[i], b.p[i]); });
}
inline V operator*(V a, V b) {
  return each([&](int i) { return AQ(mul_ps)(a.p[i], b.p[i]); });
}
inline V operator/(V a, V b) {
  return each([&](int i) { return AQ(div_ps)(a.p[i], b.p[i]); });
}
inline V fma(V a, V b, V c) {
  return each([&](int i) { return AQ(fmadd_ps)(a.p[i], b.p[i], c.p[i]); });
}
inline V most(V a, V b) {
  return each([&](int i) { return AQ(max_ps)(a.p[i], b.p[i]); });
}
inline V least(V a, V b) {
  return each([&](int i) { return AQ(min_ps)(a.p[i], b.p[i]); });
}
inline V keep_above(V x, float limit, V value) {
  return each([&](int i) { return keep_above(x.p[i], AQ(set1_ps)(limit), value.p[i]); });
}
inline float sum(V v) {
  alignas(64) float x[kBlock];
  store(x, v);
  for (int width = kBlock / 2; width; width /= 2)
    for (int i = 0; i < width; i++) x[i] += x[i + width];
  return x[0];
}

// 8 rows of 8 32-bit words as 8 columns; from one row to the next `ld` bytes, `to_ld` of what is written.
inline void turn_words(const char* from, int64_t ld, char* to, int64_t to_ld) {
  __m256i row[8], two[8], four[8];
  for (int r = 0; r < 8; r++) row[r] = _mm256_loadu_si256((const __m256i*)(from + r * ld));
  for (int r = 0; r < 8; r += 2) {
    two[r] = _mm256_unpacklo_epi32(row[r], row[r + 1]);
    two[r + 1] = _mm256_unpackhi_epi32(row[r], row[r + 1]);
  }
  for (int r = 0; r < 8; r += 4)  // four[r + c]: columns c and c + 4 of rows r to r + 3
    for (int c = 0; c < 2; c++) {
      four[r + 2 * c] = _mm256_unpacklo_epi64(two[r + c], two[r + c + 2]);
      four[r + 2 * c + 1] = _mm256_unpackhi_epi64(two[r + c], two[r + c + 2]);
    }
  for (int c = 0; c < 4; c++) {
    _mm256_storeu_si256((__m256i*)(to + c * to_ld), _mm256_permute2x128_si256(four[c], four[c + 4], 0x20));
    _mm256_storeu_si256((__m256i*)(to + (c + 4) * to_ld), _mm256_permute2x128_si256(four[c], four[c + 4], 0x31));
  }
}

// e^x: 2^n times a polynomial on [-ln 2 / 2, ln 2 / 2], within 2 units in the last place; 0 below -87, e^88 above 88.
inline V exp(V given) {
  V x = least(most(given, splat(-87.0f)), splat(88.0f));
  V n = x * splat(1.44269504f) + splat(12582912.0f) - splat(12582912.0f);  // to the nearest whole number
  V r = fma(n, splat(-0.693145752f), x);
  r = fma(n, splat(-1.42860677e-6f), r);
  V p = splat(1.98756915e-4f);
  for (float c : {1.39819995e-3f, 8.33345196e-3f, 4.16657962e-2f, 1.66666657e-1f, 0.5f}) p = fma(p, r, splat(c));
  p = fma(p, r * r, r + splat(1.0f));
  V value = each([&](int i) {
    IntPart exponent = AQ(slli_epi32)(AQ(cvtps_epi32)(n.p[i]), 23);
    return as_float(AQ(add_epi32)(as_int(p.p[i]), exponent));
  });
  return keep_above(given, -87.0f, value);
}

// The natural logarithm of a number of at least 2^-126: of its power of two, and of what is left, m in [2/3, 4/3), as
// 2 atanh((m - 1) / (m + 1)), a series.
inline V log(V x) {
  V power, m;
  for (int i = 0; i < kParts; i++) {
    IntPart bits = as_int(x.p[i]);
    IntPart n = AQ(srai_epi32)(AQ(sub_epi32)(bits, AQ(set1_epi32)(0x3f2aaaab)), 23);  // 2/3
    power.p[i] = AQ(cvtepi32_ps)(n);
    m.p[i] = as_float(AQ(sub_epi32)(bits, AQ(slli_epi32)(n, 23)));
  }
  V s = (m - splat(1.0f)) / (m + splat(1.0f));
  V p = splat(2.0f / 9);
  for (float c : {2.0f / 7, 2.0f / 5, 2.0f / 3, 2.0f}) p = fma(p, s * s, splat(c));
  return fma(power, splat(0.693147181f), s * p);
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
inline float get(float x) { return x; }
inline float get(bf16 x) { return widen(x); }
inline void put(float& to, float x) { to = x; }
inline void put(bf16& to, float x) { to = narrow(x); }
template <typename T>
inline void put_many(T* to, const float* x, int64_t count) {
  for (int64_t i = 0; i < count; i++) put(to[i], x[i]);
}
template <typename T>
inline void get_many(const T* from, float* x, int64_t count) {
  for (int64_t i = 0; i < count; i++) x[i] = get(from[i]);
}

}  // namespace
