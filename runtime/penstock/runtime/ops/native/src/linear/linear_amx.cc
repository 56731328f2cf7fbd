// Linear layers on AMX: rows of x are the A tiles, the packed weight the B tiles as they lie in memory.
#include <immintrin.h>

#include "linear/linear_common.h"
#include "common/scratch.h"
#include "common/tiles.h"

namespace penstock {
namespace {

constexpr int64_t kRows = 16;               // of an A tile
constexpr int64_t kPrefetchBytes = 2048;    // ahead of a weight that streams from memory
constexpr int64_t kFewRowsUnitBytes = 128 * 1024;  // of weight: enough to be worth a claim
constexpr int64_t kRowsBytes = 1280 * 1024;       // of x: what stays in the second cache beside some weights
constexpr int64_t kChunkSteps = 8;               // of 64 bytes; two blocks' tiles of 8 steps take 16 KiB
constexpr int64_t kUnchunkedPairs = 4;  // of row blocks: for so few the weights only pass through anyway

// C tiles 0 to 3 (two row blocks by two out blocks), A tiles 4 and 5, B tiles 6 and 7.
void Configure(int64_t rows0, int64_t rows1) {
  TileConfig config;
  config.rows[0] = config.rows[1] = config.rows[4] = static_cast<uint8_t>(rows0);
  config.rows[2] = config.rows[3] = config.rows[5] = static_cast<uint8_t>(rows1 ? rows1 : 1);
  TileConfigure(config);
}

inline void PrefetchTile(const char* at) {
  for (int line = 0; line < 16; ++line) _mm_prefetch(at + line * 64, _MM_HINT_T0);
}

// A block of rows of x, or a block of a weight: its tiles lie `step` bytes apart, in the order they are multiplied.
struct Tiles {
  const char* begin;
  int64_t step;
};

template <bool kInt8, int kC, int kA, int kB>
inline void TileDot() {
  if constexpr (kInt8) {
    TileDotInt8<kC, kA, kB>();
  } else {
    TileDotBf16<kC, kA, kB>();
  }
}

// Step `s` of AddProducts. With one block of each, the steps take tiles in turns: no load waits for a product.
template <bool kInt8, int kBlocks, int kTurn>
inline void AddStep(const Tiles* x, const Tiles* weight, int64_t s) {
  constexpr int kA = kBlocks == 1 ? 4 + kTurn : 4, kB = kBlocks == 1 ? 6 + kTurn : 6;
  TileLoad<kA>(x[0].begin + s * x[0].step, 64);
  TileLoad<kB>(weight[0].begin + s * weight[0].step, 64);
  TileDot<kInt8, 0, kA, kB>();
  if constexpr (kBlocks == 2) {
    TileLoad<7>(weight[1].begin + s * weight[1].step, 64);
    TileDot<kInt8, 1, 4, 7>();
    TileLoad<5>(x[1].begin + s * x[1].step, 64);
    TileDot<kInt8, 2, 5, 6>();
    TileDot<kInt8, 3, 5, 7>();
  }
}

// The order of every sum: one chain, a tile product for each step (64 bytes of a row), in ascending steps. Few rows and
// many both come here, so an output's bits depend on its own row alone.
//
// Adds the products of steps [begin, end) of kBlocks (1 or 2) blocks of rows and as many of weights to C tiles 0 to 3:
// rows 0 by weights 0, rows 0 by weights 1, then those of rows 1. Calls fetch() before each step.
template <bool kInt8, int kBlocks, typename Fetch>
inline void AddProducts(const Tiles* x, const Tiles* weight, int64_t begin, int64_t end, Fetch&& fetch) {
  constexpr int kTurns = kBlocks == 1 ? 2 : 1;
  int64_t s = begin;
  for (; s + kTurns <= end; s += kTurns) {
    fetch();
    AddStep<kInt8, kBlocks, 0>(x, weight, s);
    if constexpr (kTurns == 1) continue;
    fetch();
    AddStep<kInt8, kBlocks, kTurns - 1>(x, weight, s + 1);
  }
  if (s == end) return;
  fetch();
  AddStep<kInt8, kBlocks, 0>(x, weight, s);
}

// x times one block, at most 16 rows: bound by reading the weight, so its tiles are taken as they lie in memory. (Two
// blocks at a time would halve the reading of x, but two streams measured 8 % slower.) One chain of products is enough:
// a tile product takes 52 cycles, and to bring a tile of weights from memory takes a core more than 100.
template <bool kInt8>
void Products(const LinearJob& job, const char* weight, float* sums) {
  const Tiles x{static_cast<const char*>(job.x), job.m * 64}, tiles{weight, kTileBytes};
  const char* ahead = weight + kPrefetchBytes;
  TileZero<0>();
  AddProducts<kInt8, 1>(&x, &tiles, 0, job.k * (kInt8 ? 1 : 2) / 64, [&] {
    PrefetchTile(ahead);
    ahead += kTileBytes;
  });
  TileStore<0>(sums, 64);
}

template <bool kInt8>
void FewRows(const LinearJob& job, const Span& span) {
  alignas(64) float sums[2][kRows * kBlockOut];
  Configure(job.m, job.m);
  const int64_t last = span.block + span.count;
  // Two at a time, gate and up or neighbours, so that y is written in whole cache lines.
  for (int64_t b = span.block; b < last; b += job.gate ? 1 : 2) {
    const bool two = job.gate || b + 1 < last;
    for (int64_t part = 0; part < (two ? 2 : 1); ++part) {
      const int64_t weight = job.gate ? part : span.weight, block = job.gate ? b : b + part;
      Products<kInt8>(job, job.weights[weight].tiles + block * job.BlockBytes(), sums[part]);
      if constexpr (kInt8) Dequantize(job, weight, block, 0, job.m, sums[part], false);
    }
    if (job.gate) {
      FinishGate(job, b, 0, job.m, sums[0], sums[1]);
    } else {
      Finish(job, span.weight, b, 0, job.m, sums[0], two ? sums[1] : nullptr);
    }
  }
  TileRelease();
}

// Many rows: a unit is two out blocks (or one of gate and one of up) by as many rows of x as stay in the second cache.
// Inputs are taken in chunks whose weights stay in the first cache while x streams from the second; between chunks
// the sums wait in memory. Meanwhile the weights of this thread's next unit come into the second cache.
template <bool kInt8>
void ManyRows(const LinearJob& job, const Span& span, int64_t first_row, int64_t last_row) {
  const int64_t element = kInt8 ? 1 : 2, steps = job.k * element / 64;
  const int64_t row_block_bytes = kRows * job.k * element;
  const char* x = static_cast<const char*>(job.x) + first_row * job.k * element;
  const bool pair = job.gate || span.count == 2;
  const int64_t weight1 = job.gate ? 1 : span.weight, block1 = job.gate || !pair ? span.block : span.block + 1;
  const char* tiles0 = job.weights[span.weight].tiles + span.block * job.BlockBytes();
  const char* tiles1 = job.weights[weight1].tiles + block1 * job.BlockBytes();
  const Tiles blocks[2] = {{tiles0, kTileBytes}, {tiles1, kTileBytes}};
  const int64_t row_pairs = (last_row - first_row + 2 * kRows - 1) / (2 * kRows);
  const int64_t ahead = (job.gate ? 1 : 2) * job.BlockBytes();
  const int64_t lines = (job.BlockBytes() / 64 + row_pairs * steps - 1) / (row_pairs * steps);
  int64_t fetched = 0;
  char* sums = Scratch<struct LinearSums>(row_pairs * 4 * kTileBytes);
  int64_t configured = -1;
  const int64_t chunk = row_pairs <= kUnchunkedPairs ? steps : kChunkSteps;
  for (int64_t begin = 0; begin < steps; begin += chunk) {
    const int64_t end = begin + chunk < steps ? begin + chunk : steps;
    for (int64_t p = 0; p < row_pairs; ++p) {
      const int64_t row = first_row + p * 2 * kRows, left = last_row - row;
      const int64_t rows0 = left < kRows ? left : kRows;
      const int64_t rows1 = left <= kRows ? 0 : (left < 2 * kRows ? left - kRows : kRows), rows = rows0 + rows1;
      if (configured != rows0 * 32 + rows1) Configure(rows0, rows1);
      configured = rows0 * 32 + rows1;
      const char* x0 = x + 2 * p * row_block_bytes;
      const Tiles row_blocks[2] = {{x0, rows0 * 64},
                                   {rows1 ? x0 + row_block_bytes : x0, (rows1 ? rows1 : 1) * 64}};
      char* at = sums + p * 4 * kTileBytes;
      if (begin == 0) {
        TileZero<0>();
        TileZero<1>();
        TileZero<2>();
        TileZero<3>();
      } else {
        TileLoad<0>(at, 64);
        TileLoad<1>(at + 2 * kTileBytes, 64);
        TileLoad<2>(at + kTileBytes, 64);
        TileLoad<3>(at + 3 * kTileBytes, 64);
      }
      AddProducts<kInt8, 2>(row_blocks, blocks, begin, end, [&] {
        for (int64_t line = 0; line < lines; ++line, fetched += 64) {
          _mm_prefetch(tiles0 + ahead + fetched, _MM_HINT_T1);
          _mm_prefetch(tiles1 + ahead + fetched, _MM_HINT_T1);
        }
      });
      TileStore<0>(at, 64);
      TileStore<1>(at + 2 * kTileBytes, 64);
      if (rows1) {
        TileStore<2>(at + kTileBytes, 64);
        TileStore<3>(at + 3 * kTileBytes, 64);
      }
      if (end < steps) continue;
      float* sums0 = reinterpret_cast<float*>(at);
      float* sums1 = reinterpret_cast<float*>(at + 2 * kTileBytes);
      if constexpr (kInt8) {
        Dequantize(job, span.weight, span.block, row, rows, sums0, false);
        if (pair) Dequantize(job, weight1, block1, row, rows, sums1, false);
      }
      if (job.gate) {
        FinishGate(job, span.block, row, rows, sums0, sums1);
      } else {
        Finish(job, span.weight, span.block, row, rows, sums0, pair ? sums1 : nullptr);
      }
    }
  }
  TileRelease();
}

// Rows of x that are taken together.
int64_t RowsAtOnce(const LinearJob& job) {
  const int64_t rows = kRowsBytes / (job.k * (job.int8 ? 1 : 2)) / (2 * kRows) * (2 * kRows);
  return rows < 2 * kRows ? 2 * kRows : rows;
}

int64_t PerUnit(const LinearJob& job) {
  if (job.m > kRows) return job.gate ? 1 : 2;
  const int64_t blocks = kFewRowsUnitBytes / (job.BlockBytes() * (job.gate ? 2 : 1));
  return blocks < 1 ? 1 : blocks;
}

int64_t NumUnits(const LinearJob& job) {
  const int64_t units = CountUnits(job, PerUnit(job));
  return job.m <= kRows ? units : units * ((job.m + RowsAtOnce(job) - 1) / RowsAtOnce(job));
}

void RunUnit(const LinearJob& job, int64_t unit) {
  if (job.m <= kRows) {
    const Span span = FindUnit(job, unit, PerUnit(job));
    job.int8 ? FewRows<true>(job, span) : FewRows<false>(job, span);
    return;
  }
  const int64_t units = CountUnits(job, PerUnit(job)), rows = RowsAtOnce(job);
  const Span span = FindUnit(job, unit % units, PerUnit(job));
  const int64_t first = unit / units * rows, last = first + rows < job.m ? first + rows : job.m;
  job.int8 ? ManyRows<true>(job, span, first, last) : ManyRows<false>(job, span, first, last);
}

// Row blocks of 16, each as tiles [rows, 64 bytes] in the order they are multiplied.
int64_t XBytes(int64_t m, int64_t k, bool int8) { return m * k * (int8 ? 1 : 2); }

void PutRows(const LinearInput& input, int64_t block, const LinearJob& job, void* x, float* x_scale, float* row) {
  const int64_t k = job.k, first = block * kRows, count = job.m - first < kRows ? job.m - first : kRows;
  char* out = static_cast<char*>(x) + first * k * (job.int8 ? 1 : 2);
  for (int64_t r = 0; r < count; ++r) {
    LoadRow(input, first + r, k, row);
    if (job.int8) {
      const float peak = RowPeak(row, k), inverse = peak > 0 ? 127.0f / peak : 0.0f;
      x_scale[first + r] = peak / 127.0f;
      for (int64_t s = 0; s < k / 64; ++s) {
        Quantize(row + s * 64, 64, inverse, reinterpret_cast<int8_t*>(out + (s * count + r) * 64));
      }
    } else {
      for (int64_t s = 0; s < k / 32; ++s) {
        auto* to = reinterpret_cast<uint16_t*>(out + (s * count + r) * 64);
        StoreBf16(to, Load(row + s * 32));
        StoreBf16(to + 16, Load(row + s * 32 + 16));
      }
    }
  }
}

}  // namespace

const LinearKernel& LinearAmx() {
  static const LinearKernel kernel{NumUnits, RunUnit, XBytes, PutRows};
  return kernel;
}

}  // namespace penstock
