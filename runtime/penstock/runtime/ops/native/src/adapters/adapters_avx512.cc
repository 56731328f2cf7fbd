#include "adapters/adapters_kernel.h"

namespace penstock {

void TimesAAvx512(const AdaptedGroup& group, int64_t k, int64_t rank, int64_t first, int64_t last, float* wide) {
  MultiplyByA(group, k, rank, first, last, wide);
}

}  // namespace penstock
