// The races of decode/sampling.py: every token of the vocabulary arrives after an exponential time that depends only on
// the request's seed, the position and the token; the one with the smallest time / probability is chosen.
//
// The draft only guesses who wins, in float. The target's choice is made in double, as PyTorch makes it, among the few
// tokens that float cannot tell apart.

#pragma once

#include <limits>
#include <vector>

#include "kernel_vector.h"

namespace {

constexpr uint64_t kGamma = 0x9e3779b97f4a7c15u;
constexpr float kUnsure = 1e-3f;  // by so much float may misplace a logarithm of a time, many times over

inline uint64_t mix64(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

// `key`: of a seed, counted by position, or of both, counted by token.
inline uint64_t count(uint64_t key, int64_t number) { return mix64(key + uint64_t(number + 1) * kGamma); }

inline double uniform_of(uint64_t key, int64_t id) { return (double(int64_t(count(key, id) >> 11)) + 0.5) * 0x1p-53; }

// Foresight.noise of 16 tokens at temperature 1: -log(-log(1 - u)).
inline V gumbel(uint64_t key, const int64_t* ids) {
  alignas(64) float uniform[kBlock];
  for (int i = 0; i < kBlock; i++) uniform[i] = float(uniform_of(key, ids[i]));
  V u = load(uniform), rest = most(splat(1.0f) - u, splat(0x1p-25f));
  V series = fma(u * u, fma(u, splat(1.0f / 3), splat(0.5f)), u), whole = splat(0) - log(rest);
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

// Who wins the race of all V tokens with these logits. Logits of -infinity never do; one at least is finite.
inline int64_t race(const float* logits, int64_t size, double temperature, uint64_t key, int threads) {
  const float never = -std::numeric_limits<float>::infinity();
  float highest = never, best = never;
  for (int64_t i = 0; i < size; i++) highest = std::max(highest, logits[i]);
  std::vector<float> score(size_t(up(size, kBlock)));
  float scale = float(1 / temperature);
#pragma omp parallel for num_threads(threads) schedule(static) reduction(max : best)
  for (int64_t at = 0; at < size; at += kBlock) {
    alignas(64) int64_t ids[kBlock];
    float* of = &score[size_t(at)];
    for (int i = 0; i < kBlock; i++) {
      ids[i] = at + i;
      of[i] = at + i < size ? (logits[at + i] - highest) * scale : never;
    }
    store(of, load(of) + gumbel(key, ids));
    for (int i = 0; i < kBlock; i++) best = std::max(best, of[i]);
  }
  int64_t winner = 0;
  double earliest = std::numeric_limits<double>::infinity();
  for (int64_t i = 0; i < size; i++) {
    if (!(score[size_t(i)] >= best - kUnsure)) continue;
    double weight = std::exp((double(logits[i]) - highest) / temperature);
    double time = -std::log1p(-uniform_of(key, i)) / weight;
    if (time < earliest) winner = i, earliest = time;
  }
  return winner;
}

}  // namespace
