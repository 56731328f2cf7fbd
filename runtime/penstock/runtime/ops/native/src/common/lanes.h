// Sixteen float32 values at a time, compiled once per instruction set. Everything here is in an unnamed namespace: if
// it were shared, the linker would keep one copy, which might have instructions that the machine lacks.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>
#include <initializer_list>

namespace penstock {
namespace {

// Sixteen float32 values, as one AVX-512 register or as an array that compilers vectorise.
#if defined(__AVX512F__)

struct Lanes {
  __m512 v;
};

inline Lanes Load(const float* from) { return {_mm512_loadu_ps(from)}; }
inline void Store(float* to, Lanes a) { _mm512_storeu_ps(to, a.v); }
inline Lanes Fill(float value) { return {_mm512_set1_ps(value)}; }
inline Lanes Add(Lanes a, Lanes b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Lanes Sub(Lanes a, Lanes b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline float Total(Lanes a) { return _mm512_reduce_add_ps(a.v); }
inline Lanes Mul(Lanes a, Lanes b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Lanes Div(Lanes a, Lanes b) { return {_mm512_div_ps(a.v, b.v)}; }

// a within [low, high]. If the first operand of min or max is NaN, or the second, the result is the second; so NaN
// stays NaN.
inline Lanes Clip(Lanes a, float low, float high) {
  return {_mm512_max_ps(_mm512_set1_ps(low), _mm512_min_ps(_mm512_set1_ps(high), a.v))};
}

// The larger of `size`, which is not negative, and the size of b. As integers, the bits of sizes have the same order as
// the sizes, and NaN is the largest.
inline Lanes LargerSize(Lanes size, Lanes b) {
  const __m512i bits = _mm512_castps_si512(_mm512_abs_ps(b.v));
  return {_mm512_castsi512_ps(_mm512_max_epi32(_mm512_castps_si512(size.v), bits))};
}

// The largest of lanes that are not negative; NaN if any lane is NaN.
inline float LargestSize(Lanes sizes) {
  const int32_t bits = _mm512_reduce_max_epi32(_mm512_castps_si512(sizes.v));
  float largest;
  memcpy(&largest, &bits, 4);
  return largest;
}

// Rounds to the nearest integer, ties to even, and stores int8. No lane is larger than 127 in size; NaN becomes 0.
inline void StoreInt8(int8_t* to, Lanes a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a.v)));
}

inline Lanes LoadBf16(const uint16_t* from) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}

// Rounds to nearest, ties to even, and stores bf16; NaN stays NaN.
inline void StoreBf16(uint16_t* to, Lanes a) {
#if defined(__AVX512BF16__)
  const __m256bh narrow = _mm512_cvtneps_pbh(a.v);
  memcpy(to, &narrow, 32);
#else
  const __m512i bits = _mm512_castps_si512(a.v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  const __m512i value = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(_mm512_srli_epi32(value, 16)));
#endif
}

// e^x to about 2 ulp (Cephes' polynomial).
inline Lanes Exp(Lanes x) {
  const __m512 clipped = _mm512_max_ps(_mm512_min_ps(x.v, _mm512_set1_ps(88.0f)), _mm512_set1_ps(-87.0f));
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(clipped, _mm512_set1_ps(1.44269504088896341f)), 0);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), clipped);
  r = _mm512_fmadd_ps(n, _mm512_set1_ps(2.12194440e-4f), r);
  __m512 p = _mm512_set1_ps(1.9875691500e-4f);
  for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f}) {
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(c));
  }
  p = _mm512_add_ps(_mm512_fmadd_ps(p, _mm512_mul_ps(r, r), r), _mm512_set1_ps(1.0f));
  return {_mm512_scalef_ps(p, n)};
}

#else

struct Lanes {
  float v[16];
};

template <typename Function>
inline Lanes Each(Function function) {
  Lanes out;
  for (int i = 0; i < 16; ++i) {
    out.v[i] = function(i);
  }
  return out;
}

inline Lanes Load(const float* from) {
  return Each([&](int i) { return from[i]; });
}
inline void Store(float* to, const Lanes& a) { memcpy(to, a.v, sizeof a.v); }
inline Lanes Fill(float value) {
  return Each([&](int) { return value; });
}
inline Lanes Add(const Lanes& a, const Lanes& b) {
  return Each([&](int i) { return a.v[i] + b.v[i]; });
}
inline Lanes Sub(const Lanes& a, const Lanes& b) {
  return Each([&](int i) { return a.v[i] - b.v[i]; });
}
inline float Total(const Lanes& a) {
  float total = 0.0f;
  for (float value : a.v) {
    total += value;
  }
  return total;
}
inline Lanes Mul(const Lanes& a, const Lanes& b) {
  return Each([&](int i) { return a.v[i] * b.v[i]; });
}
inline Lanes Div(const Lanes& a, const Lanes& b) {
  return Each([&](int i) { return a.v[i] / b.v[i]; });
}
// NaN is neither above nor below, and stays NaN.
inline Lanes Clip(const Lanes& a, float low, float high) {
  return Each([&](int i) { return a.v[i] > high ? high : (a.v[i] < low ? low : a.v[i]); });
}

// The bits of a float without its sign.
inline int32_t SizeBits(float value) {
  int32_t bits;
  memcpy(&bits, &value, 4);
  return bits & 0x7fffffff;
}

inline float FloatOf(int32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

inline Lanes LargerSize(const Lanes& size, const Lanes& b) {
  return Each([&](int i) {
    const int32_t old = SizeBits(size.v[i]), now = SizeBits(b.v[i]);
    return FloatOf(old > now ? old : now);
  });
}
inline float LargestSize(const Lanes& sizes) {
  int32_t largest = 0;
  for (float value : sizes.v) {
    largest = SizeBits(value) > largest ? SizeBits(value) : largest;
  }
  return FloatOf(largest);
}

inline void StoreInt8(int8_t* to, const Lanes& a) {
  uint32_t bits[16];
  for (int i = 0; i < 16; ++i) {
    const float whole = a.v[i] + 12582912.0f;  // 1.5 * 2^23: the integer is in the lowest bits
    memcpy(&bits[i], &whole, 4);
  }
  for (int i = 0; i < 16; ++i) {
    to[i] = static_cast<int8_t>(bits[i]);
  }
}

inline Lanes LoadBf16(const uint16_t* from) {
  return Each([&](int i) {
    const uint32_t wide = static_cast<uint32_t>(from[i]) << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
  });
}

#ifdef __AVX2__
// Compilers find no vectors in the loop below.
inline void StoreBf16(uint16_t* to, const Lanes& a) {
  __m256i value[2];
  for (int half = 0; half < 2; ++half) {
    const __m256 wide = _mm256_loadu_ps(a.v + 8 * half);
    const __m256i bits = _mm256_castps_si256(wide);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(wide, wide, _CMP_UNORD_Q));
    value[half] = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
  }
  // packus takes 128 bits of each operand in turn; the permutation puts the words in order.
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(value[0], value[1]), 0xd8);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), packed);
}
#else
inline void StoreBf16(uint16_t* to, const Lanes& a) {
  for (int i = 0; i < 16; ++i) {
    uint32_t bits;
    memcpy(&bits, &a.v[i], 4);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    to[i] = static_cast<uint16_t>(a.v[i] == a.v[i] ? rounded : (bits >> 16) | 0x40);
  }
}
#endif

inline Lanes Exp(const Lanes& a) {
  return Each([&](int i) {
    const float x = a.v[i] < -87.0f ? -87.0f : (a.v[i] > 88.0f ? 88.0f : a.v[i]);
    // Rounds x * log2(e) to an integer.
    const float n = __builtin_fmaf(x, 1.44269504088896341f, 12582912.0f) - 12582912.0f;
    const float r = __builtin_fmaf(n, 2.12194440e-4f, __builtin_fmaf(n, -0.693359375f, x));
    float p = 1.9875691500e-4f;
    for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f}) {
      p = __builtin_fmaf(p, r, c);
    }
    const int32_t exponent = (static_cast<int32_t>(n) + 127) << 23;
    float scale;
    memcpy(&scale, &exponent, 4);
    return (__builtin_fmaf(p, r * r, r) + 1.0f) * scale;
  });
}

#endif

}  // namespace
}  // namespace penstock
