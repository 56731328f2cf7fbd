// AVX-512 with bf16 products (VDPBF16PS) and VNNI.
#include "linear_vector.h"

namespace penstock {
namespace {

struct Avx512Bf16 {
  using Sum = __m512;
  static constexpr int64_t kLanes = 16, kXBytes = 2;
  static constexpr bool kOffset = true;
  static Sum Zero() { return _mm512_setzero_ps(); }
  static void Store(float* to, Sum sum) { _mm512_storeu_ps(to, sum); }
  static void MulBf16(Sum& sum, const char* w, const char* x) {
    sum = _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(_mm512_loadu_si512(w)),
                           reinterpret_cast<__m512bh>(_mm512_set1_epi32(Four(x))));
  }
  static void MulInt8(Sum& sum, const char* w, const char* x) {
    sum = _mm512_castsi512_ps(
        _mm512_dpbusd_epi32(_mm512_castps_si512(sum), _mm512_set1_epi32(Four(x)), _mm512_loadu_si512(w)));
  }
};

}  // namespace

const LinearKernel& LinearAvx512Bf16() { return VectorLinear<Avx512Bf16>::Kernel(); }

}  // namespace penstock
