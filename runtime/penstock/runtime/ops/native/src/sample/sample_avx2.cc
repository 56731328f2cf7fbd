#include "sample/sample_kernel.h"

namespace penstock {

const SampleKernel& SampleAvx2() {
  static constexpr SampleKernel kernel{kWidth, Build, WeighChunks, Collect, Weigh, Peak, Find};
  return kernel;
}

}  // namespace penstock
