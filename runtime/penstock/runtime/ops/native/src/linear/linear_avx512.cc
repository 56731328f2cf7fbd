// AVX-512 with VNNI: bf16 weights are widened to float32.
#include "linear/linear_avx512.h"
#include "linear/linear_vector.h"

namespace penstock {
namespace {

struct Avx512 {
  using Bf16 = WideBf16;
  using Int8 = VnniInt8;
  template <int kBits, LeastOf kLeast>
  using Codes = VnniCodes<kBits, kLeast>;
  template <int kBits>
  using Nested = VnniNested<kBits>;
  using Table = VnniTable;
};

}  // namespace

const LinearKernel& LinearAvx512() { return VectorLinear<Avx512>::Kernel(); }

}  // namespace penstock
