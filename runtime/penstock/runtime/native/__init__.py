"""CPU kernels in C++, called from XLA programs through `jax.ffi`; everything has an XLA path beside it.

build.py       compiles src/ with the machine's compiler
library.py     loads the library and registers its operations
linear.py      linear layers over packed weights
rotate.py      per-head norms and rotary embedding
attention.py   paged attention
sample.py      the sampler: penalties, bias, masks, filters, the draw, log-probabilities
huge_pages.py  asks Linux to keep weights and KV cache on huge pages
"""
