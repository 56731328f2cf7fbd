// AVX2 with FMA. bf16 weights are widened to float32, and int8 weights to int16.
#include "linear/linear_vector.h"

namespace penstock {
namespace {

struct WideBf16 {
  using Sum = __m256;
  using Operand = __m256;
  static constexpr int kParts = 2, kSteps = 2, kRows = 6;
  static constexpr Form kForm = Form::kFloat;
  static Sum Zero() { return _mm256_setzero_ps(); }
  template <int kStep>
  static Operand Weights(const char* tile_row, int part) {
    const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(tile_row) + part);
    if (kStep == 0) {
      return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
    }
    return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xffff0000))));
  }
  static Operand Word(const uint32_t* x) { return _mm256_set1_ps(*reinterpret_cast<const float*>(x)); }
  // sum += weights * word. An instruction written out, because twelve sums, two weights and a word all but fill the
  // registers: given the intrinsic, GCC now and then has the result in the word's register, and keeps sums in memory.
  static Sum Add(Sum sum, Operand weights, Operand word) {
    __asm__("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(weights), "x"(word));
    return sum;
  }
  static void Finish(float* to, const Sum* sum) {
    _mm256_storeu_ps(to, sum[0]);
    _mm256_storeu_ps(to + 8, sum[1]);
  }
};

// A register holds the fours of four outputs as int16, so each output has two sums until the end. (_mm256_maddubs_epi16
// would take bytes, but it saturates.)
struct WideInt8 {
  using Sum = __m256i;
  using Operand = __m256i;
  static constexpr int kParts = 4, kSteps = 1, kRows = 2;
  static constexpr Form kForm = Form::kFour;
  static Sum Zero() { return _mm256_setzero_si256(); }
  template <int kStep>
  static Operand Weights(const char* tile_row, int part) {
    return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(tile_row) + part));
  }
  static Operand Word(const uint32_t* x) { return _mm256_cvtepi8_epi16(_mm_set1_epi32(static_cast<int>(*x))); }
  static Sum Add(Sum sum, Operand weights, Operand word) {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(weights, word));
  }
  static void Finish(float* to, const Sum* sum) {
    // hadd interleaves its operands by 128-bit lane; the permutation puts the eight sums in order.
    for (int half = 0; half < 2; ++half) {
      const __m256i both = _mm256_hadd_epi32(sum[2 * half], sum[2 * half + 1]);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to) + half, _mm256_permute4x64_epi64(both, 0xd8));
    }
  }
};

struct Avx2 {
  using Bf16 = WideBf16;
  using Int8 = WideInt8;
};

}  // namespace

const LinearKernel& LinearAvx2() { return VectorLinear<Avx2>::Kernel(); }

}  // namespace penstock
