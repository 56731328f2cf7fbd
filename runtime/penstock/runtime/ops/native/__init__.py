"""CPU kernels in C++, called from XLA programs through `jax.ffi`; everything has an XLA path beside it."""
