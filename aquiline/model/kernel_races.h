// The races of decode/sampling.py: every token of the vocabulary arrives after an exponential time that depends only on
// the request's seed, the position and the token; the one with the smallest time / probability is chosen.
//
// The draft only guesses who wins, in float. The target's choice is made in double, as PyTorch makes it, among the few
// tokens that float cannot tell apart.

#pragma once

#include <limits>
#include <memory>

#include "kernel_vector.h"

namespace {

constexpr uint64_t kGamma = 0x9e3779b97f4a7c15u;
constexpr float kUnsure = 1e-3f;  // float is off by a hundredth of it, in a logarithm of time / probability

inline uint64_t mix64(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

// `key`: of a seed, counted by position, or of both, counted by token.
inline uint64_t count(uint64_t key, int64_t number) { return mix64(key + uint64_t(number + 1) * kGamma); }

inline double uniform_of(uint64_t key, int64_t id) {
  return std::min((double(int64_t(count(key, id) >> 11)) + 0.5) * 0x1p-53, 1 - 0x1p-53);
}

// Gumbel noise of 16 tokens: -log(-log(1 - u)), near u = 0 by the series of the inner logarithm.
inline V gumbel(uint64_t key, const int64_t* ids) {
  alignas(64) float uniform[kBlock], rest[kBlock];
  for (int i = 0; i < kBlock; i++) {
    double u = uniform_of(key, ids[i]);
    uniform[i] = float(u), rest[i] = float(1 - u);  // in double: float knows nothing between 1 - 2^-24 and 1
  }
  V u = load(uniform);
  V series = fma(u * u, fma(u, splat(1.0f / 3), splat(0.5f)), u), whole = splat(0) - log(load(rest));
  V time = keep_above(u, 0.01f, whole) + series - keep_above(u, 0.01f, series);
  return splat(0) - log(time);
}

// Of the tokens with these ids, at the position that `key` is of; `count` of them.
inline void noise_of(uint64_t key, const int64_t* ids, int64_t count, float temperature, float* out) {
  alignas(64) int64_t id[kBlock];
  alignas(64) float noise[kBlock];
  std::fill(std::copy_n(ids, count, id), id + kBlock, 0);
  store(noise, gumbel(key, id) * splat(temperature));
  std::copy_n(noise, count, out);
}

inline float largest(V v) {
  alignas(64) float x[kBlock];
  store(x, v);
  return *std::max_element(x, x + kBlock);
}

// Who wins the race of all tokens with these logits; those of -infinity never do. -2: some are no numbers, or none can.
inline int64_t race(const float* logits, int64_t size, double temperature, uint64_t key, int threads) {
  const float never = -std::numeric_limits<float>::infinity();
  int64_t blocks = up(size, kBlock);
  std::unique_ptr<float[]> score(new float[size_t(blocks)]);
  std::fill(std::copy_n(logits, size, score.get()), score.get() + blocks, never);
  V top = splat(never);
  for (int64_t at = 0; at < blocks; at += kBlock) top = most(top, load(&score[size_t(at)]));
  float highest = largest(top), best = never;
  float scale = float(std::min(1 / temperature, double(std::numeric_limits<float>::max())));
#pragma omp parallel num_threads(threads) reduction(max : best)
  {
    V mine = splat(never);
#pragma omp for schedule(static)
    for (int64_t at = 0; at < blocks; at += kBlock) {
      alignas(64) int64_t ids[kBlock];
      for (int i = 0; i < kBlock; i++) ids[i] = at + i;
      V of = (load(&score[size_t(at)]) - splat(highest)) * splat(scale) + gumbel(key, ids);
      store(&score[size_t(at)], of);
      mine = most(mine, of);
    }
    best = largest(mine);
  }
  int64_t winner = -2;
  double earliest = std::numeric_limits<double>::infinity();
  for (int64_t i = 0; i < size; i++) {
    if (score[size_t(i)] < best - kUnsure) continue;
    double weight = std::exp((double(logits[i]) - highest) / temperature);
    double time = -std::log1p(-uniform_of(key, i)) / weight;
    if (std::isnan(time)) return -2;
    if (time < earliest) winner = i, earliest = time;
  }
  return winner;
}

}  // namespace
