"""Gathers and scatters whose indices count along a batch get batch axes, and the same results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xform.program.ir import Program, evaluate, trace
from xform.slices.batched_indices import with_batched_indices
from xform.slices.opened import opened
from xform.slices.region import find_region

ROWS, WORDS, DEEP = 8, 16, 4
rows = lambda: jnp.arange(ROWS)


def data() -> tuple[Any, ...]:
    random = np.random.default_rng(0)
    x = jnp.asarray(random.normal(size=(ROWS, WORDS, DEEP)), "float32")
    i = jnp.asarray(random.integers(-WORDS - 2, WORDS + 2, (ROWS, 3)), "int32")
    return x, i, jnp.asarray(random.normal(size=(ROWS, 3, DEEP)), "float32")


# Each function, and the axes of the operand that are batches.
BATCHED: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "gather": (lambda x, i, y: x[rows()[:, None], i], (0,)),
    "converted": (lambda x, i, y: x[rows().astype("int16").astype("int32")[:, None], i], (0,)),
    "clipped": (lambda x, i, y: x.at[rows()[:, None], i].get(mode="clip"), (0,)),
    "filled": (lambda x, i, y: x.at[rows()[:, None], i].get(mode="fill"), (0,)),
    "second axis": (lambda x, i, y: x.swapaxes(0, 1)[i, rows()[:, None]], (1,)),
    "of numbers": (lambda x, i, y: x[rows()[:, None, None], i[..., None], jnp.arange(DEEP)],
                   (0, 2)),
    "scatter": (lambda x, i, y: x.at[rows()[:, None], i].set(y), (0,)),
    "add": (lambda x, i, y: x.at[rows()[:, None], i].add(y), (0,)),
    "multiply": (lambda x, i, y: x.at[rows()[:, None], i].mul(y), (0,)),
    "drop": (lambda x, i, y: x.at[rows()[:, None], i].max(y, mode="drop"), (0,)),
}  # fmt: skip
OTHERS: dict[str, Callable[..., Any]] = {
    "some rows": lambda x, i, y: x[jnp.arange(4)[:, None], i[:4]],
    "reversed": lambda x, i, y: x[rows()[::-1][:, None], i],
    "a count in two axes": lambda x, i, y: x[:2, 0][rows().reshape(2, 4) // 4, i[:2, :1] % 4],
    "split": lambda x, i, y: x[:2].reshape(2, 4, -1)[rows().reshape(2, 4), i[:2, :1]],
    "shifted": lambda x, i, y: x[rows()[:, None] + 1, i],
    "one number": lambda x, i, y: x[jnp.arange(1)[:, None], i],
    "small integers": lambda x, i, y: jnp.tile(x, (40, 1, 1))[
        jnp.arange(320).astype("int8").astype(int)[:, None], jnp.tile(i, (40, 1))],
}  # fmt: skip


def inlined(f: Callable[..., Any]) -> Program:
    return opened(trace(lambda *xs: [f(*xs)], *data()))


def batches(prog: Program) -> list[tuple[int, ...]]:
    """Return the batch axes of the gathers and scatters of a program."""
    names = ("gather", "scatter")
    found = [e for e in prog.equations if e.primitive.name.startswith(names)]
    return [e.params["dimension_numbers"].operand_batching_dims for e in found]


@pytest.mark.parametrize("name", BATCHED)
def test_batches_are_named_and_results_are_equal(name: str) -> None:
    f, axes = BATCHED[name]
    prog = inlined(f)
    assert batches(prog) == [axes]
    np.testing.assert_array_equal(evaluate(prog, data())[0], f(*data()))


@pytest.mark.parametrize("name", OTHERS)
def test_other_indices_are_left(name: str) -> None:
    f = OTHERS[name]
    prog = inlined(f)
    assert not any(batches(prog))
    np.testing.assert_array_equal(evaluate(prog, data())[0], f(*data()))


def test_a_program_without_them_is_returned() -> None:
    prog = trace(lambda x: [jnp.sin(x)], jnp.ones(3))
    assert with_batched_indices(prog) is prog


def test_an_update_of_chosen_experts_runs_in_slices() -> None:
    """As in a mixture of experts: the weights of two experts are written to their places."""

    def loss(x: Any, w: Any) -> Any:
        top, i = jax.lax.top_k(x @ w, 2)
        at = jnp.arange(ROWS)[:, None, None], jnp.arange(WORDS)[None, :, None], i
        return jnp.sum(jnp.zeros((ROWS, WORDS, 8)).at[at].set(top) ** 2)

    prog = opened(trace(lambda *xs: [loss(*xs)], data()[0], jnp.ones((DEEP, 8))))
    product = next(e.outvars[0] for e in prog.equations if e.primitive.name == "dot_general")
    region = find_region(prog, product, 0, 4)
    assert region is not None
    assert {"scatter", "reduce_sum"} <= {e.primitive.name for e, _ in region.equations}
    assert [axis for _, _, axis in region.outputs] == [None]
