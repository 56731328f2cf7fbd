// AMX's eight tile registers by number, each of at most 16 rows of 64 bytes.
//
// The numbers are template arguments, because the compilers' own functions are macros that paste their arguments into
// assembly text. A test build names a header in PENSTOCK_TILES that has the same functions in plain C++, so that code
// written with them can run on machines without AMX. In an unnamed namespace, like lanes.h.
#pragma once

#include <cstdint>

#if defined(__AMX_BF16__) || defined(PENSTOCK_TILES)
#define PENSTOCK_HAS_TILES 1

namespace penstock {
namespace {

// The operand of LDTILECFG. By default it has all eight tiles in full size.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

}  // namespace
}  // namespace penstock

#ifdef PENSTOCK_TILES
#include PENSTOCK_TILES
#else

namespace penstock {
namespace {

inline void TileConfigure(const TileConfig& config) { asm volatile("ldtilecfg %0" : : "m"(config)); }

// Tiles hold nothing from here on, so the system need not save their 8 KiB whenever it switches threads.
inline void TileRelease() { asm volatile("tilerelease"); }

template <int kTile>
inline void TileZero() {
  asm volatile("tilezero %%tmm%c0" : : "i"(kTile));
}

// Rows lie `stride` bytes apart.
template <int kTile>
inline void TileLoad(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(kTile) : "memory");
}

template <int kTile>
inline void TileStore(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(kTile) : "memory");
}

// C float32 [m, n] += A bf16 [m, k] times B, pairs of bf16 [k / 2, n, 2].
template <int kC, int kA, int kB>
inline void TileDotBf16() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kC), "i"(kA), "i"(kB));
}

// C int32 [m, n] += A int8 [m, k] times B, fours of int8 [k / 4, n, 4].
template <int kC, int kA, int kB>
inline void TileDotInt8() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kC), "i"(kA), "i"(kB));
}

}  // namespace
}  // namespace penstock

#endif
#endif
