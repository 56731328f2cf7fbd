#include "common/cpu.h"

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>

namespace penstock {
namespace {

bool Bit(unsigned value, int bit) { return (value >> bit) & 1; }

// Linux grants AMX's 8 KiB of tile state to a process on request (arch_prctl, since Linux 5.16).
bool RequestAmx() {
  constexpr int kReqXcompPerm = 0x1023;
  constexpr int kXtileData = 18;
  return syscall(SYS_arch_prctl, kReqXcompPerm, kXtileData) == 0;
}

unsigned long long EnabledStates() {
  unsigned low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<unsigned long long>(high) << 32) | low;
}

Isa Detect() {
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !Bit(c, 27)) {
    return Isa::kNone;  // without OSXSAVE, AVX registers cannot be used
  }
  const bool fma = Bit(c, 12), f16c = Bit(c, 29);
  const unsigned long long states = EnabledStates();
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) {
    return Isa::kNone;
  }
  const bool avx2 = Bit(b, 5) && fma && f16c && (states & 0x6) == 0x6;
  if (!avx2) {
    return Isa::kNone;
  }
  // F, DQ, BW, VL and VNNI, which every AVX-512 server processor since Cascade Lake has.
  const bool avx512 = Bit(b, 16) && Bit(b, 17) && Bit(b, 30) && Bit(b, 31) && Bit(c, 11) && (states & 0xe6) == 0xe6;
  if (!avx512) {
    return Isa::kAvx2;
  }
  const bool amx = Bit(d, 22) && Bit(d, 24) && Bit(d, 25) && (states & 0x60000) == 0x60000;
  unsigned a1, b1, c1, d1;
  const bool bf16 = __get_cpuid_count(7, 1, &a1, &b1, &c1, &d1) && Bit(a1, 5);
  if (!bf16) {
    return Isa::kAvx512;
  }
  return amx && RequestAmx() ? Isa::kAmx : Isa::kAvx512Bf16;
}

Isa Best() {
  static const Isa best = Detect();
  return best;
}

bool IsIntel() {
  unsigned a, b, c, d;
  if (!__get_cpuid(0, &a, &b, &c, &d)) {
    return false;
  }
  return b == signature_INTEL_ebx && c == signature_INTEL_ecx && d == signature_INTEL_edx;
}

std::atomic<int> limit{static_cast<int>(Isa::kAmx)};
std::atomic<int> pairs{-1};

}  // namespace

Isa CurrentIsa() { return static_cast<Isa>(std::min(static_cast<int>(Best()), limit.load(std::memory_order_relaxed))); }

bool UsePairs() {
  static const bool liked = !IsIntel();
  const int wanted = pairs.load(std::memory_order_relaxed);
  return wanted < 0 ? liked : wanted > 0;
}

}  // namespace penstock

__attribute__((visibility("default"))) int penstock_best_isa() { return static_cast<int>(penstock::Best()); }

__attribute__((visibility("default"))) int penstock_limit_isa(int isa) {
  penstock::limit.store(isa);
  return static_cast<int>(penstock::CurrentIsa());
}

__attribute__((visibility("default"))) void penstock_use_pairs(int pairs) { penstock::pairs.store(pairs); }
