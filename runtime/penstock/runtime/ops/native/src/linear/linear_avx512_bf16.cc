// AVX-512 with products of bf16 pairs (VDPBF16PS) and VNNI.
#include "linear/linear_avx512.h"
#include "linear/linear_vector.h"

namespace penstock {
namespace {

struct PairBf16 {
  using Sum = __m512;
  using Operand = __m512i;
  static constexpr bool kByGroup = false;
  static constexpr int kParts = 1, kSteps = 1, kRows = 16, kPairedRows = 8, kWidth = 16;
  static constexpr Form kForm = Form::kPair;
  static Sum LoadSum(const float* from) { return _mm512_loadu_ps(from); }
  static void StoreSum(float* to, Sum sum) { _mm512_storeu_ps(to, sum); }
  template <int kStep>
  static Operand Weights(const char* tile_row, int) {
    return _mm512_loadu_si512(tile_row);
  }
  static Operand Word(const uint32_t* x) { return _mm512_set1_epi32(static_cast<int>(*x)); }
  static Sum Add(Sum sum, Operand weights, Operand word) {
    return _mm512_dpbf16_ps(sum, (__m512bh)weights, (__m512bh)word);
  }
};

struct Avx512Bf16 {
  using Bf16 = PairBf16;
  using Int8 = VnniInt8;
  template <int kBits, LeastOf kLeast>
  using Codes = VnniCodes<kBits, kLeast>;
  template <int kBits>
  using Nested = VnniNested<kBits>;
  using Table = VnniTable;
};

}  // namespace

const LinearKernel& LinearAvx512Bf16() { return VectorLinear<Avx512Bf16>::Kernel(); }

}  // namespace penstock
