// Numbers that the sampler shares with its callers, the same as in sampling_codes.py. A test compares the two files.
#pragma once

#include <cstdint>

namespace penstock {

// Bits of a row's features.
constexpr int32_t kPenalties = 1;
constexpr int32_t kBias = 2;
constexpr int32_t kMask = 4;

// Columns of a row's numbers, in the order of FLOATS and INTS of requests/sampling.py.
enum SampleFloat : int64_t {
  kTemperature,
  kTopP,
  kMinP,
  kPresencePenalty,
  kFrequencyPenalty,
  kRepetitionPenalty,
  kSampleFloats,
};
enum SampleInt : int64_t { kTopK, kSampleInts };

// The bit of a token's count of occurrences that says that the token is in the prompt; the bits below it are the count.
constexpr int kInPromptBit = 30;

// Stands in place of a token if a logit is NaN, or the largest is infinite.
constexpr int32_t kNonFinite = -2;

}  // namespace penstock
