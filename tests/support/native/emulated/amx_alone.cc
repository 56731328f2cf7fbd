// For a library that has the kernels for AMX, those for codes and for adapters, and no others.
#include <cstdlib>

#include "adapters/adapters.h"
#include "attention/attention.h"
#include "float32/float32.h"
#include "linear/linear.h"

namespace penstock {

void TimesAAvx2(const AdaptedGroup&, int64_t, int64_t, int64_t, int64_t, float*) { abort(); }
const LinearKernel& LinearAvx2() { abort(); }
const LinearKernel& LinearAvx512Bf16() { abort(); }
const Float32Kernel& Float32Avx2() { abort(); }
const Float32Kernel& Float32Avx512() { abort(); }
const AttentionKernel& AttentionAvx2() { abort(); }
const AttentionKernel& AttentionAvx512() { abort(); }
const AttentionKernel& AttentionAvx512Bf16() { abort(); }

}  // namespace penstock
