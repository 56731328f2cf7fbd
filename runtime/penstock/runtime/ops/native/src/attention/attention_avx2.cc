#include "attention/attention_run.h"

namespace penstock {
namespace {

int64_t Bytes(const AttentionJob& job, int64_t tiles) {
  return job.bf16 ? ScratchBytes<Form::kWiden>(job, tiles) : ScratchBytes<Form::kFloat>(job, tiles);
}

void Run(const AttentionJob& job, const AttentionUnit& unit, const AttentionUnit& next, char* scratch) {
  if (job.bf16) {
    RunUnit<Form::kWiden>(job, unit, next, scratch);
  } else {
    RunUnit<Form::kFloat>(job, unit, next, scratch);
  }
}

}  // namespace

const AttentionKernel& AttentionAvx2() {
  static constexpr AttentionKernel kernel{Nothing, Nothing, Bytes, Run};
  return kernel;
}

}  // namespace penstock
