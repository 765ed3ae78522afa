"""Public functions refuse unusable arguments at once, with a message of four parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xform
from xform.errors import WrongArgument, XformError

X = jnp.ones(3)
GIVEN = {"target": "cpu", "capacity": "1 MiB"}


def f(x: Any) -> Any:
    return jnp.sum(x**2)


FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    **{n: getattr(xform, n) for n in ("grad", "value_and_grad", "jacfwd", "jacrev", "jacobian",
                                      "hessian", "checkpoint", "remat")},
    "fwd_and_bwd": lambda g: xform.fwd_and_bwd(g, 0),
    "jvp": lambda g: xform.jvp(g, (X,), (X,)),
    "hvp": lambda g: xform.hvp(g, (X,), (X,)),
    "vjp": lambda g: xform.vjp(g, X),
    "linearize": lambda g: xform.linearize(g, X),
    "linear_transpose": lambda g: xform.linear_transpose(g, X),
    "plan": lambda g: xform.plan(g, X),
    "residuals": lambda g: xform.residuals(g, X),
    "pareto": lambda g: xform.pareto(g, X),
    "memory_analysis": lambda g: xform.memory_analysis(g, X),
    "compare": lambda g: xform.compare(g, X, policies=[None]),
    "fits": lambda g: xform.fits(g, X, **GIVEN),
    "max_batch": lambda g: xform.memory.max_batch(g, X, **GIVEN),
    "why_oom": lambda g: xform.memory.why_oom(g, X, **GIVEN),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("given", [3, "f", None, (f,)], ids=lambda x: type(x).__name__)
def test_non_callable_functions_raise(name: str, given: Any) -> None:
    with pytest.raises(WrongArgument, match="not callable"):
        FUNCTIONS[name](given)


POSITIONS: dict[str, Callable[[Any], Any]] = {
    **{n: lambda at, n=n: getattr(xform, n)(f, argnums=at)(X)
       for n in ("grad", "value_and_grad", "jacfwd", "jacrev", "hessian")},
    "fwd_and_bwd": lambda at: xform.fwd_and_bwd(f, at),
    "plan": lambda at: xform.plan(f, X, argnums=at, verify=False),
    "residuals": lambda at: xform.residuals(f, X, argnums=at),
    "pareto": lambda at: xform.pareto(f, X, argnums=at),
    "compare": lambda at: xform.compare(f, X, policies=[None], argnums=at),
    "checkpoint": lambda at: xform.checkpoint(f, static_argnums=at),
    "donated": lambda at: xform.plan(f, X, donate_argnums=at),
    "donated, measured": lambda at: xform.memory_analysis(f, X, donate_argnums=at),
}  # fmt: skip


@pytest.mark.parametrize("name", POSITIONS)
@pytest.mark.parametrize("given", ["0", 1.5, (0, "1"), [0.5]], ids=repr)
def test_argnums_that_are_not_integers_raise(name: str, given: Any) -> None:
    with pytest.raises(WrongArgument, match="argnums="):
        POSITIONS[name](given)


OTHERS: dict[str, tuple[Callable[[], Any], str]] = {
    "array as position": (lambda: xform.grad(f, argnums=np.array(0)), "neither a position nor"),
    "no column": (lambda: xform.jacfwd(f, argnums=())(X), "it names no argument"),
    "no row": (lambda: xform.jacrev(f, argnums=())(X), "it names no argument"),
    "static names": (lambda: xform.remat(f, static_argnames=7), "neither one name"),
    "static name": (lambda: xform.remat(f, static_argnames=(0, "a")), "neither one name"),
    "prevent_cse": (lambda: xform.remat(f, prevent_cse=3), "neither a bool nor a sequence"),
    "two of prevent_cse": (lambda: xform.remat(f, prevent_cse=(True, False))(X), "prevent_cse="),
    "no array": (lambda: xform.remat(f)("x"), "type str is not an array"),
    "compiled": (lambda: xform.memory_analysis(jax.jit(f), object()), "as an abstract array"),
    "points": (lambda: xform.pareto(f, X, points=0), "not a number of plans"),
    "half points": (lambda: xform.pareto(f, X, points=1.5), "not a number of plans"),
    "half a batch": (lambda: xform.memory.max_batch(f, X, multiple_of=1.5, **GIVEN),
        "positive multiple"),
    "batches": (lambda: xform.memory.max_batch(f, X, max_size="x", **GIVEN), "positive multiple"),
    "batch axis": (lambda: xform.memory.max_batch(f, X, batch_axis="x", **GIVEN),
        "it is not an integer"),
    "batch of": (lambda: xform.memory.max_batch(f, X, batch_argnums="x", **GIVEN),
        "batch_argnums='x'"),
    "batch at": (lambda: xform.memory.max_batch(f, X, batch_argnums=1.5, **GIVEN),
        "batch_argnums=1.5"),
    "difference": (lambda: xform.memory_analysis(f, X).diff(3), "it is not a MemoryReport"),
    "explain": (lambda: xform.plan(f, X, verify=False).explain(3), "no value of"),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_arguments_of_wrong_type_or_value_raise_with_a_remedy(name: str) -> None:
    ask, problem = OTHERS[name]
    with pytest.raises(XformError, match=problem) as caught:
        ask()
    assert caught.value.remedy


def test_the_texts() -> None:
    golden = {
        lambda: xform.checkpoint(3): (
            "checkpoint\n  problem: 3 is not callable\n  remedy:  pass a function of arrays"),
        lambda: xform.grad(f, argnums="0"): (
            "grad with argnums='0'\n"
            "  problem: it is neither a position nor a sequence of positions\n"
            "  remedy:  give positions of arguments, such as argnums=0 or argnums=(0, 2)"),
        lambda: xform.grad(f, policy=xform.policies.budget): (
            "policy=budget\n  problem: it is a function that returns a policy, not a policy\n"
            "  remedy:  call it, such as policy=budget('6 GiB')"),
        lambda: xform.remat(f, static_argnames=7): (
            "checkpoint with static_argnames=7\n"
            "  problem: it is neither one name nor a list of names\n"
            "  remedy:  give names of arguments, such as static_argnames='train' or ('train', "
            "'mode')"),
    }  # fmt: skip
    for ask, text in golden.items():
        with pytest.raises(WrongArgument) as caught:
            ask()
        assert str(caught.value) == text


def test_memory_analysis_accepts_non_array_static_arguments() -> None:
    static = jax.jit(lambda x, mode: x * len(mode), static_argnums=1)
    assert xform.memory_analysis(static, X, "ab").argument_bytes == X.nbytes
