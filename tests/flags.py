"""The flags of JAX under which xform is tested: one cell of the matrix for each."""

import gc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import jax

# A cell's name, and its options. An environment variable with the option's name in capital
# letters sets the option too.
ALL: dict[str, dict[str, Any]] = {
    "none": {},
    "remat3": {"jax_remat3": True},
    "custom_vjp3": {"jax_custom_vjp3": True},
    "custom_jvp3": {"jax_custom_jvp3": True},  # since JAX 0.12
    "no_direct_linearize": {"jax_use_direct_linearize": False},  # True is the default
    "enable_checks": {"jax_enable_checks": True},
    "strict_dtypes": {"jax_numpy_dtype_promotion": "strict"},
    "strict_ranks": {"jax_numpy_rank_promotion": "raise"},
    "disable_jit": {"jax_disable_jit": True},
    "check_leaks": {"jax_check_tracer_leaks": True},
    "x64": {"jax_enable_x64": True},
}

# The cells that the installed JAX supports.
CELLS = {
    name: options for name, options in ALL.items() if options.keys() <= jax.config.values.keys()
}


@contextmanager
def under(cell: str) -> Iterator[None]:
    """Set the options of a cell, and restore them at the end."""
    with ExitStack() as restored:
        for option, value in CELLS[cell].items():
            restored.callback(jax.config.update, option, getattr(jax.config, option))
            jax.config.update(option, value)
        # The leak check collects garbage at each trace; it can skip the objects that exist now.
        gc.freeze()
        restored.callback(gc.unfreeze)
        yield


def environment(cell: str) -> dict[str, str]:
    """Return the environment variables that set the options of a cell in a new process."""
    return {option.upper(): str(value) for option, value in CELLS[cell].items()}
