// Samples a row's next token: penalties, bias, forbidden tokens, top_k, top_p, min_p, the draw; and log-probabilities.
//
// A row is processed in blocks, by one thread or by several. What a block writes, and the order in which blocks are
// added up, do not depend on that, so a row's result depends on that row alone.
#pragma once

#include <cstdint>

namespace penstock {

constexpr int64_t kSampleChunk = 512;                // ids; the draw picks a chunk, then a token in it
constexpr int64_t kSampleBlock = 16 * kSampleChunk;  // ids; 32 KiB of logits
constexpr int64_t kSampleLanes = 16;                 // the most lanes of a vector

inline int64_t SampleChunks(int64_t vocab) { return (vocab + kSampleChunk - 1) / kSampleChunk; }
inline int64_t SampleBlocks(int64_t vocab) { return (vocab + kSampleBlock - 1) / kSampleBlock; }

struct SampleRow {
  int64_t vocab;
  const float* logits;      // [vocab]
  const int32_t* history;   // [vocab], or null without penalties: times generated; bit 30: in the prompt
  const float* bias;        // [vocab] or null; -infinity forbids
  const int32_t* mask;      // [vocab / 32 rounded up] or null; bit t % 32 of word t / 32: t is allowed
  const int32_t* stop_ids;  // [num_stop_ids] forbidden ids; numbers that are no ids are skipped
  int64_t num_stop_ids;
  const float* floats;    // [kSampleFloats]
  const int32_t* ints;    // [kSampleInts]
  const float* uniforms;  // [2]
  int64_t num_top;        // log-probabilities of the sampled token and of so many others; -1: none

  // Whether x, from which the token is chosen, differs from the logits.
  bool edited() const { return history || bias || mask || num_stop_ids; }
};

struct SampleResult {
  int32_t* token;
  float* logprob;
  int32_t* top_ids;  // [num_top]
  float* top_logprobs;
};

// The memory that sampling a row needs. When `Draw` begins, and between two of its filters, everything below
// `lane_peaks` is free: a filter may use it for what it computes.
struct SampleWork {
  float* x;           // [vocab + a vector], for rows whose logits are edited
  float* raw_peaks;   // [chunks] the largest logit
  float* peaks;       // [chunks] the largest x
  float* lane_peaks;  // [chunks, lanes] the largest x in this lane of the chunk's vectors
  double* sums;       // [blocks] of e^(logit - the block's largest), if there are log-probabilities
  bool* broken;       // [blocks] whether a logit is NaN
  float* masses;      // [chunks] the sum of weights
  int64_t* counts;    // [blocks] how many distances `collect` found
  double* nearer;     // [blocks] the weight of the smaller distances, which it only summed
  float* distances;   // [blocks, kSampleBlock], later without gaps
  float* weights;     // the weights of `distances`
  float* left;        // [vocab] the distances that SampleReach still searches
  float* left_weights;
  float* order;       // [chunks, lanes], in which the k-th largest value is found
  float* tops;        // [num_top, kSampleChunk] chunks that hold some of the largest logits
  int64_t* top_rows;  // [chunks] the chunk's row in tops, or -1
};

// A token's distance is the largest x, the peak, minus its x; its weight is 2^(-distance * scale).
struct SampleRange {
  float peak, scale;
  float near, far;  // the range: distances above `near`, and at most `far`, which is finite
};

// The operations on vectors, for one instruction set.
struct SampleKernel {
  int64_t lanes;
  // Fills in x, peaks, and everything else of `block` that is computed directly from the logits.
  void (*build)(const SampleRow& row, const SampleWork& work, int64_t block);
  // Sums the weights of distances up to `reach` for each chunk.
  void (*weigh_chunks)(const SampleRow& row, const SampleWork& work, int64_t block, float peak, float scale,
                       float reach);
  // Collects the distances in the range, in order of their ids, and the summed weight of smaller distances.
  void (*collect)(const SampleRow& row, const SampleWork& work, int64_t block, const SampleRange& range);
  void (*weigh)(const float* distances, int64_t count, float scale, float* weights);
  float (*peak)(const float* x, int64_t count);
  // The first index of `value`, which must be among x and not -infinity.
  int64_t (*find)(const float* x, int64_t count, float value);
};

const SampleKernel& SampleAvx2();
const SampleKernel& SampleAvx512();

}  // namespace penstock
