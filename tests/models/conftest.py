from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(autouse=True, scope="module")
def quick_compiles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Compile each program once, without most optimizations: that takes most of the time."""
    folder = str(tmp_path_factory.getbasetemp() / "compiled")
    options = {
        "jax_disable_most_optimizations": True,
        "jax_compilation_cache_dir": jax.config.values["jax_compilation_cache_dir"] or folder,
        "jax_persistent_cache_min_compile_time_secs": 0.0,
    }
    before = {name: jax.config.values[name] for name in options}
    for name, value in options.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)
