// AVX2 with FMA. bf16 weights are widened to float32, and int8 weights to int16, in registers: the shifts go to ports
// of the processor that multiplication leaves free.
#include "linear/linear_vector.h"

namespace penstock {
namespace {

struct WideBf16 {
  using Sum = __m256;
  using Operand = __m256;
  static constexpr bool kByGroup = false;
  static constexpr int kParts = 2, kSteps = 2, kRows = 6, kPairedRows = 0, kWidth = 8;
  static constexpr Form kForm = Form::kFloat;
  static Sum LoadSum(const float* from) { return _mm256_loadu_ps(from); }
  static void StoreSum(float* to, Sum sum) { _mm256_storeu_ps(to, sum); }
  template <int kStep>
  static Operand Weights(const char* tile_row, int part) {
    const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(tile_row) + part);
    if (kStep == 0) {
      return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
    }
    return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xffff0000))));
  }
  static Operand Word(const uint32_t* x) { return _mm256_set1_ps(*reinterpret_cast<const float*>(x)); }
  // sum += weights * word. An instruction written out, because twelve sums, two weights and a word all but fill the
  // registers: given the intrinsic, GCC now and then has the result in the word's register, and keeps sums in memory.
  static Sum Add(Sum sum, Operand weights, Operand word) {
    __asm__("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(weights), "x"(word));
    return sum;
  }
};

// What products by group do with sums.
struct WideFloats {
  using Floats = __m256;
  static constexpr int kGroups = 2;
  static constexpr LeastOf kLeast = LeastOf::kNothing;
  static Floats Load(const float* from) { return _mm256_loadu_ps(from); }
  static void Store(float* to, Floats value) { _mm256_storeu_ps(to, value); }
  static Floats Fill(const uint32_t* word) { return _mm256_set1_ps(*reinterpret_cast<const float*>(word)); }
  static Floats Halves(const char* halves, int part) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(halves) + part));
  }
  static Floats Bytes(const char* bytes, int part) {
    const __m128i eight = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes + part * 8));
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(eight));
  }
  static Floats Times(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
  static Floats PlusProduct(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(b, c, a); }
  static Floats MinusProduct(Floats a, Floats b, Floats c) { return _mm256_fnmadd_ps(b, c, a); }
};

// A register holds two of the four inputs of eight outputs as int16: shifts widen them in place, 0 and 2, then 1 and 3.
// (_mm256_maddubs_epi16 would take bytes, but it saturates.)
struct WideInt8 : WideFloats {
  using Sum = __m256i;
  using Operand = __m256i;
  static constexpr bool kByGroup = true;
  static constexpr int kParts = 2, kSteps = 2, kRows = 5, kPairedRows = 0, kWidth = 8;
  static constexpr int kScaleLines = 0, kGroupLines = 8, kCodeLines = 8, kMiddle = 0;
  static constexpr Form kForm = Form::kHalves;
  template <int kStep>
  static Operand Weights(const char* group, int line, int part) {
    const __m256i fours = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(group + line * kLine) + part);
    return _mm256_srai_epi16(kStep == 0 ? _mm256_slli_epi16(fours, 8) : fours, 8);
  }
  static Operand Word(const uint32_t* x) { return _mm256_set1_epi32(static_cast<int>(*x)); }
  // Instructions written out, as in WideBf16: with ten sums, GCC has no register left for the product.
  static Sum Add(Sum sum, Operand weights, Operand word) {
    __m256i product;
    __asm__("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+x"(sum), "=&x"(product) : "x"(weights), "x"(word));
    return sum;
  }
  static Sum Begin(const uint32_t*) { return _mm256_setzero_si256(); }
  static Floats Total(Sum sum, const uint32_t*) { return _mm256_cvtepi32_ps(sum); }
};

// Codes of 8 bits are widened to int16, as int8 is. Products of codes of 4 bits are summed in int16: a sum has two
// products of each of a group's eight lines and halves, at most 16 * 15 * 127.
template <int kBits, LeastOf kLeastOf>
struct WideCodes : WideFloats {
  using Sum = __m256i;
  using Operand = __m256i;
  static constexpr bool kByGroup = true;
  static constexpr int kParts = 2, kSteps = 2, kRows = 4, kPairedRows = 0, kWidth = 8;
  static constexpr LeastOf kLeast = kLeastOf;
  static constexpr bool kIsCentred = kLeast == LeastOf::kNothing;
  static constexpr int kScaleLines = kIsCentred ? 1 : 2, kGroupLines = kBits == 4 ? 4 : 8;
  static constexpr int kCodeLines = kGroupLines, kMiddle = kIsCentred ? 1 << (kBits - 1) : 0;
  static constexpr Form kForm = kBits == 4 ? Form::kFour : Form::kHalves;
  template <int kStep>
  static Operand Weights(const char* group, int line, int part) {
    const __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(group + line * kLine) + part);
    if (kBits == 8) {
      return kStep == 0 ? _mm256_and_si256(codes, _mm256_set1_epi16(0xff)) : _mm256_srli_epi16(codes, 8);
    }
    return _mm256_and_si256(kStep == 0 ? codes : _mm256_srli_epi16(codes, 4), _mm256_set1_epi8(15));
  }
  static Operand Word(const uint32_t* x) { return _mm256_set1_epi32(static_cast<int>(*x)); }
  static Sum Add(Sum sum, Operand weights, Operand word) {
    if (kBits == 8) {
      return _mm256_add_epi32(sum, _mm256_madd_epi16(weights, word));
    }
    return _mm256_add_epi16(sum, _mm256_maddubs_epi16(weights, word));
  }
  static Sum Begin(const uint32_t* word) { return !kIsCentred || kBits == 4 ? _mm256_setzero_si256() : Word(word); }
  static Floats Total(Sum sum, const uint32_t* word) {
    if (kBits == 8) {
      return _mm256_cvtepi32_ps(sum);
    }
    const __m256i wide = _mm256_madd_epi16(sum, _mm256_set1_epi16(1));
    return _mm256_cvtepi32_ps(kIsCentred ? _mm256_add_epi32(wide, Word(word)) : wide);
  }
  static Floats Scale(const char* tile, int group, int part) { return Halves(tile + group * kLine / 2, part); }
  static Floats Least(const char* tile, int group, int part) { return Halves(tile + kLine + group * kLine / 2, part); }
};

// Codes of 6 bits are multiplied as unsigned ones, and what that adds to them is taken off with the minimum. Two
// products of theirs, at most 2 * 63 * 127, fill an int16.
template <int kBits>
struct WideNested : WideFloats {
  using Sum = __m256i;
  using Operand = __m256i;
  static constexpr bool kByGroup = true;
  static constexpr int kParts = 2, kSteps = 2, kRows = 4, kPairedRows = 0, kWidth = 8, kGroups = kBits == 4 ? 2 : 4;
  static constexpr int kScaleLines = kBits / 2, kCodeLines = 8 / kGroups, kGroupLines = kBits == 4 ? 4 : 3;
  static constexpr int kMiddle = 0;
  static constexpr LeastOf kLeast = LeastOf::kMinima;
  static constexpr Form kForm = Form::kFour;
  template <int kStep>
  static Operand Weights(const char* group, int line, int part) {
    const __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(group + line * kLine) + part);
    const __m256i low = _mm256_and_si256(kStep == 0 ? codes : _mm256_srli_epi16(codes, 4), _mm256_set1_epi8(15));
    if (kBits == 4) {
      return low;
    }
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(group + kCodeLines * kLine) + part);
    const __m256i first = kStep == 0 ? _mm256_slli_epi16(bits, 4) : _mm256_slli_epi16(bits, 2);
    const __m256i high = line == 0 ? first : kStep == 0 ? bits : _mm256_srli_epi16(bits, 2);
    return _mm256_or_si256(low, _mm256_and_si256(high, _mm256_set1_epi8(0x30)));
  }
  static Operand Word(const uint32_t* x) { return _mm256_set1_epi32(static_cast<int>(*x)); }
  static Sum Wide(Sum pairs) { return _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)); }
  static Sum Add(Sum sum, Operand weights, Operand word) {
    const Sum pairs = _mm256_maddubs_epi16(weights, word);
    return kBits == 4 ? _mm256_add_epi16(sum, pairs) : _mm256_add_epi32(sum, Wide(pairs));
  }
  static Sum Begin(const uint32_t*) { return _mm256_setzero_si256(); }
  static Floats Total(Sum sum, const uint32_t*) { return _mm256_cvtepi32_ps(kBits == 4 ? Wide(sum) : sum); }
  static Floats Scale(const char* tile, int group, int part) {
    return Times(Halves(tile, part), Bytes(tile + kLine + group * kBlockOut, part));
  }
  static Floats Least(const char* tile, int group, int part) {
    const char* minima = tile + kLine + (kGroups + group) * kBlockOut;
    const Floats minimum = Times(Halves(tile + kLine / 2, part), Bytes(minima, part));
    return kBits == 4 ? minimum : PlusProduct(minimum, Scale(tile, group, part), _mm256_set1_ps(32.0f));
  }
};

// What stands in the table is multiplied as its size, unsigned, by x with its sign. Two such products, at most 2 * 127
// * 127, fit into an int16.
struct WideTable : WideFloats {
  using Sum = __m256i;
  using Operand = __m256i;
  static constexpr bool kByGroup = true;
  static constexpr int kParts = 2, kSteps = 2, kRows = 4, kPairedRows = 0, kWidth = 8;
  static constexpr int kScaleLines = 1, kGroupLines = 4, kCodeLines = 4, kMiddle = 0;
  static constexpr Form kForm = Form::kFour;
  template <int kStep>
  static Operand Weights(const char* group, int line, int part) {
    const __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(group + line * kLine) + part);
    const __m256i places = _mm256_and_si256(kStep == 0 ? codes : _mm256_srli_epi16(codes, 4), _mm256_set1_epi8(15));
    const __m128i table = _mm_loadu_si128(reinterpret_cast<const __m128i*>(kTable));
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), places);
  }
  static Operand Word(const uint32_t* x) { return _mm256_set1_epi32(static_cast<int>(*x)); }
  static Sum Add(Sum sum, Operand weights, Operand word) {
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(weights), _mm256_sign_epi8(word, weights));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  }
  static Sum Begin(const uint32_t*) { return _mm256_setzero_si256(); }
  static Floats Total(Sum sum, const uint32_t*) { return _mm256_cvtepi32_ps(sum); }
  static Floats Scale(const char* tile, int group, int part) {
    return Times(Halves(tile, part), Bytes(tile + kLine / 2 + group * kBlockOut, part));
  }
};

struct Avx2 {
  using Bf16 = WideBf16;
  using Int8 = WideInt8;
  template <int kBits, LeastOf kLeast>
  using Codes = WideCodes<kBits, kLeast>;
  template <int kBits>
  using Nested = WideNested<kBits>;
  using Table = WideTable;
};

}  // namespace

const LinearKernel& LinearAvx2() { return VectorLinear<Avx2>::Kernel(); }

}  // namespace penstock
