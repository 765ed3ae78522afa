"""Plans that save the same named values in every layer, for programs that run under plain JAX."""
