"""Is the smallest peak of `xform.jit` at most that of `jax.checkpoint`?"""
