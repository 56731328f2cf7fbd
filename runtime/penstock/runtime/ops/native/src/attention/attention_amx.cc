#include "attention/attention_run.h"

namespace penstock {
namespace {

// AMX is used for bf16, unless a head has fewer than the 32 dims of a tile. All else uses AVX-512.
bool Tiles(const AttentionJob& job) { return job.bf16 && job.dim >= 32; }

int64_t Bytes(const AttentionJob& job, int64_t tiles) {
  return Tiles(job) ? ScratchBytes<Form::kTiles>(job, tiles) : VectorBytes(job, tiles);
}

void Run(const AttentionJob& job, const AttentionUnit& unit, const AttentionUnit& next, char* scratch) {
  if (Tiles(job)) {
    RunUnit<Form::kTiles>(job, unit, next, scratch);
  } else {
    VectorRun(job, unit, next, scratch);
  }
}

void Enter() { TileConfigure(TileConfig()); }

void Leave() { TileRelease(); }

}  // namespace

const AttentionKernel& AttentionAmx() {
  static constexpr AttentionKernel kernel{Enter, Leave, QuantizeRow, Bytes, Run};
  return kernel;
}

}  // namespace penstock
