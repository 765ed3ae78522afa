import importlib.metadata
import os
from collections.abc import Iterator
from pathlib import Path

# Before JAX is imported, set up eight CPU devices, and spend no time on optimized machine code for
# thousands of small programs, nor on threads that generate it (XLA's own passes run as usual).
# Settings of the caller stay.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
flags = [
    "--xla_force_host_platform_device_count=8",
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_parallel_codegen_split_count=1",
]
if importlib.metadata.version("jaxlib").startswith("0.10."):
    flags.append("--xla_cpu_use_fusion_emitters=false")  # later versions abort on this unknown flag
for flag in flags:
    if flag.partition("=")[0] not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()

import jax
import jax.numpy as jnp
import pytest

import xform
from tests import own_ad


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give docstring examples their three names, and mark slow tests.

    A `doctest_namespace` fixture here would reach tests/ only; this hook reaches xform/ as well.
    The tests that `slow.txt` lists are marked as slow: faster tests reach the same lines of xform.
    A line without parameters stands for all cases of a test. `experiments/tests` writes the list.
    """
    slow = set((Path(__file__).parent / "slow.txt").read_text().splitlines())
    for item in items:
        if not slow.isdisjoint((item.nodeid, item.nodeid.partition("[")[0])):
            item.add_marker(pytest.mark.slow)
        if isinstance(item, pytest.DoctestItem) and item.dtest is not None:
            item.dtest.globs.update(jax=jax, jnp=jnp, xform=xform)


@pytest.fixture
def x64() -> Iterator[None]:
    """Enable 64-bit types within one test."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def strict_promotion() -> Iterator[None]:
    """Forbid implicit dtype promotion within one test: a rule must not widen its inputs."""
    with jax.numpy_dtype_promotion("strict"):
        yield


@pytest.fixture(scope="module")
def quick_compilation() -> Iterator[None]:
    """Compile with almost no optimization, for a file that compiles hundreds of small programs."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module", autouse=True)
def drop_compiled_programs() -> Iterator[None]:
    """Drop the programs that JAX keeps after each file: thousands of them take gigabytes."""
    yield
    jax.clear_caches()


@pytest.fixture(scope="session", autouse=True)
def xform_never_enters_jax_ad() -> Iterator[None]:
    """Make JAX's own AD raise if xform enters it, in every test."""
    with own_ad.guard():
        yield
