// The noise of a token at a position, with the same bits as in core/sampling.py: integers from
// Philox-4x32-10, logarithms from one polynomial. Compile without FMA contraction.

#pragma once

#include <stdint.h>
#include <string.h>

namespace {

inline void philox(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint64_t key, uint32_t* out) {
  uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
  for (int round = 0; round < 10; round++) {
    const uint64_t p0 = (uint64_t)c0 * 0xD2511F53u, p1 = (uint64_t)c2 * 0xCD9E8D57u;
    const uint32_t n0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0, n2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
    c1 = (uint32_t)p1, c3 = (uint32_t)p0, c0 = n0, c2 = n2;
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
  out[0] = c0, out[1] = c1, out[2] = c2, out[3] = c3;
}

inline float log_near_one(float f) {  // log(1 + f)
  float p = 0.07149753719568253f;
  p = p * f;
  p = p + -0.115712009370327f;
  p = p * f;
  p = p + 0.11661510914564133f;
  p = p * f;
  p = p + -0.12411050498485565f;
  p = p * f;
  p = p + 0.14249937236309052f;
  p = p * f;
  p = p + -0.1666848063468933f;
  p = p * f;
  p = p + 0.20000708103179932f;
  p = p * f;
  p = p + -0.24999989569187164f;
  p = p * f;
  p = p + 0.3333333134651184f;
  const float z = f * f;
  const float cubic = (f * z) * p;
  return (f - 0.5f * z) + cubic;
}

inline float log_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  int exponent = (int)(bits >> 23) - 127;
  bits = (bits & 0x7fffff) | 0x3f800000;
  float m;
  memcpy(&m, &bits, 4);
  if (m > 1.4142135f) m = m * 0.5f, exponent++;
  return (float)exponent * 0.6931471805599453f + log_near_one(m - 1.0f);
}

constexpr float MAX_NOISE = 22.8739f;

// An upper bound on the noise of a word, from its leading bits.
inline float max_noise(uint32_t word) {
  const int ones = ~word ? __builtin_clz(~word) : 32;
  return (float)(ones + 1) * 0.6932f;
}

inline float noise_of(uint32_t word) {
  float e;
  if (word >= 3037000500u) {
    e = -log_near_one(-(((float)(4294967296.0 - (double)word) - 0.5f) * 2.3283064365386963e-10f));
  } else {
    float below = ((float)word + 0.5f) * 2.3283064365386963e-10f;
    e = -log_of(below < 1.0f ? below : 1.0f);
  }
  return -log_of(e);
}

}  // namespace
