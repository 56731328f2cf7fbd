// Calls intrinsics by name, for tests/runtime/ops/native/emulated/test_avx512.py.
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace penstock {
namespace {

// Registers of 64 bytes in memory, and a mask.
struct Operands {
  const char *a, *b, *c;
  char* out;
  __mmask16 mask;
};

__m512 F(const char* from) { return _mm512_loadu_ps(reinterpret_cast<const float*>(from)); }
__m512i I(const char* from) { return _mm512_loadu_si512(from); }

template <typename Register>
void Put(const Operands& r, Register value) {
  memcpy(r.out, &value, sizeof value);
}

__m256i LowHalf(const char* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }
__m128i LowQuarter(const char* from) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)); }

bool Call(const char* name, const Operands& r) {
  const auto is = [&](const char* other) { return strcmp(name, other) == 0; };
  if (is("max_ps")) return Put(r, _mm512_max_ps(F(r.a), F(r.b))), true;
  if (is("min_ps")) return Put(r, _mm512_min_ps(F(r.a), F(r.b))), true;
  if (is("abs_ps")) return Put(r, _mm512_abs_ps(F(r.a))), true;
  if (is("fmadd_ps")) return Put(r, _mm512_fmadd_ps(F(r.a), F(r.b), F(r.c))), true;
  if (is("fnmadd_ps")) return Put(r, _mm512_fnmadd_ps(F(r.a), F(r.b), F(r.c))), true;
  if (is("roundscale_ps")) return Put(r, _mm512_roundscale_ps(F(r.a), 0)), true;
  if (is("reduce_ps")) return Put(r, _mm512_reduce_ps(F(r.a), 0)), true;
  if (is("scalef_ps")) return Put(r, _mm512_scalef_ps(F(r.a), F(r.b))), true;
  if (is("reduce_add_ps")) return Put(r, _mm512_reduce_add_ps(F(r.a))), true;
  if (is("reduce_max_ps")) return Put(r, _mm512_reduce_max_ps(F(r.a))), true;
  if (is("reduce_max_epi32")) return Put(r, _mm512_reduce_max_epi32(I(r.a))), true;
  if (is("add_epi32")) return Put(r, _mm512_add_epi32(I(r.a), I(r.b))), true;
  if (is("max_epi32")) return Put(r, _mm512_max_epi32(I(r.a), I(r.b))), true;
  if (is("slli_epi32")) return Put(r, _mm512_slli_epi32(I(r.a), 31)), true;
  if (is("srli_epi32")) return Put(r, _mm512_srli_epi32(I(r.a), 31)), true;
  if (is("broadcast_i32x4")) return Put(r, _mm512_broadcast_i32x4(LowQuarter(r.a))), true;
  if (is("shuffle_epi8")) return Put(r, _mm512_shuffle_epi8(I(r.a), I(r.b))), true;
  if (is("dpbusd_epi32")) return Put(r, _mm512_dpbusd_epi32(I(r.c), I(r.a), I(r.b))), true;
  if (is("dpwssd_epi32")) return Put(r, _mm512_dpwssd_epi32(I(r.c), I(r.a), I(r.b))), true;
  if (is("cvtepi8_epi16")) return Put(r, _mm512_cvtepi8_epi16(LowHalf(r.a))), true;
  if (is("castsi512_si256")) return Put(r, _mm512_castsi512_si256(I(r.a))), true;
  if (is("extracti64x4_epi64")) return Put(r, _mm512_extracti64x4_epi64(I(r.a), 1)), true;
  if (is("unpacklo_epi16")) return Put(r, _mm512_unpacklo_epi16(I(r.a), I(r.b))), true;
  if (is("unpackhi_epi16")) return Put(r, _mm512_unpackhi_epi16(I(r.a), I(r.b))), true;
  if (is("cvtepu16_epi32")) return Put(r, _mm512_cvtepu16_epi32(LowHalf(r.a))), true;
  if (is("cvtepi8_epi32")) return Put(r, _mm512_cvtepi8_epi32(LowQuarter(r.a))), true;
  if (is("cvtepi32_epi16")) return Put(r, _mm512_cvtepi32_epi16(I(r.a))), true;
  if (is("cvtepi32_epi8")) return Put(r, _mm512_cvtepi32_epi8(I(r.a))), true;
  if (is("cvtph_ps")) return Put(r, _mm512_cvtph_ps(LowHalf(r.a))), true;
  if (is("cvtepi32_ps")) return Put(r, _mm512_cvtepi32_ps(I(r.a))), true;
  if (is("cvtps_epi32")) return Put(r, _mm512_cvtps_epi32(F(r.a))), true;
  if (is("cmp_eq")) return Put(r, _mm512_cmp_ps_mask(F(r.a), F(r.b), _CMP_EQ_OQ)), true;
  if (is("cmp_lt")) return Put(r, _mm512_cmp_ps_mask(F(r.a), F(r.b), _CMP_LT_OQ)), true;
  if (is("cmp_le")) return Put(r, _mm512_cmp_ps_mask(F(r.a), F(r.b), _CMP_LE_OQ)), true;
  if (is("cmp_unord")) return Put(r, _mm512_cmp_ps_mask(F(r.a), F(r.b), _CMP_UNORD_Q)), true;
  if (is("cmple_epi32_mask")) return Put(r, _mm512_cmple_epi32_mask(I(r.a), I(r.b))), true;
  if (is("test_epi32_mask")) return Put(r, _mm512_test_epi32_mask(I(r.a), I(r.b))), true;
  if (is("mask_blend_ps")) return Put(r, _mm512_mask_blend_ps(r.mask, F(r.a), F(r.b))), true;
  if (is("mask_mov_epi32")) return Put(r, _mm512_mask_mov_epi32(I(r.a), r.mask, I(r.b))), true;
  if (is("mask_or_epi32")) return Put(r, _mm512_mask_or_epi32(I(r.a), r.mask, I(r.b), I(r.c))), true;
  if (is("maskz_compress_ps")) return Put(r, _mm512_maskz_compress_ps(r.mask, F(r.a))), true;
  if (is("unpacklo_epi32")) return Put(r, _mm512_unpacklo_epi32(I(r.a), I(r.b))), true;
  if (is("unpackhi_epi32")) return Put(r, _mm512_unpackhi_epi32(I(r.a), I(r.b))), true;
  if (is("unpacklo_epi64")) return Put(r, _mm512_unpacklo_epi64(I(r.a), I(r.b))), true;
  if (is("unpackhi_epi64")) return Put(r, _mm512_unpackhi_epi64(I(r.a), I(r.b))), true;
  if (is("shuffle_i32x4")) return Put(r, _mm512_shuffle_i32x4(I(r.a), I(r.b), 0x1b)), true;
  if (is("permutex2var_ps")) return Put(r, _mm512_permutex2var_ps(F(r.a), I(r.b), F(r.c))), true;
  if (is("permutexvar_epi16")) return Put(r, _mm512_permutexvar_epi16(I(r.a), I(r.b))), true;
  if (is("mask_storeu_epi32")) return _mm512_mask_storeu_epi32(r.out, r.mask, I(r.a)), true;
  if (is("mask_loadu_ps")) return Put(r, _mm512_mask_loadu_ps(F(r.a), r.mask, reinterpret_cast<const float*>(r.b))), true;
  if (is("maskz_loadu_epi32")) return Put(r, _mm512_maskz_loadu_epi32(r.mask, r.b)), true;
  if (is("cvtneps_pbh")) return Put(r, _mm512_cvtneps_pbh(F(r.a))), true;
  if (is("cvtne2ps_pbh")) return Put(r, _mm512_cvtne2ps_pbh(F(r.a), F(r.b))), true;
  if (is("dpbf16_ps")) return Put(r, _mm512_dpbf16_ps(F(r.c), (__m512bh)I(r.a), (__m512bh)I(r.b))), true;
  return false;
}

}  // namespace
}  // namespace penstock

extern "C" {

// Returns 0 if there is none of this name.
__attribute__((visibility("default"))) int call(const char* name, const char* a, const char* b, const char* c,
                                                char* out, int mask) {
  return penstock::Call(name, {a, b, c, out, static_cast<__mmask16>(mask)});
}
}
