// The operations of recurrent layers: a causal convolution, and the recurrences of the gated delta rule and of Mamba-2.
//
// Each keeps an entry of state for a row, and goes through the row's tokens one after the other, in prefill as in
// decode. So what a token gives depends on the tokens before it alone, bit for bit, and not on how they were cut into
// steps.
#pragma once

#include <cstdint>

#include "state/rows.h"

namespace penstock {

constexpr int64_t kStateBlock = 32;  // tokens of a row whose queries, keys and values are prepared at once
constexpr int64_t kMostTaps = 8;     // of a convolution

// y = activation(bias + the sum over j of weight[j] * the input of `taps` - 1 - j tokens before), for each channel.
// The state holds the last taps - 1 inputs in float32, the oldest first.
struct ConvJob {
  const char* x;                  // [tokens, channels], bf16 or float32
  const char *weight, *bias;      // [taps, channels], and [channels] or null
  const float* zeros;             // [channels]
  float* state;                   // [entries, taps - 1, channels]
  char* y;                        // [tokens, channels], like x
  int64_t channels, taps;         // channels is a multiple of 16
  bool bf16, bf16_weights, silu;  // what x, and weight and bias, are in
};

// Of each head a state S of key_dim x value_dim float32, and for each token, with its key k, query q and value v:
//   u = beta * (v - decay * S^T k) in the delta rule, beta * v otherwise
//   S = decay * S + k u^T
//   y = S^T q + skip * v
// Delta rule: q and k are divided by their length, q also by the root of key_dim; beta is the sigmoid of the token's
// first logit, and decay = exp(-exp(a_log) * softplus(second logit + dt_bias)). Mamba-2: beta = softplus(logit +
// dt_bias) within [dt_low, dt_high], decay = exp(-exp(a_log) * beta).
struct RecurrenceJob {
  const char* mixed;                          // [tokens, width], bf16 or float32: queries, keys and values
  int64_t width, query_at, key_at, value_at;  // where a token's queries, keys and values begin
  const float* logits;                        // [tokens, heads], or [tokens, 2 * heads] in the delta rule
  const float *a_log, *dt_bias;               // [heads]
  const float* skip;                          // [heads] or null
  float* state;                               // [entries, heads, key_dim, value_dim]
  float* y;                                   // [tokens, heads, value_dim]
  int64_t heads, key_heads;                   // each key head serves heads / key_heads heads, one after the other
  int64_t key_dim, value_dim;                 // multiples of 16
  float dt_low, dt_high;
  bool bf16, delta, aligned;  // aligned: the state begins on a cache line
  int64_t scratch_bytes() const { return 4 * (key_dim * value_dim + kStateBlock * (2 * key_dim + 4)); }
};

// out = the normalised y, gated. Each run of `size` channels is divided by its root mean square and multiplied by norm
// and silu(gate); with `gate_first`, silu(gate) is multiplied before the norm instead.
struct GatedNormJob {
  float* y;           // [tokens, channels]; overwritten
  const char* gate;   // [tokens, channels], bf16 or float32
  const float* norm;  // [size] if runs share it, else [channels]
  char* out;          // [tokens, channels], like gate
  int64_t channels, size;
  float eps;
  bool bf16, gate_first, shared_norm;
};

struct StateKernels {
  // Tokens [begin, end) of a row, and channels [low, high).
  void (*conv)(const ConvJob&, const StateRow&, int64_t begin, int64_t end, int64_t low, int64_t high);
  // Writes channels [low, high) of a row's new state, after all of its tokens.
  void (*keep)(const ConvJob&, const StateRow&, int64_t low, int64_t high);
  // Values [low, high) of one head of one row; `scratch` holds job.scratch_bytes.
  void (*recur)(const RecurrenceJob&, const StateRow&, int64_t head, int64_t low, int64_t high, char* scratch);
  // Tokens [begin, end).
  void (*gated_norm)(const GatedNormJob&, int64_t begin, int64_t end);
};

const StateKernels& StateAvx2();
const StateKernels& StateAvx512();

}  // namespace penstock
