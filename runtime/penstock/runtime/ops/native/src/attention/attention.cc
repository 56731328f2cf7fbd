// The FFI operations `penstock_attention_plan`, called once a step, and `penstock_attention`, called in every layer,
// which writes the step's keys and values to the cache and then attends.
#include "attention/attention.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <string>

#include "attention/attention_plan.h"
#include "common/cpu.h"
#include "common/guarded.h"
#include "common/parallel.h"
#include "common/scratch.h"
#include "xla/ffi/api/ffi.h"

namespace penstock {
namespace {

namespace ffi = xla::ffi;

// Each type names one use of the memory that a thread keeps (see Scratch).
struct Partials;
struct Pending;
struct Work;

constexpr int64_t kWriteBlock = 32;  // tokens; fewer are written in less time than a thread takes to wake

const AttentionKernel* Kernel() {
  const auto kernel =
      ForCurrentIsa(AttentionAvx2, AttentionAvx512, UsePairs() ? AttentionAvx512Bf16 : AttentionAvx512, AttentionAmx);
  return kernel ? &kernel() : nullptr;
}

// Writes the keys and values of tokens [begin, end), bf16 or float32 [tokens, kv_heads, dim], to the cache. There are
// no values if the cache holds keys only.
void WriteTokens(const AttentionKernel& kernel, const AttentionJob& job, const PlanView& plan, const char* keys,
                 const char* values, char* kv, int64_t begin, int64_t end) {
  const int64_t input_bytes = job.input_row_bytes(), bytes = job.cache_row_bytes();
  const int64_t plane = job.kv_heads * job.page_size * bytes;
  const auto write = [&](char* to, const char* from, int value) {
    if (job.int8) {
      kernel.quantize(job, from, value, to);
    } else {
      memcpy(to, from, bytes);
    }
  };
  for (int64_t t = begin; t < end; ++t) {
    const int64_t position = plan.positions[t];
    const int64_t page = job.page_table[plan.token_rows[t] * job.table_width + position / job.page_size];
    char* to = kv + page * job.planes() * plane + position % job.page_size * bytes;
    for (int64_t head = 0; head < job.kv_heads; ++head, to += job.page_size * bytes) {
      const int64_t from = (t * job.kv_heads + head) * input_bytes;
      write(to, keys + from, 0);
      if (!job.keys_only) {
        write(to + plane, values + from, 1);
      }
    }
  }
}

// How many heads of a task a thread claims at once: a divisor of kv_heads. The heads of a page lie side by side, and
// who reads one after the other uses what the processor prefetches beyond a head's end; but short loops must be
// balanced.
int64_t HeadsAtOnce(int64_t units, int64_t kv_heads, int64_t threads) {
  int64_t heads = std::clamp<int64_t>(units / (threads * 8), 1, kv_heads);
  while (kv_heads % heads != 0) {
    --heads;
  }
  return heads;
}

// Makes the plan of the rows' attention to a cache of num_pages pages, with `kv_heads` heads that have `group` query
// heads each.
ffi::Error Plan(ffi::ThreadPool pool, ffi::Buffer<ffi::S32> starts, ffi::Buffer<ffi::S32> q_lens,
                ffi::Buffer<ffi::S32> page_table, ffi::Buffer<ffi::S32> reach, ffi::Result<ffi::Buffer<ffi::S32>> plan,
                int32_t num_tokens, int32_t num_pages, int32_t page_size, int32_t group, int32_t kv_heads,
                int32_t window, int32_t chunk) {
  const AttentionRows rows{starts.typed_data(),
                           q_lens.typed_data(),
                           page_table.typed_data(),
                           reach.element_count() ? reach.typed_data() : nullptr,
                           static_cast<int64_t>(starts.element_count()),
                           page_table.dimensions()[1],
                           num_pages,
                           page_size,
                           num_tokens,
                           window,
                           chunk};
  thread_local AttentionPlan made;
  const std::string problem = made.Make(rows, group, kv_heads, NumThreads(pool));
  if (!problem.empty()) {
    return ffi::Error::InvalidArgument("paged attention: " + problem);
  }
  if (made.Size() > static_cast<int64_t>(plan->element_count())) {
    return ffi::Error::Internal("paged attention: a plan of " + std::to_string(made.Size()) +
                                " numbers, more than the most expected");
  }
  made.Write(plan->typed_data());
  return ffi::Error::Success();
}

ffi::Error Attend(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer k_new, ffi::AnyBuffer v_new,
                  ffi::AnyBuffer kv_in, ffi::Buffer<ffi::S32> step_plan, ffi::Buffer<ffi::S32> page_table,
                  ffi::Buffer<ffi::F32> sinks, ffi::Buffer<ffi::F32> slopes, ffi::Result<ffi::AnyBuffer> out,
                  ffi::Result<ffi::AnyBuffer> kv, float scale, float softcap) {
  const AttentionKernel* kernel = Kernel();
  if (!kernel) {
    return ffi::Error(ffi::ErrorCode::kUnimplemented, "no kernel for this processor");
  }
  if (kv->untyped_data() != kv_in.untyped_data()) {
    return ffi::Error::Internal("the cache must be updated in place");
  }
  const auto shape = q.dimensions(), cache = kv->dimensions();

  const PlanView plan(step_plan.typed_data());
  AttentionJob job{};
  job.q = static_cast<const char*>(q.untyped_data());
  job.kv = static_cast<const char*>(kv->untyped_data());
  job.out = static_cast<char*>(out->untyped_data());
  job.bf16 = q.element_type() == ffi::BF16;
  job.int8 = kv->element_type() == ffi::S8;
  job.heads = shape[1], job.dim = shape[2], job.value_dim = out->dimensions()[2];
  job.keys_only = cache[1] == 1;
  job.kv_heads = cache[2], job.page_size = cache[3];
  job.page_table = page_table.typed_data();
  job.table_width = page_table.dimensions()[1];
  job.sinks = sinks.element_count() ? sinks.typed_data() : nullptr;
  job.slopes = slopes.element_count() ? slopes.typed_data() : nullptr;
  job.scale = scale, job.softcap = softcap;

  const auto* keys = static_cast<const char*>(k_new.untyped_data());
  const auto* values = static_cast<const char*>(v_new.untyped_data());
  auto* written = static_cast<char*>(kv->untyped_data());
  ParallelFor(pool, (plan.num_tokens + kWriteBlock - 1) / kWriteBlock, [&](int64_t block) {
    WriteTokens(*kernel, job, plan, keys, values, written, block * kWriteBlock,
                std::min((block + 1) * kWriteBlock, plan.num_tokens));
  });
  const int64_t token_bytes = job.heads * job.value_dim * job.element();
  memset(job.out + plan.num_tokens * token_bytes, 0, (shape[0] - plan.num_tokens) * token_bytes);

  job.members = plan.members;
  job.positions = plan.positions;
  job.oldest = plan.oldest;
  job.newest = plan.newest;
  job.first_slot = plan.first_slot;
  job.partials = reinterpret_cast<float*>(Scratch<Partials>(plan.num_slots * job.kv_heads * job.partial_floats() * 4));
  const int64_t pairs = plan.num_tokens * job.kv_heads;
  job.pending = reinterpret_cast<std::atomic<int32_t>*>(Scratch<Pending>(pairs * 4));
  for (int64_t t = 0; t < plan.num_tokens; ++t) {
    const int32_t splits = plan.newest[t] / kSplit - plan.oldest[t] / kSplit + 1;
    for (int64_t h = 0; h < job.kv_heads; ++h) {
      new (&job.pending[t * job.kv_heads + h]) std::atomic<int32_t>(splits);
    }
  }
  const int64_t scratch = kernel->scratch_bytes(job, (plan.most_tokens * job.group() + kCols - 1) / kCols);

  const int64_t units = plan.num_tasks * job.kv_heads, long_units = plan.num_long * job.kv_heads;
  const int64_t heads = HeadsAtOnce(units - long_units, job.kv_heads, NumThreads(pool));
  const AttentionTask* tasks = plan.tasks;
  std::atomic<int64_t> claimed{0};
  ParallelFor(pool, std::min(NumThreads(pool), units), [&](int64_t) {
    char* memory = Scratch<Work>(scratch);
    int64_t unit = 0, end = 0;  // what this thread has claimed
    const auto claim = [&] {
      if (++unit >= end) {
        const int64_t turn = claimed.fetch_add(1, std::memory_order_relaxed);
        unit = turn < long_units ? turn : long_units + (turn - long_units) * heads;
        end = turn < long_units ? unit + 1 : unit + heads;
      }
      if (unit >= units) {
        return AttentionUnit{};
      }
      // The blocks of a long row use the keys of one head one after the other, so that these stay in the second-level
      // cache.
      if (unit < long_units) {
        return AttentionUnit{tasks + unit % plan.num_long, unit / plan.num_long};
      }
      return AttentionUnit{tasks + unit / job.kv_heads, unit % job.kv_heads};
    };
    kernel->enter();
    for (AttentionUnit unit = claim(); unit.task;) {
      const AttentionUnit next = claim();
      kernel->run(job, unit, next, memory);
      unit = next;
    }
    kernel->leave();
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace penstock

extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* penstock_attention_plan(XLA_FFI_CallFrame* frame) {
  using namespace penstock;
  static auto* handler = ffi::Ffi::Bind()
                             .Ctx<ffi::ThreadPool>()
                             .Arg<ffi::Buffer<ffi::S32>>()
                             .Arg<ffi::Buffer<ffi::S32>>()
                             .Arg<ffi::Buffer<ffi::S32>>()
                             .Arg<ffi::Buffer<ffi::S32>>()
                             .Ret<ffi::Buffer<ffi::S32>>()
                             .Attr<int32_t>("num_tokens")
                             .Attr<int32_t>("num_pages")
                             .Attr<int32_t>("page_size")
                             .Attr<int32_t>("group")
                             .Attr<int32_t>("kv_heads")
                             .Attr<int32_t>("window")
                             .Attr<int32_t>("chunk")
                             .To(Guarded<&Plan>::Call)
                             .release();
  return handler->Call(frame);
}

extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* penstock_attention(XLA_FFI_CallFrame* frame) {
  using namespace penstock;
  static auto* handler = ffi::Ffi::Bind()
                             .Ctx<ffi::ThreadPool>()
                             .Arg<ffi::AnyBuffer>()
                             .Arg<ffi::AnyBuffer>()
                             .Arg<ffi::AnyBuffer>()
                             .Arg<ffi::AnyBuffer>()
                             .Arg<ffi::Buffer<ffi::S32>>()
                             .Arg<ffi::Buffer<ffi::S32>>()
                             .Arg<ffi::Buffer<ffi::F32>>()
                             .Arg<ffi::Buffer<ffi::F32>>()
                             .Ret<ffi::AnyBuffer>()
                             .Ret<ffi::AnyBuffer>()
                             .Attr<float>("scale")
                             .Attr<float>("softcap")
                             .To(Guarded<&Attend>::Call)
                             .release();
  return handler->Call(frame);
}
