// Which instructions this machine has, asked once at run time.
#pragma once

namespace penstock {

// Ascending: a machine with one of these has those before it.
enum class Isa { kNone = 0, kAvx2 = 1, kAvx512 = 2, kAvx512Bf16 = 3, kAmx = 4 };

// The best set that processor and operating system allow, or a lower one set by penstock_limit_isa.
Isa CurrentIsa();

// Whether to multiply pairs of bf16 (VDPBF16PS) under kAvx512Bf16, rather than values widened to float32 (FMA). Intel's
// cores take two cycles for the former and half a cycle for the latter, which is so twice as fast (measured on an
// Emerald Rapids: 105 against 215 GFLOP/s a core); others are taken to be made for pairs. Decided by vendor, not by
// time: a machine's results must not change from start to start.
bool UsePairs();

}  // namespace penstock

extern "C" {
// The best set of this machine, as the number of an Isa.
int penstock_best_isa();
// Use no set above `isa` from now on, for tests; returns the one in use.
int penstock_limit_isa(int isa);
// Whether UsePairs from now on: 0 no, 1 yes, -1 as the processor likes; for tests.
void penstock_use_pairs(int pairs);
}
