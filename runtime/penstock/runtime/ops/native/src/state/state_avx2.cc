#include "state/state_kernels.h"

namespace penstock {

const StateKernels& StateAvx2() {
  static constexpr StateKernels kKernels = {Convolve, Keep, Recur, GatedNorm};
  return kKernels;
}

}  // namespace penstock
