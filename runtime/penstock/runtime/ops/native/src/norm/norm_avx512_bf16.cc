#include "norm/norm_kernel.h"

namespace penstock {

void NormRowsAvx512Bf16(const NormJob& job, int64_t first, int64_t last) { Rows(job, first, last); }

}  // namespace penstock
