// What kernels may use of the machine, set for the whole process.
#pragma once

#include <cstdint>

namespace penstock {

// The most threads of a loop, including its caller's.
int64_t MaxThreads();

// The most bytes of one Scratch.
int64_t MaxScratch();

}  // namespace penstock

extern "C" {
// Sets MaxThreads from now on; the default is no limit.
void penstock_limit_threads(int64_t threads);
// Sets MaxScratch from now on, for tests; the default is no limit.
void penstock_limit_scratch(int64_t bytes);
}
