#include "attention/attention_run.h"

namespace penstock {

const AttentionKernel& AttentionAvx2() {
  static constexpr AttentionKernel kernel{Nothing, Nothing, QuantizeRow, VectorBytes<Form::kWiden>,
                                          VectorRun<Form::kWiden>};
  return kernel;
}

}  // namespace penstock
