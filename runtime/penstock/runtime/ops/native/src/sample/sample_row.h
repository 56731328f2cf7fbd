// One row of the sampler, from its logits to its token.
#pragma once

#include <cstdint>
#include <functional>

#include "sample/sample.h"

namespace penstock {

// Calls a function for each of the row's blocks, in any order and on any threads.
using EachBlock = std::function<void(const std::function<void(int64_t block)>&)>;

// The places of a row's arrays in `memory`, which may be null. `bytes` receives their total size.
SampleWork CarveSample(char* memory, int64_t vocab, int64_t num_top, int64_t* bytes);

void SampleToken(const SampleKernel& kernel, const SampleRow& row, const SampleWork& work, const EachBlock& each,
                 const SampleResult& result);

// The smallest of work.distances[0..count) up to which work.weights, added to `before`, make at least `need`, which is
// above `before`. If all together fall short, the largest with any weight. Distances lie between 0 and `farthest`,
// which is finite; count >= 1.
float SampleReach(int64_t count, float farthest, double before, double need, const SampleWork& work);

}  // namespace penstock
