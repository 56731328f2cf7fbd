#include "adapters/adapters_kernel.h"

namespace penstock {

const AdapterKernel& AdaptersAvx2() {
  static const AdapterKernel kernel{Down, Up};
  return kernel;
}

}  // namespace penstock
