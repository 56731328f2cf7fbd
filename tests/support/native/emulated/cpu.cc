// Takes the place of src/common/cpu.cc: a processor of the instruction set that the test asks for, all of which are
// emulated except AVX2.
#include "common/cpu.h"

#include <atomic>

namespace penstock {

std::atomic<int> threads_with_tiles{0};

namespace {

std::atomic<int> emulated_isa{static_cast<int>(Isa::kAmx)};
std::atomic<bool> emulated_pairs{false};

}  // namespace

Isa CurrentIsa() { return static_cast<Isa>(emulated_isa.load()); }
bool UsePairs() { return emulated_pairs; }

}  // namespace penstock

extern "C" {

// Sets what CurrentIsa, as the number of an Isa, and UsePairs return from now on.
__attribute__((visibility("default"))) void penstock_emulate(int isa, int pairs) {
  penstock::emulated_isa = isa;
  penstock::emulated_pairs = pairs != 0;
}

__attribute__((visibility("default"))) int penstock_threads_with_tiles() { return penstock::threads_with_tiles; }
}
