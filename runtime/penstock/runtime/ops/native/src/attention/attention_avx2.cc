#include "attention/attention_run.h"

namespace penstock {

const AttentionKernel& AttentionAvx2() {
  static constexpr AttentionKernel kernel{DoNothing, DoNothing, QuantizeRow, VectorBytes, VectorRun};
  return kernel;
}

}  // namespace penstock
