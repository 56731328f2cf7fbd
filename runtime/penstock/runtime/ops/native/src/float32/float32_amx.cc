// Layers in float32 on AMX, which multiplies bfloat16. Each value is three pieces of bfloat16, whose sum it is, and of
// the nine products of two values' pieces the six largest are added up, in float32. JAX calls this algorithm
// BF16_BF16_F32_X6. What is left out is at most 2^-22 of a product; sums come out closer to the exact ones than those
// of float32_avx512.cc, because fewer of them are rounded.
//
// Pieces of x are rounded, so that what they leave has either sign. Pieces of weights are cut off, which is cheaper.
// The weights stay in memory as they are, and each call divides them anew. A piece below float32's least normal number,
// 2^-126, counts as zero. What is infinite becomes infinite or NaN.
#include <immintrin.h>

#include <type_traits>

#include "common/tiles.h"
#include "float32/float32_kernel.h"

namespace penstock {
namespace {

constexpr int kPieces = 3;
constexpr int64_t kTileRows = 16;
constexpr int64_t kTileBytes = 1024;
constexpr int64_t kRowBytes = 64;
// The inputs of a step: a row of a tile.
constexpr int64_t kStepInputs = 32;
// The bytes of the pieces of a step's weights.
constexpr int64_t kStepBytes = kPieces * kBlocks * kTileBytes;
// The steps whose pieces are in the first-level cache where few rows need them once.
constexpr int64_t kRing = 4;
// How far ahead weights are fetched that come from memory.
constexpr int64_t kFetchedFloats = 32 * kLanes;

// The tile registers. kSum01 holds the sums of row block 0 and out block 1.
constexpr int kSum00 = 0;
constexpr int kSum01 = 1;
constexpr int kSum10 = 2;
constexpr int kSum11 = 3;
constexpr int kX0 = 4;
constexpr int kX1 = 5;
constexpr int kW0 = 6;
constexpr int kW1 = 7;

int64_t Steps(int64_t k) { return CeilDiv(k, kStepInputs); }

// Of float32 numbers the 16 bits that are a bfloat16.
inline __m512i Upper(__m512i value) { return _mm512_and_si512(value, _mm512_set1_epi32(-65536)); }

inline __m512i Rest(__m512i value, __m512i piece) {
  return _mm512_castps_si512(_mm512_sub_ps(_mm512_castsi512_ps(value), _mm512_castsi512_ps(piece)));
}

// Half a unit of a piece is added to a value that is to be rounded, but for one that would become infinite.
inline __m512i RaisedForRounding(__m512i value) {
  const Lanes largest = Clip({_mm512_castsi512_ps(value)}, -3.38953139e38f, 3.38953139e38f);
  return _mm512_add_epi32(_mm512_castps_si512(largest.v), _mm512_set1_epi32(0x8000));
}

// Divides 32 float32 numbers into pieces: words of a piece of `first` and one of `second`, `apart` bytes from those of
// the next pieces.
template <bool kRounds>
inline void Divide(__m512i first, __m512i second, int64_t apart, char* out) {
  for (int p = 0; p < kPieces; ++p, out += apart) {
    const bool rounds = kRounds && p + 1 < kPieces;
    const __m512i raised = rounds ? RaisedForRounding(first) : first;
    const __m512i of_second = Upper(rounds ? RaisedForRounding(second) : second);
    _mm512_storeu_si512(out, _mm512_or_si512(of_second, _mm512_srli_epi32(raised, 16)));
    first = Rest(first, Upper(raised));
    second = Rest(second, of_second);
  }
}

// Divides a row of x. The pieces of a step begin `apart` bytes behind each other, and steps kPieces times as many. Word
// i of a step has inputs i and 16 + i, in each operand. Inputs that the last step lacks are zeros.
inline void PutRow(const float* x, int64_t k, int64_t apart, char* out) {
  for (int64_t input = 0; input < k; input += kStepInputs, out += kPieces * apart) {
    const __m512i first = _mm512_loadu_si512(x + input);
    const __m512i second = input + kLanes < k ? _mm512_loadu_si512(x + input + kLanes) : _mm512_set1_epi32(0);
    Divide<true>(first, second, apart, out);
  }
}

// Divides a step's weights of B out blocks from `weights` on: tiles [piece][out block] of words [16][16 out].
template <int B>
inline void PutWeights(const float* weights, int64_t k, int64_t step, char* out) {
  const bool is_whole = (step + 1) * kStepInputs <= k;
  for (int b = 0; b < B; ++b, out += kTileBytes) {
    const float* from = weights + (b * k + step * kStepInputs) * kLanes;
    for (int64_t i = 0; i < kLanes; ++i, from += kLanes) {
      const float* second = from + kLanes * kLanes;
      _mm_prefetch(reinterpret_cast<const char*>(from + kFetchedFloats), _MM_HINT_T0);
      _mm_prefetch(reinterpret_cast<const char*>(second + kFetchedFloats), _MM_HINT_T0);
      Divide<false>(_mm512_loadu_si512(from), is_whole ? _mm512_loadu_si512(second) : _mm512_set1_epi32(0),
                    kBlocks * kTileBytes, out + i * kRowBytes);
    }
  }
}

// The pieces of a pair of row blocks: [row block][step][piece][row][64 bytes].
struct RowPair {
  const char* blocks[2];
  int64_t rows[2];  // of the second block there may be none
};

// Adds the products of a step of R row blocks and B out blocks to the sums.
template <int R, int B>
inline void AddStep(const RowPair& x, int64_t step, const char* weights) {
  const auto load_x = [&](int piece) {
    TileLoad<kX0>(x.blocks[0] + (step * kPieces + piece) * x.rows[0] * kRowBytes, kRowBytes);
    if constexpr (R > 1) {
      TileLoad<kX1>(x.blocks[1] + (step * kPieces + piece) * x.rows[1] * kRowBytes, kRowBytes);
    }
  };
  const auto load_weights = [&](int piece) {
    TileLoad<kW0>(weights + piece * kBlocks * kTileBytes, kRowBytes);
    if constexpr (B > 1) {
      TileLoad<kW1>(weights + (piece * kBlocks + 1) * kTileBytes, kRowBytes);
    }
  };
  const auto multiply = [] {
    TileDotBf16<kSum00, kX0, kW0>();
    if constexpr (B > 1) {
      TileDotBf16<kSum01, kX0, kW1>();
    }
    if constexpr (R > 1) {
      TileDotBf16<kSum10, kX1, kW0>();
    }
    if constexpr (R > 1 && B > 1) {
      TileDotBf16<kSum11, kX1, kW1>();
    }
  };
  // In this order one operand of each product is that of the one before. Piece 0 is the largest, and the product of the
  // largest comes last: the small ones are added up without losing bits, so that among zeros a value times one is that
  // value.
  load_x(2), load_weights(0), multiply();
  load_x(1), multiply();
  load_weights(1), multiply();
  load_x(0), multiply();
  load_weights(2), multiply();
  load_weights(0), multiply();
}

// This function defines the order of every sum: one chain of such steps in ascending order, whatever the number of
// rows, so an output's bits depend on its own row alone.
//
// Multiplies R row blocks by B out blocks, and writes the sums [row][B][16]. weights_of(step) gives the pieces of a
// step's weights.
template <int R, int B, typename WeightsOf>
void MultiplyPair(const RowPair& x, int64_t steps, float* sums, WeightsOf&& weights_of) {
  TileZero<kSum00>();
  if constexpr (B > 1) {
    TileZero<kSum01>();
  }
  if constexpr (R > 1) {
    TileZero<kSum10>();
  }
  if constexpr (R > 1 && B > 1) {
    TileZero<kSum11>();
  }
  for (int64_t s = 0; s < steps; ++s) {
    AddStep<R, B>(x, s, weights_of(s));
  }
  constexpr int64_t kRow = B * kLanes;
  TileStore<kSum00>(sums, kRow * 4);
  if constexpr (B > 1) {
    TileStore<kSum01>(sums + kLanes, kRow * 4);
  }
  if constexpr (R > 1) {
    TileStore<kSum10>(sums + kTileRows * kRow, kRow * 4);
  }
  if constexpr (R > 1 && B > 1) {
    TileStore<kSum11>(sums + kTileRows * kRow + kLanes, kRow * 4);
  }
}

// Sets the numbers of rows of the two row blocks; rows1 may be 0.
void Configure(int64_t rows0, int64_t rows1) {
  TileConfig config;
  config.rows[kSum00] = config.rows[kSum01] = config.rows[kX0] = static_cast<uint8_t>(rows0);
  config.rows[kSum10] = config.rows[kSum11] = config.rows[kX1] = static_cast<uint8_t>(Max<int64_t>(1, rows1));
  TileConfigure(config);
}

// Multiplies all rows of a unit by B out blocks. Where the job has no pieces of the weights, the first pair of row
// blocks divides them into `room`: all steps, or if no other pair needs them, the last few.
template <int B>
void MultiplyBlocks(const Float32Job& job, int64_t row, int64_t rows, int64_t block, const char* x, char* room) {
  alignas(64) float sums[2 * kTileRows * kBlocks * kLanes];
  const int64_t steps = Steps(job.k), kept = rows > 2 * kTileRows ? steps : kRing;
  const float* floats = job.weight + block * job.k * kLanes;
  const char* pieces = job.pieces ? job.pieces + block / kBlocks * steps * kStepBytes : room;
  const auto ready = [&](int64_t step) { return pieces + step * kStepBytes; };
  // Dividing is one step ahead, so that what is stored has left the processor when it is loaded.
  const auto divide = [&](int64_t step) { PutWeights<B>(floats, job.k, step, room + step % kept * kStepBytes); };
  const auto divided = [&](int64_t step) {
    if (step + 1 < steps) {
      divide(step + 1);
    }
    return room + step % kept * kStepBytes;
  };
  int64_t configured = 0;
  for (int64_t first = 0; first < rows; first += 2 * kTileRows) {
    const int64_t count = Min(rows - first, 2 * kTileRows), count0 = Min(count, kTileRows);
    const char* begin = x + first * steps * kPieces * kRowBytes;
    const RowPair pair{{begin, begin + count0 * steps * kPieces * kRowBytes}, {count0, count - count0}};
    if (count != configured) {
      Configure(count0, count - count0);
      configured = count;
    }
    const bool divides = !job.pieces && first == 0;
    const auto multiply = [&](auto&& weights_of) {
      count > kTileRows ? MultiplyPair<2, B>(pair, steps, sums, weights_of)
                        : MultiplyPair<1, B>(pair, steps, sums, weights_of);
    };
    if (divides) {
      divide(0);
      multiply(divided);
    } else {
      multiply(ready);
    }
    FinishPanel<B>(job, row + first, count, block, sums);
  }
}

// Calls body(std::integral_constant<int, B>, block) for pairs of blocks, and for a last one alone.
template <typename Body>
void InPairs(int64_t block, int64_t blocks, Body&& body) {
  int64_t b = block;
  for (; b + kBlocks <= block + blocks; b += kBlocks) {
    body(std::integral_constant<int, kBlocks>{}, b);
  }
  if (b < block + blocks) {
    body(std::integral_constant<int, 1>{}, b);
  }
}

void MultiplyPieces(const Float32Job& job, int64_t row, int64_t rows, int64_t block, int64_t blocks) {
  const int64_t steps = Steps(job.k), row_bytes = steps * kPieces * kRowBytes;
  char* x = Scratch<struct Float32Pieces>(rows * row_bytes);
  char* room = job.pieces ? nullptr : Scratch<struct Float32Weights>(Max(steps, kRing) * kStepBytes);
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t first = r / kTileRows * kTileRows, count = Min(rows - first, kTileRows);
    PutRow(job.x + (row + r) * job.k, job.k, count * kRowBytes, x + first * row_bytes + (r - first) * kRowBytes);
  }
  InPairs(block, blocks,
          [&](auto together, int64_t b) { MultiplyBlocks<decltype(together)::value>(job, row, rows, b, x, room); });
  TileRelease();
}

int64_t PiecesBytes(const Float32Job& job) { return CeilDiv(job.n / kLanes, kBlocks) * Steps(job.k) * kStepBytes; }

void DivideWeights(const Float32Job& job, int64_t block, int64_t blocks, char* pieces) {
  InPairs(block, blocks, [&](auto together, int64_t b) {
    for (int64_t s = 0; s < Steps(job.k); ++s) {
      PutWeights<decltype(together)::value>(job.weight + b * job.k * kLanes, job.k, s,
                                            pieces + (b / kBlocks * Steps(job.k) + s) * kStepBytes);
    }
  });
}

}  // namespace

const Float32Kernel& Float32Amx() {
  static const Float32Kernel kernel{kBlocks, 2 * kTileRows, PiecesBytes, DivideWeights, MultiplyPieces, NormalizeRows};
  return kernel;
}

}  // namespace penstock
