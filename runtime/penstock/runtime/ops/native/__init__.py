"""CPU kernels in C++, called from XLA programs through `jax.ffi`; everything has an XLA path beside it.

A model is native where these kernels compute all of it but what cannot change its bits
(`models.decoder.CausalLM.is_native`).

The kernels are compiled by the machine's own compiler, once per version of the sources (`build`). Without a
compiler everything runs on XLA, and a line of the log says so. AMX, AVX-512 with and without bf16, or AVX2 is
chosen at run time. What the kernels do with rows beside products, such as norms, activations and rounding, is
written once for sixteen numbers at a time (`src/common/lanes.h`), which have a form in the registers of each
instruction set.

The kernels share XLA's thread pool (`src/common/parallel.h`). A helper thread stays awake for 0.2 ms between
loops (`src/common/team.h`), because a step has over a hundred of them. Whatever is thrown in a loop, on any
thread, fails the step as an error of XLA's (`src/common/guarded.h`).

The kernels read at run time how many rows are real, so padding costs nothing, and on CPU few buckets of
tokens are enough. Results of linear layers from 32 MiB on, whose memory is new in every step, are put on huge
pages (`src/common/huge_pages.h`).

All instruction sets are tested on any machine. `src/common/tiles.h` has AMX's instructions as functions, and
tests build the kernels with plain C++ in their place and in that of AVX-512's intrinsics
(tests/support/native/emulated), behind the same FFI handlers. So arithmetic, order and control flow are
checked where the processor has neither. The intrinsics' names are defined again in the kernels' namespace,
where they hide the compiler's; a missing one fails to compile.
"""
