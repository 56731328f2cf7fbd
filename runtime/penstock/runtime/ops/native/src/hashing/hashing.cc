#include "hashing/hashing.h"

#include "common/cpu.h"

__attribute__((visibility("default"))) int64_t penstock_hash_pieces(const uint8_t* data, int64_t size, int64_t count,
                                                                    uint8_t* hashes) {
  using namespace penstock;
  if (CurrentIsa() < Isa::kAvx512) {  // OpenSSL's instructions for SHA are faster than 8 pieces at a time
    return 0;
  }
  int64_t done = 0;
  for (; done + kPieces <= count; done += kPieces) {
    HashPiecesAvx512(data + done * size, size, hashes + done * kHashBytes);
  }
  return done;
}
