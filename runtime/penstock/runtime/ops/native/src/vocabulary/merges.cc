// Finds the merges of a SentencePiece vocabulary: every piece that is two other pieces, one behind the other.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <new>
#include <vector>

namespace penstock {
namespace {

constexpr uint64_t kBase = 0x9e3779b97f4a7c15u;

// The hash of a text is a polynomial of its bytes, so that of its end follows from that of its begin.
inline uint64_t Longer(uint64_t hash, uint8_t byte) { return hash * kBase + byte + 1; }

inline uint64_t Spread(uint64_t hash) {  // the low bits of a polynomial depend on those of the bytes alone
  hash = (hash ^ (hash >> 32)) * 0xd6e8feb86659fd93u;
  return hash ^ (hash >> 32);
}

inline bool IsInsideCharacter(uint8_t byte) { return (byte & 0xc0) == 0x80; }  // of UTF-8

struct Text {
  const uint8_t* begin;
  int64_t size;
};

int Compared(const Text& one, const Text& other) {
  const int order = std::memcmp(one.begin, other.begin, std::min(one.size, other.size));
  return order != 0 ? order : (one.size > other.size) - (one.size < other.size);
}

class Pieces {
 public:
  // Piece i ends at byte ends[i] of `text`, where the next one begins.
  Pieces(const uint8_t* text, const int64_t* ends, int64_t count) : texts_(count) {
    int64_t longest = 0;
    for (int64_t i = 0, begin = 0; i < count; begin = ends[i++]) {
      texts_[i] = {text + begin, ends[i] - begin};
      longest = std::max(longest, texts_[i].size);
    }
    powers_.resize(longest + 1, 1);
    for (int64_t i = 0; i < longest; ++i) {
      powers_[i + 1] = powers_[i] * kBase;
    }
    size_t slots = 16;
    while (slots < 2 * texts_.size()) {
      slots *= 2;
    }
    slots_.resize(slots, {0, -1});
    for (int64_t i = 0; i < count; ++i) {
      uint64_t hash = 0;
      for (int64_t at = 0; at < texts_[i].size; ++at) {
        hash = Longer(hash, texts_[i].begin[at]);
      }
      const uint64_t spread = Spread(hash);
      size_t slot = spread & (slots - 1);
      while (slots_[slot].piece >= 0) {
        slot = (slot + 1) & (slots - 1);
      }
      slots_[slot] = {static_cast<uint32_t>(spread >> 32), static_cast<int32_t>(i)};
    }
  }

  const Text& operator[](int64_t piece) const { return texts_[piece]; }

  // `hash` behind the first bytes of a text, and `whole` behind all: that of what lies between, `size` bytes.
  uint64_t Rest(uint64_t hash, uint64_t whole, int64_t size) const { return whole - hash * powers_[size]; }

  // The piece that is this text, or -1.
  int32_t Find(const Text& text, uint64_t hash) const {
    const uint64_t spread = Spread(hash);
    const uint32_t tag = static_cast<uint32_t>(spread >> 32);
    for (size_t slot = spread & (slots_.size() - 1); slots_[slot].piece >= 0; slot = (slot + 1) & (slots_.size() - 1)) {
      if (slots_[slot].tag == tag && Compared(texts_[slots_[slot].piece], text) == 0) {
        return slots_[slot].piece;
      }
    }
    return -1;
  }

 private:
  struct Slot {
    uint32_t tag;
    int32_t piece;  // -1: none
  };

  std::vector<Text> texts_;
  std::vector<uint64_t> powers_;
  std::vector<Slot> slots_;
};

struct Merge {
  double score;
  int32_t characters;  // of the left piece
  int32_t left, right;
};

int64_t Find(const Pieces& pieces, const double* scores, int64_t count, int32_t* found) {
  std::vector<Merge> merges;
  std::vector<uint64_t> hashes;  // behind each byte
  for (int64_t i = 0; i < count; ++i) {
    const Text& text = pieces[i];
    hashes.assign(1, 0);
    for (int64_t at = 0; at < text.size; ++at) {
      hashes.push_back(Longer(hashes.back(), text.begin[at]));
    }
    int32_t characters = 0;
    for (int64_t at = 1; at < text.size; ++at) {
      if (IsInsideCharacter(text.begin[at])) {
        continue;
      }
      ++characters;
      const int32_t left = pieces.Find({text.begin, at}, hashes[at]);
      if (left < 0) {
        continue;
      }
      const int64_t size = text.size - at;
      const int32_t right = pieces.Find({text.begin + at, size}, pieces.Rest(hashes[at], hashes[text.size], size));
      if (right >= 0) {
        merges.push_back({scores[i], characters, left, right});
      }
    }
  }
  std::sort(merges.begin(), merges.end(), [&pieces](const Merge& one, const Merge& other) {
    if (one.score != other.score) {
      return one.score > other.score;
    }
    if (one.characters != other.characters) {
      return one.characters > other.characters;
    }
    const int order = Compared(pieces[one.left], pieces[other.left]);
    return order != 0 ? order < 0 : Compared(pieces[one.right], pieces[other.right]) < 0;
  });
  for (size_t i = 0; i < merges.size(); ++i) {
    found[2 * i] = merges[i].left;
    found[2 * i + 1] = merges[i].right;
  }
  return static_cast<int64_t>(merges.size());
}

}  // namespace
}  // namespace penstock

// Writes the two pieces of each merge to `found`, which has room for as many as the pieces have places between two
// characters. No two pieces are alike, none is empty, and no score is NaN. Returns how many there are; -1: no memory.
extern "C" __attribute__((visibility("default"))) int64_t penstock_find_merges(const uint8_t* text, const int64_t* ends,
                                                                               const double* scores, int64_t count,
                                                                               int32_t* found) {
  try {
    return penstock::Find(penstock::Pieces(text, ends, count), scores, count, found);
  } catch (const std::bad_alloc&) {
    return -1;
  }
}
