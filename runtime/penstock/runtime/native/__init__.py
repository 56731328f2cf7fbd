"""CPU kernels in C++, called from XLA programs through `jax.ffi`; everything has an XLA path beside it.

build.py      compiles src/ with the machine's compiler
library.py    loads the library and registers its operations
linear.py     linear layers over packed weights
attention.py  paged attention
rotate.py     per-head norms and rotary embedding
"""
