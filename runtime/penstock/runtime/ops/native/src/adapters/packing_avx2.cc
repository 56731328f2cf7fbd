// Writes the matrices of adapters, as files and pushes have them, to where the kernels read them: in bfloat16, in
// pairs, B times its scaling. Each tensor is read, checked and written while it is in the processor's cache.
#include "adapters/packing.h"

#include <errno.h>
#include <immintrin.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <vector>

namespace penstock {
namespace {

constexpr int64_t kBlockOut = 16;  // outputs of a block of B

enum Dtype : int64_t { kBfloat16 = 0, kFloat16 = 1, kFloat32 = 2 };

int64_t BytesOf(int64_t dtype) { return dtype == kFloat32 ? 4 : 2; }

// Says whether a number of float32 with these bits is NaN or infinity. bfloat16 is the upper half of a float32.
bool IsSpecial(uint32_t bits) { return (bits & 0x7f800000u) == 0x7f800000u; }

// Rounds 8 numbers times the factor to bfloat16, ties to even. Notes in `special` where that is NaN or infinity.
inline __m128i Rounded(__m256 wide, __m256 factor, __m256i& special) {
  const __m256i exponent = _mm256_set1_epi32(0x7f800000);
  const __m256i bits = _mm256_castps_si256(_mm256_mul_ps(wide, factor));
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i raised = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  // A NaN may become something else by the addition, so the number is looked at before and after it.
  special = _mm256_or_si256(special, _mm256_cmpeq_epi32(_mm256_and_si256(bits, exponent), exponent));
  special = _mm256_or_si256(special, _mm256_cmpeq_epi32(_mm256_and_si256(raised, exponent), exponent));
  const __m256i halves = _mm256_srli_epi32(raised, 16);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(halves, halves), 0x08);
  return _mm256_castsi256_si128(packed);
}

inline __m256 Widened(const char* from, int64_t dtype) {
  if (dtype == kFloat32) {
    return _mm256_loadu_ps(reinterpret_cast<const float*>(from));
  }
  const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  if (dtype == kFloat16) {
    return _mm256_cvtph_ps(halves);
  }
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}

// Writes `count` numbers times the factor in bfloat16. Says whether all are finite.
bool Convert(const char* from, int64_t dtype, int64_t count, float scaling, uint16_t* to) {
  const int64_t each = BytesOf(dtype);
  const __m256 factor = _mm256_set1_ps(scaling);
  __m256i special = _mm256_setzero_si256();
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m128i made = Rounded(Widened(from + i * each, dtype), factor, special);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), made);
  }
  if (i < count) {
    char last[32] = {};
    uint16_t made[8];
    std::memcpy(last, from + i * each, (count - i) * each);
    // Zeros behind the last number may become NaN, times an infinite scaling; then the numbers are bad as well.
    _mm_storeu_si128(reinterpret_cast<__m128i*>(made), Rounded(Widened(last, dtype), factor, special));
    std::memcpy(to + i, made, (count - i) * sizeof(uint16_t));
  }
  return _mm256_testz_si256(special, special);
}

// Says whether all numbers are finite, which are bfloat16.
bool AreFinite(const char* from, int64_t count) {
  const __m256i exponent = _mm256_set1_epi16(0x7f80);
  __m256i special = _mm256_setzero_si256();
  int64_t i = 0;
  for (; i + 16 <= count; i += 16) {
    const __m256i some = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + 2 * i));
    special = _mm256_or_si256(special, _mm256_cmpeq_epi16(_mm256_and_si256(some, exponent), exponent));
  }
  bool is_special = !_mm256_testz_si256(special, special);
  for (; i < count; ++i) {
    uint16_t one;
    std::memcpy(&one, from + 2 * i, sizeof one);
    is_special |= IsSpecial(static_cast<uint32_t>(one) << 16);
  }
  return !is_special;
}

uint32_t WordAt(const char* from) {
  uint32_t word;
  std::memcpy(&word, from, sizeof word);
  return word;
}

// Writes 8 words of each of 8 rows, which are `from_stride` bytes from each other, to 8 rows of words.
inline void Transpose8(const char* from, int64_t from_stride, uint32_t* to, int64_t to_stride) {
  __m256i a[8], b[8];
  for (int i = 0; i < 8; ++i) {
    a[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i * from_stride));
  }
  for (int i = 0; i < 8; i += 2) {
    b[i] = _mm256_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm256_unpackhi_epi32(a[i], a[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    a[i] = _mm256_unpacklo_epi64(b[i], b[i + 2]);
    a[i + 1] = _mm256_unpackhi_epi64(b[i], b[i + 2]);
    a[i + 2] = _mm256_unpacklo_epi64(b[i + 1], b[i + 3]);
    a[i + 3] = _mm256_unpackhi_epi64(b[i + 1], b[i + 3]);
  }
  // The halves of a[4 i + j] hold words j and 4 + j of rows 4 i .. 4 i + 3.
  for (int j = 0; j < 4; ++j) {
    auto* low = reinterpret_cast<__m256i*>(to + j * to_stride);
    auto* high = reinterpret_cast<__m256i*>(to + (4 + j) * to_stride);
    _mm256_storeu_si256(low, _mm256_permute2x128_si256(a[j], a[4 + j], 0x20));
    _mm256_storeu_si256(high, _mm256_permute2x128_si256(a[j], a[4 + j], 0x31));
  }
}

// Writes word w of row r to `to[w * to_stride + r]`. Rows are `from_stride` bytes from each other.
void Transpose(const char* from, int64_t from_stride, int64_t rows, int64_t words, uint32_t* to, int64_t to_stride) {
  const int64_t whole_rows = rows / 8 * 8, whole_words = words / 8 * 8;
  for (int64_t w = 0; w < whole_words; w += 8) {
    for (int64_t r = 0; r < whole_rows; r += 8) {
      Transpose8(from + r * from_stride + 4 * w, from_stride, to + w * to_stride + r, to_stride);
    }
  }
  for (int64_t w = 0; w < words; ++w) {
    for (int64_t r = w < whole_words ? whole_rows : 0; r < rows; ++r) {
      to[w * to_stride + r] = WordAt(from + r * from_stride + 4 * w);
    }
  }
}

// Writes inputs `first` to `first + count` of A [rank, line]: a row for two inputs, with the pairs of each rank.
void PackA(const char* from, const PackedBlock& block) {
  Transpose(from + 2 * block.first, 2 * block.line, block.rank, block.count / 2,
            reinterpret_cast<uint32_t*>(block.target), block.stride / 2);
}

// Writes outputs `first` to `first + count` of B [out, rank]: a row for each block of outputs, with their pairs of each
// two ranks. A rank that has no partner is paired with zeros.
void PackB(const char* from, const PackedBlock& block) {
  for (int64_t begin = 0; begin < block.count; begin += kBlockOut) {
    const char* rows = from + 2 * (block.first + begin) * block.line;
    auto* to = reinterpret_cast<uint32_t*>(block.target) + begin / kBlockOut * (block.stride / 2);
    const int64_t pairs = block.rank / 2;
    Transpose(rows, 2 * block.line, kBlockOut, pairs, to, kBlockOut);
    for (int64_t output = 0; block.rank % 2 && output < kBlockOut; ++output) {
      uint16_t last;
      std::memcpy(&last, rows + 2 * (output * block.line + block.rank - 1), sizeof last);
      to[pairs * kBlockOut + output] = last;
    }
  }
}

// Reads all bytes of a tensor. Says whether they are there; else `error` has why not, and 0 for a file that ends
// before.
bool ReadAll(int file, const PackedBlock& block, char* to, int64_t& error) {
  for (int64_t done = 0; done < block.num_bytes;) {
    const ssize_t got = pread(file, to + done, block.num_bytes - done, block.source + done);
    if (got < 0 && errno == EINTR) {
      continue;
    }
    if (got <= 0) {
      error = got < 0 ? errno : 0;
      return false;
    }
    done += got;
  }
  return true;
}

bool SourceIsFinite(const char* from, int64_t dtype, int64_t count) {
  if (dtype == kBfloat16) {
    return AreFinite(from, count);
  }
  std::vector<uint16_t> unused(count);
  if (dtype == kFloat16) {  // all of them are far below the largest bfloat16
    return Convert(from, dtype, count, 1.0f, unused.data());
  }
  for (int64_t i = 0; i < count; ++i) {
    uint32_t bits;
    std::memcpy(&bits, from + 4 * i, sizeof bits);
    if (IsSpecial(bits)) {
      return false;
    }
  }
  return true;
}

int64_t Pack(int file, const PackedBlock* blocks, int64_t count, int64_t& bad, int64_t& error) {
  std::vector<char> read;
  std::vector<uint16_t> converted;
  const char* from = nullptr;
  const char* numbers = nullptr;
  for (bad = 0; bad < count; ++bad) {
    const PackedBlock& block = blocks[bad];
    if (block.is_first) {  // else `numbers` has the tensor of the block before
      const int64_t size = block.num_bytes / BytesOf(block.dtype);
      from = reinterpret_cast<const char*>(block.source);
      if (file >= 0) {
        read.resize(std::max(static_cast<int64_t>(read.size()), block.num_bytes));
        if (!ReadAll(file, block, read.data(), error)) {
          return kNotRead;
        }
        from = read.data();
      }
      const bool as_it_is = block.dtype == kBfloat16 && block.scaling == 1.0f;
      bool is_finite;
      if (as_it_is) {
        is_finite = AreFinite(from, size);
        numbers = from;
      } else {
        converted.resize(std::max(static_cast<int64_t>(converted.size()), size));
        is_finite = Convert(from, block.dtype, size, block.scaling, converted.data());
        numbers = reinterpret_cast<const char*>(converted.data());
      }
      if (!is_finite) {
        return SourceIsFinite(from, block.dtype, size) ? kTooLarge : kNotFinite;
      }
    }
    block.is_b ? PackB(numbers, block) : PackA(numbers, block);
  }
  return kPacked;
}

}  // namespace
}  // namespace penstock

__attribute__((visibility("default"))) int64_t penstock_pack_adapter(int file, const penstock::PackedBlock* blocks,
                                                                     int64_t count, int64_t* bad, int64_t* error) {
  try {
    return penstock::Pack(file, blocks, count, *bad, *error);
  } catch (const std::bad_alloc&) {
    return penstock::kNoMemory;
  }
}
