// The instruction sets of this machine, asked for once at run time.
#pragma once

namespace penstock {

// In ascending order: a machine that has one of these sets has all sets before it.
enum class Isa { kNone = 0, kAvx2 = 1, kAvx512 = 2, kAvx512Bf16 = 3, kAmx = 4 };

// The best set that the processor and the operating system allow, or a lower one that penstock_limit_isa has set.
Isa CurrentIsa();

// Whether to multiply pairs of bf16 (VDPBF16PS) under kAvx512Bf16, rather than values widened to float32 (FMA). Intel's
// cores take two cycles for the former and half a cycle for the latter, which is therefore twice as fast (measured on
// an Emerald Rapids: 105 against 215 GFLOP/s a core). Other cores are assumed to be faster with pairs. The vendor
// decides, not a measurement, because a machine's results must not change from start to start.
bool UsePairs();

// Returns that of several functions, one for each instruction set, which is for the set in use; null if there is none.
// They are functions, because even the constants of a set's file may be loaded with instructions that the machine
// lacks.
template <typename Function>
Function ForCurrentIsa(Function avx2, Function avx512, Function avx512_bf16, Function amx) {
  switch (CurrentIsa()) {
    case Isa::kAmx:
      return amx;
    case Isa::kAvx512Bf16:
      return avx512_bf16;
    case Isa::kAvx512:
      return avx512;
    case Isa::kAvx2:
      return avx2;
    case Isa::kNone:
      break;
  }
  return nullptr;
}

}  // namespace penstock

extern "C" {
// Returns the best set of this machine, as the number of an Isa.
int penstock_best_isa();
// Forbids sets above `isa` from now on, for tests. Returns the one in use.
int penstock_limit_isa(int isa);
// Sets what UsePairs returns from now on, for tests: 0 for false, 1 for true, -1 for what is faster on this processor.
void penstock_use_pairs(int pairs);
}
