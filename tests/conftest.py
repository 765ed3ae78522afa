import importlib.metadata
import os
from collections.abc import Iterator

# Before JAX is imported: eight CPU devices, and no time spent on fast machine code for thousands of
# small programs (what XLA itself does to a program is left alone). What the caller chose stays.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
flags = [
    "--xla_force_host_platform_device_count=8",
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
]
if importlib.metadata.version("jaxlib").startswith("0.10."):
    flags.append("--xla_cpu_use_fusion_emitters=false")  # later versions do not know it, and abort
for flag in flags:
    if flag.partition("=")[0] not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()

import jax
import jax.numpy as jnp
import pytest

import xform
from tests import own_ad


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give docstring examples their three names.

    A `doctest_namespace` fixture here would reach tests/ only; this hook reaches xform/ as well.
    """
    for item in items:
        if isinstance(item, pytest.DoctestItem) and item.dtest is not None:
            item.dtest.globs.update(jax=jax, jnp=jnp, xform=xform)


@pytest.fixture
def x64() -> Iterator[None]:
    """64-bit types, within one test."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def strict_promotion() -> Iterator[None]:
    """No implicit dtype promotion, within one test: a rule must not widen what it is given."""
    with jax.numpy_dtype_promotion("strict"):
        yield


@pytest.fixture(scope="module")
def quick_compilation() -> Iterator[None]:
    """Next to no optimization, for a file that compiles hundreds of small programs."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="session", autouse=True)
def xform_never_enters_jax_ad() -> Iterator[None]:
    """JAX's own AD raises when xform enters it, in every test."""
    with own_ad.guard():
        yield
