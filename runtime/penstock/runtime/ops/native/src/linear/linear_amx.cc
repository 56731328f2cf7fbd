// Linear layers on AMX: rows of x are the A tiles, and the packed weight holds the B tiles as they lie in memory.
//
// With int8 weights x is rounded to 16 bits, with a scale for each row, and a row of x is two rows of tiles: its upper
// bytes and its lower ones. One byte alone would cost a real model 3.8 % of its perplexity, because the largest value
// of a row may be a hundred times the usual one. With a scale for each 32 inputs, as other instruction sets have it,
// sums would have to leave the tiles twice for each tile of weights.
#include <immintrin.h>

#include "common/scratch.h"
#include "common/tiles.h"
#include "linear/linear_common.h"
#include "linear/linear_expand.h"

namespace penstock {
namespace {

// The rows of an A tile.
constexpr int64_t kRows = 16;
// How many bytes ahead a weight is prefetched that streams from memory.
constexpr int64_t kPrefetchBytes = 2048;
// The bytes of weight in a unit of few rows: enough to be worth claiming.
constexpr int64_t kFewRowsUnitBytes = 128 * 1024;
// The bytes of x in a unit of many rows, which stay in the second-level cache beside some weights.
constexpr int64_t kRowsBytes = 1280 * 1024;
// The steps of 64 bytes in a chunk: the tiles of two blocks in 8 steps take 16 KiB.
constexpr int64_t kChunkSteps = 8;
// The inputs of a step of bf16.
constexpr int64_t kStepInputs = 32;
// With at most this many pairs of row blocks, inputs are not cut into chunks, because then weights are reused too
// little for that to pay.
constexpr int64_t kUnchunkedPairs = 4;

// The tile registers. kSum01 holds the sums of row block 0 and out block 1, kX0 and kX1 row blocks of x, kW0 and kW1
// out blocks of a weight.
constexpr int kSum00 = 0;
constexpr int kSum01 = 1;
constexpr int kSum10 = 2;
constexpr int kSum11 = 3;
constexpr int kX0 = 4;
constexpr int kX1 = 5;
constexpr int kW0 = 6;
constexpr int kW1 = 7;

bool IsInt8(const LinearJob& job) { return job.format == Format::kInt8; }

// The rows of tiles that a row of x makes.
constexpr int64_t TileRows(bool is_int8) { return is_int8 ? 2 : 1; }

// Whether all rows of x fit into one A tile.
bool AreFew(const LinearJob& job) { return job.m * TileRows(IsInt8(job)) <= kRows; }

// Sets the numbers of rows of the two row blocks; rows1 may be 0.
void Configure(int64_t rows0, int64_t rows1) {
  TileConfig config;
  config.rows[kSum00] = config.rows[kSum01] = config.rows[kX0] = static_cast<uint8_t>(rows0);
  config.rows[kSum10] = config.rows[kSum11] = config.rows[kX1] = static_cast<uint8_t>(rows1 ? rows1 : 1);
  TileConfigure(config);
}

inline void PrefetchTile(const char* at) {
  for (int line = 0; line < 16; ++line) {
    _mm_prefetch(at + line * 64, _MM_HINT_T0);
  }
}

// The tiles of a row block of x, or of an out block of a weight: they lie `step` bytes apart, in the order in which
// they are multiplied.
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

// Step `s` of AddProducts. With one block of each kind the steps take turns (kTurn 0 and 1) with two tiles of x and two
// of the weight, so that no load waits for a product.
template <bool kInt8, int kBlocks, int kTurn>
inline void AddStep(const Tiles* x, const Tiles* weight, int64_t s) {
  static_assert(kBlocks == 1 || kTurn == 0, "two blocks use all tiles in each step");
  TileLoad<kX0 + kTurn>(x[0].begin + s * x[0].step, 64);
  TileLoad<kW0 + kTurn>(weight[0].begin + s * weight[0].step, 64);
  TileDot<kInt8, kSum00, kX0 + kTurn, kW0 + kTurn>();
  if constexpr (kBlocks == 2) {
    TileLoad<kW1>(weight[1].begin + s * weight[1].step, 64);
    TileDot<kInt8, kSum01, kX0, kW1>();
    TileLoad<kX1>(x[1].begin + s * x[1].step, 64);
    TileDot<kInt8, kSum10, kX1, kW0>();
    TileDot<kInt8, kSum11, kX1, kW1>();
  }
}

// This function defines the order of every sum: one chain of tile products, one for each step (64 bytes of a row), in
// ascending order of steps. It is used for few rows and for many, so an output's bits depend on its own row alone.
//
// Adds the products of steps [begin, end) of kBlocks (1 or 2) row blocks and as many out blocks to the sums. Calls
// fetch() before each step.
template <bool kInt8, int kBlocks, typename Fetch>
inline void AddProducts(const Tiles* x, const Tiles* weight, int64_t begin, int64_t end, Fetch&& fetch) {
  constexpr int kTurns = kBlocks == 1 ? 2 : 1;
  int64_t s = begin;
  for (; s + kTurns <= end; s += kTurns) {
    fetch();
    AddStep<kInt8, kBlocks, 0>(x, weight, s);
    if constexpr (kTurns == 1) {
      continue;
    }
    fetch();
    AddStep<kInt8, kBlocks, kTurns - 1>(x, weight, s + 1);
  }
  if (s == end) {
    return;
  }
  fetch();
  AddStep<kInt8, kBlocks, 0>(x, weight, s);
}

// Multiplies x, at most 16 rows of tiles, by one block. Reading the weight takes most of the time, so its tiles are
// taken in the order in which they lie in memory. (Two blocks at a time would halve the reading of x, but two streams
// measured 8 % slower.) One chain of products is enough: a tile product takes 52 cycles, and a core needs more than 100
// to bring a tile of weights from memory.
template <bool kInt8>
void Products(const LinearJob& job, const char* weight, float* sums) {
  const Tiles x{static_cast<const char*>(job.x), job.m * TileRows(kInt8) * 64}, tiles{weight, kTileBytes};
  const char* ahead = weight + kPrefetchBytes;
  TileZero<kSum00>();
  AddProducts<kInt8, 1>(&x, &tiles, 0, job.k * (kInt8 ? 1 : 2) / 64, [&] {
    PrefetchTile(ahead);
    ahead += kTileBytes;
  });
  TileStore<kSum00>(sums, 64);
}

// The same for a block of small floats, which become bf16 chunk by chunk.
void ExpandedProducts(const LinearJob& job, const char* weight, float* sums) {
  alignas(64) char in_cache[kChunkSteps * kTileBytes];
  const int64_t steps = job.k / kStepInputs;
  TileZero<kSum00>();
  for (int64_t begin = 0; begin < steps; begin += kChunkSteps) {
    const int64_t end = Min(begin + kChunkSteps, steps);
    Expand(job.format, weight, job.k, begin * kStepInputs, end * kStepInputs, in_cache);
    const Tiles x{static_cast<const char*>(job.x) + begin * job.m * 64, job.m * 64}, tiles{in_cache, kTileBytes};
    AddProducts<false, 1>(&x, &tiles, 0, end - begin, [] {});
  }
  TileStore<kSum00>(sums, 64);
}

template <bool kInt8>
void FewRows(const LinearJob& job, const UnitBlocks& unit_blocks) {
  alignas(64) float sums[2][kRows * kBlockOut];
  Configure(job.m * TileRows(kInt8), job.m * TileRows(kInt8));
  const int64_t last = unit_blocks.block + unit_blocks.count;
  // Two blocks at a time (gate and up, or neighbours), so that y is written in whole cache lines.
  for (int64_t b = unit_blocks.block; b < last; b += job.gated() ? 1 : 2) {
    const bool two = job.gated() || b + 1 < last;
    FetchForBlocks(job, unit_blocks.weight, b, two ? 2 : 1, 0, job.m);
    for (int64_t part = 0; part < (two ? 2 : 1); ++part) {
      const int64_t weight = job.gated() ? part : unit_blocks.weight, block = job.gated() ? b : b + part;
      const char* tiles = job.weights[weight].tiles + block * job.BlockBytes();
      if (IsSmallFloats(job.format)) {
        ExpandedProducts(job, tiles, sums[part]);
      } else {
        Products<kInt8>(job, tiles, sums[part]);
      }
      if constexpr (kInt8) {
        Dequantize(job, weight, block, 0, job.m, sums[part]);
      }
    }
    if (job.gated()) {
      FinishGate(job, b, 0, job.m, sums[0], sums[1]);
    } else {
      Finish(job, unit_blocks.weight, b, 0, job.m, sums[0], two ? sums[1] : nullptr);
    }
  }
  TileRelease();
}

// The sums of a pair of row blocks by a pair of out blocks, in memory: [out block][row block][1 KiB]. So an out block's
// sums of up to 32 rows lie together, as Epilogue takes them.
struct PairSums {
  char* memory;

  char* Of(int row_block, int out_block) const { return memory + (2 * out_block + row_block) * kTileBytes; }
  float* OfOutBlock(int out_block) const { return reinterpret_cast<float*>(Of(0, out_block)); }

  void Load() const {
    TileLoad<kSum00>(Of(0, 0), 64);
    TileLoad<kSum01>(Of(0, 1), 64);
    TileLoad<kSum10>(Of(1, 0), 64);
    TileLoad<kSum11>(Of(1, 1), 64);
  }

  void Store(bool has_second_row_block) const {
    TileStore<kSum00>(Of(0, 0), 64);
    TileStore<kSum01>(Of(0, 1), 64);
    if (!has_second_row_block) {
      return;
    }
    TileStore<kSum10>(Of(1, 0), 64);
    TileStore<kSum11>(Of(1, 1), 64);
  }
};

inline void ZeroSums() {
  TileZero<kSum00>();
  TileZero<kSum01>();
  TileZero<kSum10>();
  TileZero<kSum11>();
}

// The two out blocks of a unit of many rows: neighbours of one weight, or one of gate and one of up. Where a weight has
// only one block left, both are that block, and the second one's results are not used.
struct OutPair {
  int64_t weight[2];
  int64_t block[2];
  bool has_second;

  const char* TilesOf(const LinearJob& job, int out_block) const {
    return job.weights[weight[out_block]].tiles + block[out_block] * job.BlockBytes();
  }
};

inline OutPair FindPair(const LinearJob& job, const UnitBlocks& unit) {
  const bool has_second = job.gated() || unit.count == 2;
  const int64_t second_block = job.gated() || !has_second ? unit.block : unit.block + 1;
  return {{unit.weight, job.gated() ? 1 : unit.weight}, {unit.block, second_block}, has_second};
}

// Makes the results of `tile_rows` rows of tiles, from `tile_row` on, from their complete sums.
template <bool kInt8>
void Epilogue(const LinearJob& job, const OutPair& pair, int64_t tile_row, int64_t tile_rows, const PairSums& sums) {
  const int64_t row = tile_row / TileRows(kInt8), rows = tile_rows / TileRows(kInt8);
  float* first = sums.OfOutBlock(0);
  float* second = sums.OfOutBlock(1);
  if constexpr (kInt8) {
    Dequantize(job, pair.weight[0], pair.block[0], row, rows, first);
    if (pair.has_second) {
      Dequantize(job, pair.weight[1], pair.block[1], row, rows, second);
    }
  }
  if (job.gated()) {
    FinishGate(job, pair.block[0], row, rows, first, second);
  } else {
    Finish(job, pair.weight[0], pair.block[0], row, rows, first, pair.has_second ? second : nullptr);
  }
}

// Computes a unit of many rows: two out blocks by as many rows of x as stay in the second-level cache. Inputs are cut
// into chunks whose weights stay in the first-level cache while x streams from the second; between chunks the sums wait
// in memory. Meanwhile the weights of this thread's next unit are brought into the second-level cache.
template <bool kInt8>
void ManyRows(const LinearJob& job, const UnitBlocks& unit, int64_t from, int64_t until) {
  const int64_t first_row = from * TileRows(kInt8), last_row = until * TileRows(kInt8);  // of tiles
  const int64_t element = kInt8 ? 1 : 2;
  const int64_t steps = job.k * element / 64;
  const int64_t row_block_bytes = kRows * job.k * element;
  const char* x = static_cast<const char*>(job.x) + first_row * job.k * element;
  const OutPair pair = FindPair(job, unit);
  const char* tiles0 = pair.TilesOf(job, 0);
  const char* tiles1 = pair.TilesOf(job, 1);
  FetchForBlocks(job, pair.weight[0], pair.block[0], pair.has_second ? 2 : 1, from, until);
  Tiles out_blocks[2] = {{tiles0, kTileBytes}, {tiles1, kTileBytes}};
  if (IsSmallFloats(job.format)) {  // both blocks become bf16 in the second-level cache
    const int64_t bytes = BytesOfBlock(Format::kBf16, job.k);
    char* in_cache = Scratch<struct LinearExpanded>(2 * bytes);
    Expand(job.format, tiles0, job.k, 0, job.k, in_cache);
    Expand(job.format, tiles1, job.k, 0, job.k, in_cache + bytes);
    out_blocks[0].begin = in_cache;
    out_blocks[1].begin = in_cache + bytes;
  }
  const int64_t row_pairs = CeilDiv(last_row - first_row, 2 * kRows);
  const int64_t next_unit = (job.gated() ? 1 : 2) * job.BlockBytes();
  const int64_t lines_per_step = CeilDiv(job.BlockBytes() / 64, row_pairs * steps);
  int64_t prefetched = 0;
  char* memory = Scratch<struct LinearSums>(row_pairs * 4 * kTileBytes);
  int64_t configured = -1;
  const int64_t chunk = row_pairs <= kUnchunkedPairs ? steps : kChunkSteps;
  for (int64_t begin = 0; begin < steps; begin += chunk) {
    const int64_t end = Min(begin + chunk, steps);
    for (int64_t p = 0; p < row_pairs; ++p) {
      const int64_t row = first_row + p * 2 * kRows;
      const int64_t rows = Min(last_row - row, 2 * kRows);
      const int64_t rows0 = Min(rows, kRows);
      const int64_t rows1 = rows - rows0;
      if (configured != rows) {
        Configure(rows0, rows1);
      }
      configured = rows;
      const char* x0 = x + 2 * p * row_block_bytes;
      const Tiles first{x0, rows0 * 64};
      // If there is no second row block, its tiles have one row, which is read from the first block.
      const Tiles second = rows1 ? Tiles{x0 + row_block_bytes, rows1 * 64} : Tiles{x0, 64};
      const Tiles row_blocks[2] = {first, second};
      const PairSums sums{memory + p * 4 * kTileBytes};
      if (begin == 0) {
        ZeroSums();
      } else {
        sums.Load();
      }
      AddProducts<kInt8, 2>(row_blocks, out_blocks, begin, end, [&] {
        for (int64_t line = 0; line < lines_per_step; ++line, prefetched += 64) {
          _mm_prefetch(tiles0 + next_unit + prefetched, _MM_HINT_T1);
          _mm_prefetch(tiles1 + next_unit + prefetched, _MM_HINT_T1);
        }
      });
      sums.Store(rows1 > 0);
      if (end == steps) {
        Epilogue<kInt8>(job, pair, row, rows, sums);
      }
    }
  }
  TileRelease();
}

// The bytes of a value of x: of a bf16, or the two of a row with int8 weights.
constexpr int64_t kValueBytes = 2;

// How many rows of x are taken together.
int64_t RowsAtOnce(const LinearJob& job) {
  const int64_t rows = kRowsBytes / (job.k * kValueBytes) / (2 * kRows) * (2 * kRows);
  return rows < 2 * kRows ? 2 * kRows : rows;
}

int64_t PerUnit(const LinearJob& job) {
  if (!AreFew(job)) {
    return job.gated() ? 1 : 2;
  }
  const int64_t blocks = kFewRowsUnitBytes / (job.BlockBytes() * (job.gated() ? 2 : 1));
  return blocks < 1 ? 1 : blocks;
}

int64_t NumUnits(const LinearJob& job) {
  const int64_t units = CountUnits(job, PerUnit(job));
  return AreFew(job) ? units : units * CeilDiv(job.m, RowsAtOnce(job));
}

void RunUnit(const LinearJob& job, int64_t unit) {
  if (AreFew(job)) {
    const UnitBlocks unit_blocks = FindUnit(job, unit, PerUnit(job));
    IsInt8(job) ? FewRows<true>(job, unit_blocks) : FewRows<false>(job, unit_blocks);
    return;
  }
  const int64_t units = CountUnits(job, PerUnit(job)), rows = RowsAtOnce(job);
  const UnitBlocks unit_blocks = FindUnit(job, unit % units, PerUnit(job));
  const int64_t first = unit / units * rows;
  const int64_t last = Min(first + rows, job.m);
  IsInt8(job) ? ManyRows<true>(job, unit_blocks, first, last) : ManyRows<false>(job, unit_blocks, first, last);
}

// x in the kernel's form: blocks of 16 rows of tiles, each as tiles [rows, 64 bytes] in the order in which they are
// multiplied.
int64_t XBytes(int64_t m, int64_t k, Format) { return m * k * kValueBytes; }

// Rounds 64 values to 16 bits, and writes a row of a tile with their upper bytes, and behind it one with their lower
// ones, both as int8: value = 256 * upper + lower.
inline void PutBytes(const float* values, float inverse, char* out) {
  alignas(64) int16_t numbers[64];
  for (int64_t i = 0; i < 64; i += 16) {
    StoreInt16(numbers + i, Mul(Load(values + i), Fill(inverse)));
  }
  for (int64_t i = 0; i < 64; ++i) {
    out[i] = static_cast<char>((numbers[i] + 128) >> 8);
    out[64 + i] = static_cast<char>(numbers[i]);
  }
}

void PutRows(const LinearInput& input, int64_t block, const LinearJob& job, void* x, float* x_scale, float* row) {
  constexpr float kMost = 127 * 256;  // so that its upper byte is an int8
  const bool is_int8 = IsInt8(job);
  const int64_t k = job.k, of_row = TileRows(is_int8), all = job.m * of_row, row_bytes = k * kValueBytes / of_row;
  for (int64_t r = block * kRowBlock; r < Min(job.m, (block + 1) * kRowBlock); ++r) {
    LoadRow(input, r, k, row);
    const int64_t at = r * of_row, first = at / kRows * kRows, count = Min(all - first, kRows);
    char* out = static_cast<char*>(x) + first * row_bytes + (at - first) * 64;
    if (is_int8) {
      const float peak = RowPeak(row, k), inverse = Inverse(peak, kMost);
      x_scale[r] = peak / kMost;
      for (int64_t s = 0; s < k / 64; ++s) {
        PutBytes(row + s * 64, inverse, out + s * count * 64);
      }
    } else {
      for (int64_t s = 0; s < k / 32; ++s) {
        auto* to = reinterpret_cast<uint16_t*>(out + s * count * 64);
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
