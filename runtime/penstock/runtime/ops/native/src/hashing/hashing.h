// SHA-256 (FIPS 180-4) of many pieces of equal size at once. `ops/native/hashing.py` calls it.
#pragma once

#include <cstdint>

namespace penstock {

// Pieces that are hashed together.
constexpr int64_t kPieces = 16;
// Bytes of a hash.
constexpr int64_t kHashBytes = 32;

// Hashes kPieces pieces of `size` bytes, a multiple of 64, that lie one behind the other. Writes a hash for each.
void HashPiecesAvx512(const uint8_t* data, int64_t size, uint8_t* hashes);

}  // namespace penstock

extern "C" {

// Hashes as many of `count` pieces of `size` bytes, a multiple of 64, as this processor hashes faster together than one
// after the other. Returns how many of the first pieces those are, maybe 0.
int64_t penstock_hash_pieces(const uint8_t* data, int64_t size, int64_t count, uint8_t* hashes);
}
