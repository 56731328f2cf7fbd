// The lanes of lanes.h as an array, for code that runs on any processor, which needs only some of the functions.
#pragma once

#include <cstdint>
#include <cstring>

namespace penstock {
namespace {

struct Lanes {
  float v[16];
};

template <typename Function>
inline Lanes Each(Function function) {
  Lanes out;
  for (int i = 0; i < 16; ++i) {
    out.v[i] = function(i);
  }
  return out;
}

inline Lanes Load(const float* from) {
  return Each([&](int i) { return from[i]; });
}
inline void Store(float* to, const Lanes& a) { memcpy(to, a.v, sizeof a.v); }
inline Lanes Fill(float value) {
  return Each([&](int) { return value; });
}
inline Lanes Add(const Lanes& a, const Lanes& b) {
  return Each([&](int i) { return a.v[i] + b.v[i]; });
}
inline Lanes Mul(const Lanes& a, const Lanes& b) {
  return Each([&](int i) { return a.v[i] * b.v[i]; });
}
inline void StoreBf16(uint16_t* to, const Lanes& a) {
  for (int i = 0; i < 16; ++i) {
    uint32_t bits;
    memcpy(&bits, &a.v[i], 4);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    to[i] = static_cast<uint16_t>(a.v[i] == a.v[i] ? rounded : (bits >> 16) | 0x40);
  }
}

}  // namespace
}  // namespace penstock
