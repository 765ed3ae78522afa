"""Symbolic dimensions as numbers: the samples, and the bytes and FLOPs at a sample."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import export

from xform._jax.symbolic import bounds_of, larger, smaller
from xform.interpret.cost import aval_bytes, program_flops
from xform.program.dimensions import (
    SampledCache,
    as_data,
    at_sample,
    has_elements,
    number,
    numbers,
    product,
    sample_of,
    sample_text,
    symbolic_dimensions,
    violated_constraint,
)
from xform.program.fingerprint import fingerprint
from xform.program.ir import trace


def symbols(text: str, *constraints: str) -> Any:
    """Return dimensions of one scope."""
    return export.symbolic_shape(text, scope=export.SymbolicScope(constraints))


@pytest.mark.parametrize(("text", "constraints", "sizes"), [
    ("b", (), (128,)),
    ("2*b + 1, b*s, 7", (), (257, 128 * 128, 7)),
    ("floordiv(b, 3), mod(b, 3), max(b, 200), min(b, s)", (), (42, 2, 200, 128)),
    ("b", ("b <= 64",), (64,)),
    ("b", ("b >= 1000",), (1000,)),
    ("b", ("mod(b, 48) == 0",), (144,)),
    ("b", ("b >= 10000", "mod(b, 7) == 0"), (10003,)),
    ("b, s", ("b + s <= 100",), (32, 32)),
    ("a, b", ("b == 2*a",), (128, 256)),
    ("q, s", ("s == 4*q + 1",), (128, 513)),
    ("a, b", ("a*b <= 100",), (8, 8)),
    ("a, b", ("a >= b + 1000",), (1001, 1)),
    ("a, b", ("a*b == 77",), (1, 77)),
    ("b", ("b == 5",), (5,)),
])  # fmt: skip
def test_the_default_sample_satisfies_the_constraints(
    text: str, constraints: tuple[str, ...], sizes: tuple[int, ...]
) -> None:
    dimensions = symbols(text, *constraints)
    assert numbers(dimensions) == sizes
    symbolic = symbolic_dimensions([jax.ShapeDtypeStruct(dimensions, jnp.float32)])
    assert not violated_constraint(dict(sample_of(symbolic)), symbolic)


def test_constraints_that_a_short_search_cannot_satisfy() -> None:
    """The sizes are only a basis of decisions: a derivative is exported in any case."""
    b, s = symbols("b, s", "b*s == 1000003", "b >= 3", "s >= 3")
    assert numbers((b, s)) == (128, 128)
    assert violated_constraint({"b": 128, "s": 128}, [b, s]) == "b*s == 1000003"


def test_a_sample_of_one_s_own() -> None:
    b, s = symbols("b, s")
    with at_sample((("b", 5),)):
        assert numbers((b, s, 2 * b + 1, 3)) == (5, 128, 11, 3)
        assert sample_of([b * s]) == (("b", 5), ("s", 128))
        assert sample_text(sample_of([b * s])) == "b = 5, s = 128"
        assert product((b, s, 4)) == 5 * 128 * 4
    assert number(b) == 128
    assert as_data((b, s * 2, 4)) == ("b", "2*s", 4)


def test_sizes_without_elements() -> None:
    b, s = symbols("b, s", "s >= 2")
    assert has_elements((b, s - 1, 3))
    assert not has_elements((b, s - 2))
    assert not has_elements((b, 0))
    with at_sample((("b", 1),)):
        assert number(b - 4) == 0


def test_bounds() -> None:
    b, s = symbols("b, s", "b >= s", "s >= 3", "b <= 40")
    assert bounds_of("b", b.scope) == (3, 40)
    assert (smaller(b, s), larger(b, s), smaller(4, 5), larger(b, 2)) == (s, b, 4, b)
    assert (smaller(2, b), larger(2, b)) == (2, b)


def test_costs_are_those_of_the_sample() -> None:
    b, s = symbols("b, s")
    x, w = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((b, s, 4), (4, 3)))
    f = jax.jit(lambda x, w: jnp.tanh(x @ w).sum())
    flops = lambda b, s: 2 * b * s * 4 * 3 + b * s * 3 + b * s * 3
    for sizes in ((128, 128), (2, 7)):
        with at_sample(() if sizes[0] == 128 else (("b", 2), ("s", 7))):
            assert aval_bytes(x) == 4 * 4 * sizes[0] * sizes[1]
            assert program_flops(f, x, w) == flops(*sizes)


def test_a_cache_has_entries_of_each_sample() -> None:
    cache = SampledCache(3)
    cache["bytes"] = 1
    with at_sample((("b", 5),)):
        assert cache.get("bytes") is None
        cache.update({"bytes": 2, "flops": 3})
        assert cache.setdefault("bytes", 4) == 2
    assert cache["bytes"] == 1
    cache["more"] = 5  # the oldest entry is dropped
    assert "bytes" not in cache
    assert len(cache) == 3


def test_equal_programs_of_different_scopes_have_equal_fingerprints() -> None:
    prog = lambda text: trace(lambda x: [jnp.tanh(x) + x.shape[0]],
                              jax.ShapeDtypeStruct(symbols(text), jnp.float32))  # fmt: skip
    assert fingerprint(prog("b, 2*s")) == fingerprint(prog("b, 2*s"))
    assert fingerprint(prog("b, 2*s")) != fingerprint(prog("b, 3*s"))
