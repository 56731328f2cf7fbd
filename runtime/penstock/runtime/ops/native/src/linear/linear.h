// y = x W^T over weights packed in tiles: the definitions that the kernels of each instruction set share.
//
// A packed bf16 weight [out, in] is [out / 16][in / 32][16 pairs of in][16 out][2]: each 1 KiB tile is the B operand
// of AMX's TDPBF16PS and, row by row, the vector operand of AVX-512's VDPBF16PS, and the whole weight is read in
// one ascending sweep. A packed int8 weight is [out / 16][in / 64][16 fours of in][16 out][4].
// Codes lie as ops/codes.py says. Integers with a scale for each 32 inputs, or nested ones, whose scales are integers,
// too, are multiplied as they are, and places in a table as the integers that stand there.
// Small floats (E2M1 and E4M3) become tiles of bf16 in the first- or second-level cache (linear_expand.h), and from
// there on they are multiplied, and have the bits, as a weight that is bf16 in memory.
#pragma once

#include <cstdint>

#include "adapters/adapters.h"
#include "common/activations.h"

namespace penstock {

// What the tiles of a weight hold.
enum class Format {
  kBf16,
  kInt8,
  kCodes4,
  kCodes4Zeros,
  kCodes8,
  kCodes8Zeros,
  kCodes4Minima,
  kCodes8Minima,
  kNested4,
  kNested6,
  kTable4,
  kE2m1,
  kE4m3Groups,
  kE4m3
};

constexpr int64_t kBlockOut = 16;  // outputs of a tile
constexpr int64_t kGroup = 32;     // inputs that share a scale of codes, but for those of kNested6 (16) and E4M3
constexpr int64_t kWide = 128;     // inputs that share a scale of kE4m3Groups; those of kE4m3 have one for all
constexpr int64_t kLine = 64;      // bytes of a line: of codes, of the scales of two groups, of a block's factors
constexpr int64_t kTileBytes = 1024;
constexpr int64_t kMaxWeights = 3;
constexpr int64_t kRowBlock = 16;  // rows of x that put_rows takes at once

// Whether a weight has integers with scales by group; whether these have a factor for each output behind all inputs;
// and whether it has small floats.
constexpr bool IsCodes(Format format) { return format >= Format::kCodes4 && format <= Format::kTable4; }
constexpr bool HasFactors(Format format) { return IsCodes(format) && format < Format::kNested4; }
constexpr bool IsSmallFloats(Format format) { return format >= Format::kE2m1; }

// What the inputs of a weight are a multiple of: so many small floats are expanded at least; and nested integers would
// have the size of others with fewer.
constexpr int64_t InputsAtOnce(Format format) {
  const bool is_nested = format == Format::kNested4 || format == Format::kNested6;
  return format == Format::kE4m3Groups || is_nested ? kWide : 2 * kGroup;
}

// Whether the integers have minima in float16. Behind their factors is a line of zeros, so that their size is not that
// of integers with zeros.
constexpr bool HasMinima(Format format) { return format == Format::kCodes4Minima || format == Format::kCodes8Minima; }

// The bytes of the tiles of k inputs, and of 16 outputs of a weight with k inputs.
constexpr int64_t BytesOfTiles(Format format, int64_t k) {
  constexpr int64_t kBytesOfTile[] = {2048, 1024, 576, 640, 1088, 1152, 640, 1152, 640, 960, 576, 544, 1056, 1024};
  return k * kBytesOfTile[static_cast<int>(format)] / 64;
}
constexpr int64_t BytesOfBlock(Format format, int64_t k) {
  const bool has_end = HasFactors(format) || format == Format::kE4m3;
  return BytesOfTiles(format, k) + (has_end ? kLine : 0) + (HasMinima(format) ? kLine : 0);
}

struct PackedWeight {
  const char* tiles;
  const float* scale;    // kInt8: [out], one for each output; else null
  const uint16_t* bias;  // bf16 [out] or null
  int64_t num_blocks;    // out / 16
};

// The part of a call of the operation whose weights have one format; most calls are one job. The outputs of several
// weights lie side by side in a row of y. With an activation there are two weights of equal shape, and
// y = act(x W0^T) * (x W1^T); or one weight and `up`, and y = act(x W^T) * up. Otherwise
// y = residual + softcap * tanh(scale * x W^T / softcap), where biases belong to the products.
struct LinearJob {
  const void* x;         // in the kernel's own form, see LinearKernel::put_rows
  const float* x_scale;  // kInt8: [m]
  int64_t m, k;
  PackedWeight weights[kMaxWeights];
  int64_t num_weights;
  int64_t first_block;  // where their outputs begin in a row of y, in blocks
  Activation activation;
  float limit;  // of the activation, see Activate
  Format format;
  uint16_t* y_bf16;          // [m, ldy], or null if y is float32
  float* y_f32;              // [m, ldy], if y_bf16 is null
  const uint16_t* residual;  // bf16 [m, ldy] added to y, or null
  int64_t ldy;
  const uint16_t* up = nullptr;  // bf16 [m, ldy], or null
  float scale = 1.0f;
  float softcap = 0.0f;  // 0: no tanh
  // [m]: the adapters of the rows, whose products are added to those of the layer before anything else is done with
  // them, and which have their products with A. Null: no row has one. The parts are the outputs of all weights.
  const AdaptedRow* adapted = nullptr;
  const AdapterSizes* adapter_sizes = nullptr;

  // Whether two products make one output.
  bool gated() const { return activation != Activation::kNone && !up; }
  int64_t BlockBytes() const { return BytesOfBlock(format, k); }
};

// The operation's x: m rows of k values in bf16. If `norm`, bf16 [k], is not null, each row is normalised by its root
// mean square, and multiplied by offset + norm.
struct LinearInput {
  const uint16_t* x;
  int64_t stride;  // values from one row to the next
  const uint16_t* norm;
  float eps;
  const int32_t* rows;   // [m]: where each row stands in x, or null if they stand in order
  const float* factors;  // [m]: each row is multiplied by its factor; or null
  float offset = 0.0f;

  const uint16_t* RowAt(int64_t row) const { return x + (rows ? rows[row] : row) * stride; }
};

// The kernels of one instruction set. Work is divided into units of some consecutive out blocks of one weight.
struct LinearKernel {
  int64_t (*num_units)(const LinearJob&);
  void (*run_unit)(const LinearJob&, int64_t unit);
  // Bytes of x in the kernel's form; and the function that puts row block `block` of x into it, where `row` is room for
  // k floats.
  int64_t (*x_bytes)(int64_t m, int64_t k, Format format);
  void (*put_rows)(const LinearInput&, int64_t block, const LinearJob&, void* x, float* x_scale, float* row);
};

const LinearKernel& LinearAvx2();
const LinearKernel& LinearAvx512();
const LinearKernel& LinearAvx512Bf16();
const LinearKernel& LinearAmx();

// The kernels for the instruction set in use and weights of this format; null if there are none.
const LinearKernel* CurrentLinearKernel(Format format);

}  // namespace penstock
