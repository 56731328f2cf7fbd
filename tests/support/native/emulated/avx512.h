// AVX-512's intrinsics in plain C++: those that the kernels use, with the meaning that Intel's manual gives their
// instructions (Software Developer's Manual, volume 2). A file that is compiled with `-include` of this header has its
// code for AVX-512, and runs on machines without it. A kernel that needs an intrinsic that is missing here does not
// compile ("target specific option mismatch").
//
// The names are those of immintrin.h. In namespace penstock they hide the real ones, which are declared in no namespace.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>

#define __AVX512F__ 1
#define __AVX512BW__ 1
#define __AVX512DQ__ 1
#define __AVX512VL__ 1
#define __AVX512VNNI__ 1

// Compilers may have these as macros.
#undef _mm512_cmp_ps_mask
#undef _mm512_extracti64x4_epi64
#undef _mm512_permutex2var_ps
#undef _mm512_reduce_ps
#undef _mm512_roundscale_ps
#undef _mm512_shuffle_i32x4
#undef _mm512_slli_epi32
#undef _mm512_srli_epi32

namespace penstock {
namespace {

// The lanes of a register of 64 bytes, by type.
using F32x16 = float __attribute__((vector_size(64), may_alias));
using I32x16 = int32_t __attribute__((vector_size(64), may_alias));
using U32x16 = uint32_t __attribute__((vector_size(64), may_alias));
using I64x8 = int64_t __attribute__((vector_size(64), may_alias));
using U16x32 = uint16_t __attribute__((vector_size(64), may_alias));
using U16x16 = uint16_t __attribute__((vector_size(32), may_alias));
using U8x16 = uint8_t __attribute__((vector_size(16), may_alias));
using U8x32 = uint8_t __attribute__((vector_size(32), may_alias));
using U8x64 = uint8_t __attribute__((vector_size(64), may_alias));

constexpr int kFloatLanes = 16;

// The register whose lane i is lane(i).
template <typename Register, typename Lane>
inline __attribute__((always_inline)) Register ByLane(Lane lane) {
  Register out;
  for (int i = 0; i < static_cast<int>(sizeof(Register) / sizeof out[0]); ++i) out[i] = lane(i);
  return out;
}

template <typename To, typename From>
inline To BitsAs(From from) {
  static_assert(sizeof(To) == sizeof(From), "a copy of bits");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

// The processor faults where an access that must be aligned is not.
inline void DemandAligned(const void* at) {
  if (reinterpret_cast<uintptr_t>(at) % 64 == 0) return;
  fprintf(stderr, "emulated AVX-512: an address is not a multiple of 64\n");
  abort();
}

// Loads and stores. Lanes that a mask leaves out are not touched in memory.

inline __m512i _mm512_loadu_si512(const void* from) {
  __m512i out;
  memcpy(&out, from, sizeof out);
  return out;
}
inline __m512 _mm512_loadu_ps(const void* from) { return (__m512)_mm512_loadu_si512(from); }
inline __m512i _mm512_load_si512(const void* from) {
  DemandAligned(from);
  return _mm512_loadu_si512(from);
}
inline void _mm512_storeu_si512(void* to, __m512i a) { memcpy(to, &a, sizeof a); }
inline void _mm512_storeu_ps(void* to, __m512 a) { memcpy(to, &a, sizeof a); }
inline void _mm512_stream_ps(void* to, __m512 a) {
  DemandAligned(to);
  memcpy(to, &a, sizeof a);
}
inline __m512 _mm512_mask_loadu_ps(__m512 otherwise, __mmask16 mask, const void* from) {
  for (int i = 0; i < kFloatLanes; ++i) {
    if (mask >> i & 1) memcpy(reinterpret_cast<float*>(&otherwise) + i, static_cast<const float*>(from) + i, 4);
  }
  return otherwise;
}
inline __m512i _mm512_maskz_loadu_epi32(__mmask16 mask, const void* from) {
  return (__m512i)_mm512_mask_loadu_ps(__m512{}, mask, from);
}
inline void _mm512_mask_storeu_epi32(void* to, __mmask16 mask, __m512i a) {
  for (int i = 0; i < kFloatLanes; ++i) {
    if (mask >> i & 1) memcpy(static_cast<int32_t*>(to) + i, reinterpret_cast<const int32_t*>(&a) + i, 4);
  }
}

// Constants and casts.

inline __m512 _mm512_setzero_ps() { return __m512{}; }
inline __m512 _mm512_set1_ps(float a) {
  return ByLane<__m512>([&](int) { return a; });
}
inline __m512i _mm512_set1_epi32(int32_t a) {
  return (__m512i)ByLane<I32x16>([&](int) { return a; });
}
inline __m512 _mm512_setr_ps(float a, float b, float c, float d, float e, float f, float g, float h, float i, float j,
                             float k, float l, float m, float n, float o, float p) {
  return __m512{a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p};
}
inline __m512i _mm512_setr_epi32(int32_t a, int32_t b, int32_t c, int32_t d, int32_t e, int32_t f, int32_t g, int32_t h,
                                 int32_t i, int32_t j, int32_t k, int32_t l, int32_t m, int32_t n, int32_t o,
                                 int32_t p) {
  return (__m512i)I32x16{a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p};
}
inline __m512i _mm512_castps_si512(__m512 a) { return (__m512i)a; }
inline __m512 _mm512_castsi512_ps(__m512i a) { return (__m512)a; }
inline __m256i _mm512_castsi512_si256(__m512i a) {
  __m256i half;
  memcpy(&half, &a, sizeof half);
  return half;
}
inline float _mm512_cvtss_f32(__m512 a) { return a[0]; }

// Arithmetic on float32. Where an operand of max or min is NaN, or both are zeros, the result is the second.

inline __m512 _mm512_add_ps(__m512 a, __m512 b) { return (__m512)((F32x16)a + (F32x16)b); }
inline __m512 _mm512_sub_ps(__m512 a, __m512 b) { return (__m512)((F32x16)a - (F32x16)b); }
inline __m512 _mm512_mul_ps(__m512 a, __m512 b) { return (__m512)((F32x16)a * (F32x16)b); }
inline __m512 _mm512_div_ps(__m512 a, __m512 b) { return (__m512)((F32x16)a / (F32x16)b); }
inline __m512 _mm512_fmadd_ps(__m512 a, __m512 b, __m512 c) {
  return ByLane<__m512>([&](int i) { return __builtin_fmaf(a[i], b[i], c[i]); });
}
inline __m512 _mm512_fnmadd_ps(__m512 a, __m512 b, __m512 c) {
  return ByLane<__m512>([&](int i) { return __builtin_fmaf(-a[i], b[i], c[i]); });
}
inline float LargerOf(float a, float b) { return a > b ? a : b; }
inline __m512 _mm512_max_ps(__m512 a, __m512 b) {
  return ByLane<__m512>([&](int i) { return LargerOf(a[i], b[i]); });
}
inline __m512 _mm512_min_ps(__m512 a, __m512 b) {
  return ByLane<__m512>([&](int i) { return a[i] < b[i] ? a[i] : b[i]; });
}
inline __m512 _mm512_abs_ps(__m512 a) { return (__m512)((I32x16)a & 0x7fffffff); }

inline float QuietNan(float nan) { return BitsAs<float>(BitsAs<uint32_t>(nan) | 0x400000); }

// VRNDSCALEPS and VREDUCEPS keep `control >> 4` bits after the point, and round as the low bits say. The kernels round
// to an integer, to nearest even, and nothing else is here.
inline void DemandNearestInteger(int control) {
  if (control == 0) return;
  fprintf(stderr, "emulated AVX-512: only rounding to the nearest integer is emulated\n");
  abort();
}
// The rounding mode of the threads is the default one, to nearest even.
inline float NearestInteger(float a) { return std::nearbyint(a); }
inline __m512 _mm512_roundscale_ps(__m512 a, int control) {
  DemandNearestInteger(control);
  return ByLane<__m512>([&](int i) { return NearestInteger(a[i]); });
}
// What rounding takes away: +0 for an infinity, and where nothing is left.
inline __m512 _mm512_reduce_ps(__m512 a, int control) {
  DemandNearestInteger(control);
  return ByLane<__m512>([&](int i) {
    if (std::isnan(a[i])) return QuietNan(a[i]);
    if (std::isinf(a[i])) return 0.0f;
    return a[i] - NearestInteger(a[i]);
  });
}
// a * 2^floor(b), rounded once, with VSCALEFPS' special cases.
inline float ScaledBy(float a, float b) {
  if (std::isnan(a)) {
    if (std::isinf(b) && (BitsAs<uint32_t>(a) & 0x400000)) return b > 0 ? b : 0.0f;
    return QuietNan(a);
  }
  if (std::isnan(b)) return QuietNan(b);
  if (std::isinf(b) && ((b > 0 && a == 0.0f) || (b < 0 && std::isinf(a)))) return BitsAs<float>(0xffc00000u);
  if (std::isinf(a) || a == 0.0f) return a;
  // The product of a float and a power of two is exact in float64, up to the final rounding.
  const auto power = static_cast<int64_t>(std::floor(b < -400.0f ? -400.0f : (b > 400.0f ? 400.0f : b)));
  return static_cast<float>(static_cast<double>(a) * BitsAs<double>((1023 + power) << 52));
}
inline __m512 _mm512_scalef_ps(__m512 a, __m512 b) {
  return ByLane<__m512>([&](int i) { return ScaledBy(a[i], b[i]); });
}

// Folds the upper half of a register onto the lower one until one lane is left. Compilers make it of several
// instructions, in this order (GCC's avx512fintrin.h).
template <typename Lanes, typename Fold>
inline auto Folded(Lanes a, Fold fold) {
  for (int half = kFloatLanes / 2; half >= 4; half /= 2) {
    for (int i = 0; i < half; ++i) a[i] = fold(a[i + half], a[i]);
  }
  return fold(fold(a[0], a[2]), fold(a[1], a[3]));
}
inline float _mm512_reduce_add_ps(__m512 a) {
  return Folded((F32x16)a, [](float x, float y) { return x + y; });
}
inline float _mm512_reduce_max_ps(__m512 a) { return Folded((F32x16)a, LargerOf); }
inline int32_t _mm512_reduce_max_epi32(__m512i a) {
  return Folded((I32x16)a, [](int32_t x, int32_t y) { return x > y ? x : y; });
}

// Integers. They wrap around.

inline __m512i _mm512_add_epi32(__m512i a, __m512i b) { return (__m512i)((U32x16)a + (U32x16)b); }
inline __m512i _mm512_max_epi32(__m512i a, __m512i b) {
  return (__m512i)ByLane<I32x16>([&](int i) { return ((I32x16)a)[i] > ((I32x16)b)[i] ? ((I32x16)a)[i] : ((I32x16)b)[i]; });
}
inline __m512i _mm512_and_si512(__m512i a, __m512i b) { return (__m512i)((I32x16)a & (I32x16)b); }
inline __m512i _mm512_xor_si512(__m512i a, __m512i b) { return (__m512i)((I32x16)a ^ (I32x16)b); }
inline __m512i _mm512_or_si512(__m512i a, __m512i b) { return (__m512i)((I32x16)a | (I32x16)b); }
inline __m512i _mm512_slli_epi32(__m512i a, unsigned bits) {
  return bits > 31 ? __m512i{} : (__m512i)((U32x16)a << bits);
}
inline __m512i _mm512_srli_epi32(__m512i a, unsigned bits) {
  return bits > 31 ? __m512i{} : (__m512i)((U32x16)a >> bits);
}
// Four times the same 16 bytes.
inline __m512i _mm512_broadcast_i32x4(__m128i a) {
  return (__m512i)ByLane<U8x64>([&](int i) { return ((U8x16)a)[i % 16]; });
}
// For each byte of b the one of a that its lower half names, of the same 16; 0 where the byte is above 127.
inline __m512i _mm512_shuffle_epi8(__m512i a, __m512i b) {
  return (__m512i)ByLane<U8x64>([&](int i) {
    const uint8_t place = ((U8x64)b)[i];
    return place & 0x80 ? uint8_t{0} : ((U8x64)a)[i / 16 * 16 + place % 16];
  });
}

// Adds to each word the four products of bytes of a, without sign, and bytes of b, with sign.
inline __m512i _mm512_dpbusd_epi32(__m512i sum, __m512i a, __m512i b) {
  return (__m512i)ByLane<I32x16>([&](int i) {
    const uint32_t x = ((U32x16)a)[i], y = ((U32x16)b)[i];
    uint32_t total = ((U32x16)sum)[i];
    for (int shift = 0; shift < 32; shift += 8) {
      total += static_cast<uint32_t>(static_cast<uint8_t>(x >> shift) * static_cast<int8_t>(y >> shift));
    }
    return static_cast<int32_t>(total);
  });
}

// Adds to each word the two products of halves of a and of b, with sign.
inline __m512i _mm512_dpwssd_epi32(__m512i sum, __m512i a, __m512i b) {
  return (__m512i)ByLane<I32x16>([&](int i) {
    const int32_t x = ((I32x16)a)[i], y = ((I32x16)b)[i];
    const int64_t low = static_cast<int64_t>(static_cast<int16_t>(x)) * static_cast<int16_t>(y);
    const int64_t high = static_cast<int64_t>(x >> 16) * (y >> 16);
    return static_cast<int32_t>(((U32x16)sum)[i] + static_cast<uint32_t>(low + high));
  });
}

// Conversions.

inline __m512i _mm512_cvtepi8_epi16(__m256i a) {
  return (__m512i)ByLane<U16x32>([&](int i) { return static_cast<uint16_t>(static_cast<int8_t>(((U8x32)a)[i])); });
}
inline __m512i _mm512_cvtepu16_epi32(__m256i a) {
  return (__m512i)ByLane<I32x16>([&](int i) { return static_cast<int32_t>(((U16x16)a)[i]); });
}
inline __m512i _mm512_cvtepi8_epi32(__m128i a) {
  return (__m512i)ByLane<I32x16>([&](int i) { return static_cast<int32_t>(static_cast<int8_t>(((U8x16)a)[i])); });
}
inline __m256i _mm512_cvtepi32_epi16(__m512i a) {
  return (__m256i)ByLane<U16x16>([&](int i) { return static_cast<uint16_t>(((U32x16)a)[i]); });
}
inline __m128i _mm512_cvtepi32_epi8(__m512i a) {
  return (__m128i)ByLane<U8x16>([&](int i) { return static_cast<uint8_t>(((U32x16)a)[i]); });
}
inline __m512 _mm512_cvtph_ps(__m256i a) {
  const __m256 low = _mm256_cvtph_ps(_mm256_castsi256_si128(a)), high = _mm256_cvtph_ps(_mm256_extracti128_si256(a, 1));
  return ByLane<__m512>([&](int i) { return i < 8 ? low[i] : high[i - 8]; });
}
inline __m512 _mm512_cvtepi32_ps(__m512i a) {
  return ByLane<__m512>([&](int i) { return static_cast<float>(((I32x16)a)[i]); });
}
// Rounds to nearest, ties to even; what does not fit, NaN too, is the smallest integer.
inline __m512i _mm512_cvtps_epi32(__m512 a) {
  return (__m512i)ByLane<I32x16>([&](int i) {
    const bool fits = a[i] >= -2147483648.0f && a[i] < 2147483648.0f;
    return fits ? static_cast<int32_t>(NearestInteger(a[i])) : INT32_MIN;
  });
}

// Masks: bit i belongs to lane i.

template <typename Test>
inline __mmask16 MaskOf(Test test) {
  unsigned mask = 0;
  for (int i = 0; i < kFloatLanes; ++i) mask |= static_cast<unsigned>(test(i)) << i;
  return static_cast<__mmask16>(mask);
}
inline __mmask16 _mm512_cmp_ps_mask(__m512 a, __m512 b, int how) {
  switch (how) {
    case _CMP_EQ_OQ:
      return MaskOf([&](int i) { return a[i] == b[i]; });
    case _CMP_LT_OQ:
      return MaskOf([&](int i) { return a[i] < b[i]; });
    case _CMP_LE_OQ:
      return MaskOf([&](int i) { return a[i] <= b[i]; });
    case _CMP_UNORD_Q:
      return MaskOf([&](int i) { return std::isnan(a[i]) || std::isnan(b[i]); });
    default:
      fprintf(stderr, "emulated AVX-512: comparison %d is not emulated\n", how);
      abort();
  }
}
inline __mmask16 _mm512_cmple_epi32_mask(__m512i a, __m512i b) {
  return MaskOf([&](int i) { return ((I32x16)a)[i] <= ((I32x16)b)[i]; });
}
inline __mmask16 _mm512_test_epi32_mask(__m512i a, __m512i b) {
  return MaskOf([&](int i) { return (((I32x16)a)[i] & ((I32x16)b)[i]) != 0; });
}
// b where the mask has a bit, else a.
inline __m512 _mm512_mask_blend_ps(__mmask16 mask, __m512 a, __m512 b) {
  return ByLane<__m512>([&](int i) { return mask >> i & 1 ? b[i] : a[i]; });
}
inline __m512i _mm512_mask_mov_epi32(__m512i otherwise, __mmask16 mask, __m512i a) {
  return (__m512i)_mm512_mask_blend_ps(mask, (__m512)otherwise, (__m512)a);
}
inline __m512i _mm512_mask_or_epi32(__m512i otherwise, __mmask16 mask, __m512i a, __m512i b) {
  return _mm512_mask_mov_epi32(otherwise, mask, _mm512_or_si512(a, b));
}
// The lanes of the mask, one after the other, then zeros.
inline __m512 _mm512_maskz_compress_ps(__mmask16 mask, __m512 a) {
  __m512 out = {};
  for (int i = 0, at = 0; i < kFloatLanes; ++i) {
    if (mask >> i & 1) out[at++] = a[i];
  }
  return out;
}

// Permutations.

// The lower half of a register, or the upper one.
inline __m256i _mm512_extracti64x4_epi64(__m512i a, int half) {
  __m256i out;
  memcpy(&out, reinterpret_cast<const char*>(&a) + (half & 1) * sizeof out, sizeof out);
  return out;
}
// Lanes of a and b in turns, from the lower or the upper half of each 16 bytes.
template <typename Lanes>
inline Lanes Unpacked(Lanes a, Lanes b, bool upper) {
  constexpr int kBlock = 16 / sizeof a[0];
  return ByLane<Lanes>([&](int i) {
    const int from = i / kBlock * kBlock + (upper ? kBlock / 2 : 0) + i % kBlock / 2;
    return i % 2 ? b[from] : a[from];
  });
}
inline __m512i _mm512_unpacklo_epi32(__m512i a, __m512i b) { return (__m512i)Unpacked((I32x16)a, (I32x16)b, false); }
inline __m512i _mm512_unpackhi_epi32(__m512i a, __m512i b) { return (__m512i)Unpacked((I32x16)a, (I32x16)b, true); }
inline __m512i _mm512_unpacklo_epi16(__m512i a, __m512i b) { return (__m512i)Unpacked((U16x32)a, (U16x32)b, false); }
inline __m512i _mm512_unpackhi_epi16(__m512i a, __m512i b) { return (__m512i)Unpacked((U16x32)a, (U16x32)b, true); }
inline __m512i _mm512_unpacklo_epi64(__m512i a, __m512i b) { return (__m512i)Unpacked((I64x8)a, (I64x8)b, false); }
inline __m512i _mm512_unpackhi_epi64(__m512i a, __m512i b) { return (__m512i)Unpacked((I64x8)a, (I64x8)b, true); }
// Blocks of 16 bytes: two of a, then two of b; two bits of `which` for each.
inline __m512i _mm512_shuffle_i32x4(__m512i a, __m512i b, int which) {
  return (__m512i)ByLane<I32x16>([&](int i) {
    const int from = 4 * (which >> (i / 4 * 2) & 3) + i % 4;
    return i < 8 ? ((I32x16)a)[from] : ((I32x16)b)[from];
  });
}
inline __m512 _mm512_permutex2var_ps(__m512 a, __m512i which, __m512 b) {
  return ByLane<__m512>([&](int i) {
    const int from = ((I32x16)which)[i];
    return from & 16 ? b[from & 15] : a[from & 15];
  });
}
inline __m512i _mm512_permutexvar_epi16(__m512i which, __m512i a) {
  return (__m512i)ByLane<U16x32>([&](int i) { return ((U16x32)a)[((U16x32)which)[i] & 31]; });
}

}  // namespace
}  // namespace penstock
