// Packing adapters for the kernels, see packing_avx2.cc. `ops/native/adapter_packing.py` calls it.
#pragma once

#include <cstdint>

namespace penstock {

// A part of a tensor, and where it goes. Sizes are numbers, not bytes, where nothing else is said.
struct PackedBlock {
  int64_t source;     // where the tensor begins: an address, or a place in the file
  int64_t num_bytes;  // of the tensor
  int64_t dtype;      // 0: bfloat16, 1: float16, 2: float32
  int64_t line;       // numbers of a row of the tensor
  int64_t is_b;
  int64_t rank;
  int64_t first;   // of A the first input of the part, of B the first output
  int64_t count;   // inputs or outputs of the part: pairs of A, blocks of 16 of B
  int64_t target;  // the address of the first row
  int64_t stride;  // from one row of the target to the next; an even number
  float scaling;
  int32_t is_first;  // whether the block before is of another tensor, which may begin at the same address
};

enum Packing : int64_t { kPacked = 0, kNotRead = 1, kNotFinite = 2, kTooLarge = 3, kNoMemory = 4 };

}  // namespace penstock

extern "C" {

// Packs all blocks. Blocks of one tensor follow each other. `file` is a descriptor, or -1 if sources are addresses.
// Where it does not return kPacked, `bad` is the block of the tensor that is to blame, and `error` of kNotRead the
// errno, or 0 for a file that ended before the tensor.
int64_t penstock_pack_adapter(int file, const penstock::PackedBlock* blocks, int64_t count, int64_t* bad,
                              int64_t* error);
}
