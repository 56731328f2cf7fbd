// AVX2 with FMA: bf16 weights are widened to float32, int8 ones to int16.
#include "linear_vector.h"

namespace penstock {
namespace {

struct Avx2 {
  using Sum = __m256;
  static constexpr int64_t kLanes = 8, kXBytes = 4;
  static constexpr bool kOffset = false;
  static Sum Zero() { return _mm256_setzero_ps(); }
  static void Store(float* to, Sum sum) { _mm256_storeu_ps(to, sum); }
  static void MulBf16(Sum& sum, const char* w, const char* x) {
    const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w));
    const float* values = reinterpret_cast<const float*>(x);
    const __m256 even = _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
    const __m256 odd = _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xffff0000))));
    sum = _mm256_fmadd_ps(even, _mm256_set1_ps(values[0]), sum);
    sum = _mm256_fmadd_ps(odd, _mm256_set1_ps(values[1]), sum);
  }
  // (_mm256_maddubs_epi16 would be one step less, but it saturates.)
  static void MulInt8(Sum& sum, const char* w, const char* x) {
    const __m256i weights = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w));
    const __m256i values = _mm256_cvtepi8_epi16(_mm_set1_epi32(Four(x)));
    const __m256i low = _mm256_madd_epi16(_mm256_cvtepi8_epi16(_mm256_castsi256_si128(weights)), values);
    const __m256i high = _mm256_madd_epi16(_mm256_cvtepi8_epi16(_mm256_extracti128_si256(weights, 1)), values);
    // hadd interleaves its operands by 128-bit lane; the permutation puts the eight sums in order.
    const __m256i both = _mm256_permute4x64_epi64(_mm256_hadd_epi32(low, high), 0xd8);
    sum = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(sum), both));
  }
};

}  // namespace

const LinearKernel& LinearAvx2() { return VectorLinear<Avx2>::Kernel(); }

}  // namespace penstock
