// AVX2 with FMA. bf16 weights are widened to float32, and int8 weights to int16, in registers: the shifts go to ports
// of the processor that multiplication leaves free.
#include "linear/linear_vector.h"

namespace penstock {
namespace {

struct WideBf16 {
  using Sum = __m256;
  using Operand = __m256;
  static constexpr int kParts = 2, kSteps = 2, kRows = 6, kPairedRows = 0, kWidth = 8;
  static constexpr Form kForm = Form::kFloat;
  static Sum LoadSum(const float* from) { return _mm256_loadu_ps(from); }
  static void StoreSum(float* to, Sum sum) { _mm256_storeu_ps(to, sum); }
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
};

// A register holds two of the four inputs of eight outputs as int16: shifts widen them in place, 0 and 2, then 1 and 3.
// (_mm256_maddubs_epi16 would take bytes, but it saturates.)
struct WideInt8 {
  using Sum = __m256i;
  using Operand = __m256i;
  static constexpr int kParts = 2, kSteps = 2, kRows = 6, kPairedRows = 0, kWidth = 8;
  static constexpr Form kForm = Form::kHalves;
  static Sum LoadSum(const float* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }
  static void StoreSum(float* to, Sum sum) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), sum); }
  template <int kStep>
  static Operand Weights(const char* tile_row, int part) {
    const __m256i fours = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(tile_row) + part);
    return _mm256_srai_epi16(kStep == 0 ? _mm256_slli_epi16(fours, 8) : fours, 8);
  }
  static Operand Word(const uint32_t* x) { return _mm256_set1_epi32(static_cast<int>(*x)); }
  // Instructions written out, as in WideBf16: with twelve sums, GCC has no register left for the product.
  static Sum Add(Sum sum, Operand weights, Operand word) {
    __m256i product;
    __asm__("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+x"(sum), "=&x"(product) : "x"(weights), "x"(word));
    return sum;
  }
};

struct Avx2 {
  using Bf16 = WideBf16;
  using Int8 = WideInt8;
};

}  // namespace

const LinearKernel& LinearAvx2() { return VectorLinear<Avx2>::Kernel(); }

}  // namespace penstock
