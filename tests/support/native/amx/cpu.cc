// Takes the place of src/common/cpu.cc: a processor with AMX, and no kernels for any other instruction set.
#include "common/cpu.h"

#include <atomic>
#include <cstdlib>

#include "attention/attention.h"
#include "linear/linear.h"

namespace penstock {

std::atomic<int> threads_with_tiles{0};

Isa CurrentIsa() { return Isa::kAmx; }
bool UsePairs() { return false; }

const LinearKernel& LinearAvx2() { abort(); }
const LinearKernel& LinearAvx512() { abort(); }
const LinearKernel& LinearAvx512Bf16() { abort(); }
const AttentionKernel& AttentionAvx2() { abort(); }
const AttentionKernel& AttentionAvx512() { abort(); }
const AttentionKernel& AttentionAvx512Bf16() { abort(); }

}  // namespace penstock

extern "C" __attribute__((visibility("default"))) int penstock_threads_with_tiles() {
  return penstock::threads_with_tiles;
}
