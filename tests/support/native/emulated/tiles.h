// AMX's tiles in plain C++. The functions are those of src/common/tiles.h, with the meaning that Intel's manual gives
// the instructions (Software Developer's Manual, volume 2, LDTILECFG to TILEZERO). Where the processor would fault,
// they print why and abort.
#pragma once

#include <immintrin.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace penstock {

extern std::atomic<int> threads_with_tiles;  // threads that have configured their tiles and not yet released them

namespace {

struct Emulated {
  bool configured = false;
  int rows[8] = {}, row_bytes[8] = {};
  alignas(64) uint8_t bytes[8][16][64] = {};
};

thread_local Emulated emulated;

inline void Demand(bool held, const char* what) {
  if (held) return;
  fprintf(stderr, "emulated AMX: %s\n", what);
  abort();
}

inline void TileRelease() {
  if (emulated.configured) --threads_with_tiles;
  emulated = Emulated();
}

inline void TileConfigure(const TileConfig& config) {
  Demand(config.palette == 1 && config.start_row == 0, "palette 1, row 0 and no other");
  TileRelease();
  emulated.configured = true;
  ++threads_with_tiles;
  for (int t = 0; t < 16; ++t) {
    Demand(config.rows[t] <= 16 && config.row_bytes[t] <= 64, "a tile has at most 16 rows of 64 bytes");
    Demand((config.rows[t] == 0) == (config.row_bytes[t] == 0), "a tile without rows, or without columns");
    Demand(t < 8 || config.rows[t] == 0, "there are eight tiles");
    if (t < 8) emulated.rows[t] = config.rows[t], emulated.row_bytes[t] = config.row_bytes[t];
  }
}

inline void DemandTile(int tile) {
  Demand(emulated.configured && emulated.rows[tile] > 0, "a tile that is not configured");
}

template <int kTile>
inline void TileZero() {
  DemandTile(kTile);
  memset(emulated.bytes[kTile], 0, sizeof emulated.bytes[kTile]);
}

template <int kTile>
inline void TileLoad(const void* from, int64_t stride) {
  TileZero<kTile>();
  for (int r = 0; r < emulated.rows[kTile]; ++r) {
    memcpy(emulated.bytes[kTile][r], static_cast<const char*>(from) + r * stride, emulated.row_bytes[kTile]);
  }
}

template <int kTile>
inline void TileStore(void* to, int64_t stride) {
  DemandTile(kTile);
  for (int r = 0; r < emulated.rows[kTile]; ++r) {
    memcpy(static_cast<char*>(to) + r * stride, emulated.bytes[kTile][r], emulated.row_bytes[kTile]);
  }
}

inline void DemandShapes(int c, int a, int b) {
  DemandTile(c), DemandTile(a), DemandTile(b);
  Demand(c != a && c != b && a != b, "a product needs three different tiles");
  Demand(emulated.rows[a] == emulated.rows[c], "A and C differ in rows");
  Demand(emulated.row_bytes[a] == 4 * emulated.rows[b], "A's columns are not B's rows");
  Demand(emulated.row_bytes[b] == emulated.row_bytes[c], "B and C differ in columns");
}

inline float Wide(uint16_t bf16) {
  const uint32_t bits = static_cast<uint32_t>(bf16) << 16;
  float wide;
  memcpy(&wide, &bits, 4);
  return wide;
}

// One row of C. The products of even and of odd elements are summed separately, each by fused multiply-add from zero in
// ascending order; then both sums are added, and their total is added to C.
__attribute__((noinline)) void DotRow(const uint8_t* a, const float (*b)[32], int pairs, uint8_t* c) {
  float sums[32] = {}, row[16];
  for (int k = 0; k < pairs; ++k) {
    uint16_t pair[2];
    memcpy(pair, a + 4 * k, sizeof pair);
    const float even = Wide(pair[0]), odd = Wide(pair[1]);
    for (int i = 0; i < 32; ++i) sums[i] = __builtin_fmaf(i % 2 ? odd : even, b[k][i], sums[i]);
  }
  memcpy(row, c, sizeof row);
  for (int n = 0; n < 16; ++n) row[n] += sums[2 * n] + sums[2 * n + 1];
  memcpy(c, row, sizeof row);
}

template <int kC, int kA, int kB>
inline void TileDotBf16() {
  DemandShapes(kC, kA, kB);
  float b[16][32];
  for (int k = 0; k < emulated.rows[kB]; ++k) {
    uint16_t halves[32];
    memcpy(halves, emulated.bytes[kB][k], sizeof halves);
    for (int i = 0; i < 32; ++i) b[k][i] = Wide(halves[i]);
  }
  const unsigned mode = _mm_getcsr();
  _mm_setcsr(0x9fc0);  // to nearest even; denormals count as zero, and become zero
  for (int m = 0; m < emulated.rows[kC]; ++m) DotRow(emulated.bytes[kA][m], b, emulated.rows[kB], emulated.bytes[kC][m]);
  _mm_setcsr(mode);
}

template <int kC, int kA, int kB>
inline void TileDotInt8() {
  DemandShapes(kC, kA, kB);
  const int words = emulated.row_bytes[kC] / 4;
  for (int m = 0; m < emulated.rows[kC]; ++m) {
    int32_t c[16];
    memcpy(c, emulated.bytes[kC][m], sizeof c);
    for (int k = 0; k < emulated.rows[kB]; ++k) {
      int8_t a[4], b[64];
      memcpy(a, &emulated.bytes[kA][m][4 * k], sizeof a);
      memcpy(b, emulated.bytes[kB][k], sizeof b);
      for (int n = 0; n < words; ++n) {
        for (int i = 0; i < 4; ++i) c[n] += a[i] * b[4 * n + i];
      }
    }
    memcpy(emulated.bytes[kC][m], c, sizeof c);
  }
}

}  // namespace
}  // namespace penstock
