// AVX-512 with VNNI but no bf16 products: weights are widened to float32.
#include "linear_vector.h"

namespace penstock {
namespace {

struct Avx512 {
  using Sum = __m512;
  static constexpr int64_t kLanes = 16, kXBytes = 4;
  static constexpr bool kOffset = true;
  static Sum Zero() { return _mm512_setzero_ps(); }
  static void Store(float* to, Sum sum) { _mm512_storeu_ps(to, sum); }
  static void MulBf16(Sum& sum, const char* w, const char* x) {
    const __m512i pairs = _mm512_loadu_si512(w);
    const float* values = reinterpret_cast<const float*>(x);
    const __m512 even = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
    const __m512 odd = _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000))));
    sum = _mm512_fmadd_ps(even, _mm512_set1_ps(values[0]), sum);
    sum = _mm512_fmadd_ps(odd, _mm512_set1_ps(values[1]), sum);
  }
  static void MulInt8(Sum& sum, const char* w, const char* x) {
    sum = _mm512_castsi512_ps(
        _mm512_dpbusd_epi32(_mm512_castps_si512(sum), _mm512_set1_epi32(Four(x)), _mm512_loadu_si512(w)));
  }
};

}  // namespace

const LinearKernel& LinearAvx512() { return VectorLinear<Avx512>::Kernel(); }

}  // namespace penstock
