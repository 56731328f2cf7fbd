#include "sample/sample_kernel.h"

namespace penstock {

const SampleKernel& SampleAvx512() {
  static constexpr SampleKernel kernel{kWidth, Build, WeighChunks, Collect, Weigh, Peak, Find};
  return kernel;
}

}  // namespace penstock
