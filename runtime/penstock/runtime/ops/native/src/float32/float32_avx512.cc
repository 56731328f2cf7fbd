#include "float32/float32_kernel.h"

namespace penstock {

const Float32Kernel& Float32Avx512() {
  static const Float32Kernel kernel{kBlocks, kRows, nullptr, nullptr, MultiplyRows, NormalizeRows};
  return kernel;
}

}  // namespace penstock
