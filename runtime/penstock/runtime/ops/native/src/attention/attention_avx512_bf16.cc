#include "attention/attention_run.h"

namespace penstock {

const AttentionKernel& AttentionAvx512Bf16() {
  static constexpr AttentionKernel kernel{Nothing, Nothing, QuantizeRow, VectorBytes<Form::kPairs>,
                                          VectorRun<Form::kPairs>};
  return kernel;
}

}  // namespace penstock
