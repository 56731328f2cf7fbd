#include "attention/attention_run.h"

namespace penstock {

const AttentionKernel& AttentionAvx512() {
  static constexpr AttentionKernel kernel{DoNothing, DoNothing, QuantizeRow, VectorBytes, VectorRun};
  return kernel;
}

}  // namespace penstock
