// Sixteen float32 values at a time, compiled once per instruction set. Everything here is in an unnamed namespace: if
// it were shared, the linker would keep one copy, which might have instructions that the machine lacks.
//
// Each form has a type Lanes and the same functions:
//   Load, Store          from and to float32 [16]
//   Fill(float)          the same value in all lanes
//   Add, Sub, Mul, Div   lane by lane
//   MulAdd(a, b, c)      a * b + c, rounded once
//   Total                the sum of all lanes
//   Swapped<kApart>      in lane i what lane i ^ kApart has; kApart is 1, 2, 4 or 8
//   Clip(a, low, high)   a within [low, high]; NaN stays NaN
//   LargerSize(size, b)  the larger of `size`, which is not negative, and the size of b. As integers, the bits of sizes
//                        have the same order as the sizes, and NaN is the largest
//   LargestSize          the largest of lanes that are not negative; NaN if any lane is NaN
//   StoreInt8            rounds to the nearest integer, ties to even; no lane is larger than 127 in size; NaN becomes 0
//   StoreInt16           the same, where no lane is larger than 32,767; NaN becomes any number
//   LoadBf16, StoreBf16  from and to bf16 [16]; storing rounds to nearest, ties to even, and NaN stays NaN
//   LoadPairs            from bf16 [16][2]: the first and the second of each pair
//   LoadE4m3             from float8 (E4M3) [16], 256 times smaller than they are
//   RoundToBf16          rounds like StoreBf16, and stays float32
//   Exp                  e^x to about 2 ulp (Cephes' polynomial) for x in [-87, 88], which others are clipped to
#pragma once

#if defined(__AVX512F__)
#include "common/lanes_avx512.h"
#elif defined(__AVX2__)
#include "common/lanes_avx2.h"
#else
#include "common/lanes_plain.h"
#endif
