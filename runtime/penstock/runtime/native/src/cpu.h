// Which instructions this machine has, asked once at run time.
#pragma once

namespace penstock {

// Ascending: a machine with one of these has those before it.
enum class Isa { kNone = 0, kAvx2 = 1, kAvx512 = 2, kAvx512Bf16 = 3, kAmx = 4 };

// The best set that processor and operating system allow, or a lower one set by penstock_limit_isa.
Isa CurrentIsa();

}  // namespace penstock

extern "C" {
// The best set of this machine, as the number of an Isa.
int penstock_best_isa();
// Use no set above `isa` from now on, for tests; returns the one in use.
int penstock_limit_isa(int isa);
}
