#include "rotate/rotate_kernel.h"

namespace penstock {

void RotateRowsAvx2(const RotateJob& job, int64_t first, int64_t last) { Rows(job, first, last); }

}  // namespace penstock
