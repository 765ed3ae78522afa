"""`jax.export` of derivatives with symbolic dimensions."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax

import xform
from tests.symbolic import PROGRAMS, Program, exported, total
from xform.errors import BudgetInfeasible, NotDifferentiable, UnsupportedParam, WrongArgument
from xform.planner.report.show import show_schedule
from xform.policies import budget, fit
from xform.terminal.text import human_bytes
from xform.transforms.inspect import derivative_at

pytestmark = pytest.mark.usefixtures("quick_compilation")


def check(found: Any, expected: Any) -> None:
    """Check that two trees of float32 arrays differ by rounding only."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        scale = max(1.0, np.abs(b).max(initial=0))
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=3e-5 * scale)


def types(*shapes: str, constraints: tuple[str, ...] = ()) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Return types of float32 arrays with symbolic dimensions."""
    return Program(total, shapes, constraints).types


# Every program.


def check_program(program: Program, n_sizes: int) -> None:
    """Compare the exported gradient of a program with JAX's at some sizes."""
    argnums = tuple(range(len(program.shapes)))
    mine = exported(xform.value_and_grad(program.f, argnums), program.types)
    theirs = jax.value_and_grad(program.reference or program.f, argnums)
    if program.in_jax:
        theirs = exported(theirs, program.types)
    both = jax.jit(lambda *xs: (mine(*xs), theirs(*xs)))
    for sizes in program.sizes[-n_sizes:]:
        check(*both(*program.arrays(sizes)))


FEW = ["layer norm", "convolution with strides", "recurrent", "argsort", "scatter", "cumprod",
       "at least another symbol", "size as a value", "max pool of images",
       "large triangular solve"]  # fmt: skip


@pytest.mark.parametrize("name", FEW)
def test_an_exported_gradient_equals_jax_s(name: str) -> None:
    check_program(PROGRAMS[name], 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_exported_gradients_equal_jax_s_at_five_sizes(name: str) -> None:
    check_program(PROGRAMS[name], 5)
    jax.clear_caches()


# Every transform.


def loss(w: Any, x: Any) -> Any:
    """A small network with a loop over rows, whose number is symbolic."""
    h, rows = lax.scan(lambda h, row: (jnp.tanh(row @ w + h), h * row), jnp.ones(3), x)
    return total(h) + total(rows)


def normalized(w: Any, x: Any) -> Any:
    """Rows and their norms: a function with several outputs, one of them integers."""
    y = jnp.tanh(x @ w)
    return y, jnp.linalg.norm(y, axis=1), jnp.argmax(y, axis=1)


def floats(w: Any, x: Any) -> Any:
    return normalized(w, x)[:2]


SMALL = ("3, 3", "b, 3")
# For each transform of a module (xform or jax), a function of two arguments.
TRANSFORMS: dict[str, Callable[[Any], Callable[..., Any]]] = {
    "jvp": lambda m: lambda w, x: m.jvp(floats, (w, x), (x[:3], x * 2)),
    "linearize": lambda m: lambda w, x: m.linearize(floats, w, x)[1](w * 2, x),
    "vjp": lambda m: lambda w, x: m.vjp(floats, w, x)[1](floats(w * 2, x)),
    "has_aux": lambda m: m.grad(lambda w, x: (loss(w, x), x.sum(1)), has_aux=True),
    "jacrev": lambda m: m.jacrev(floats, (0, 1)),
    "jacfwd": lambda m: m.jacfwd(floats, (0, 1)),
    "jacobian": lambda m: getattr(m, "jacobian", m.jacrev)(floats, (0, 1)),
    "hessian": lambda m: m.hessian(lambda w, x: total(floats(w, x)[0]), (0, 1)),
    "gradient of a gradient": lambda m: m.grad(lambda w, x: total(m.grad(loss, 1)(w, x))),
    "vmap": lambda m: lambda w, x: jax.vmap(m.grad(loss), (0, None))(jnp.stack([w, -w]), x),
    "linear_transpose": lambda m: lambda w, x: m.linear_transpose(lambda x: x @ w, x)(x @ w),
    "checkpoint": lambda m: m.grad(m.checkpoint(loss)),
    "JAX's gradient": lambda m: jax.grad(m.checkpoint(loss)),
}  # fmt: skip


@pytest.mark.parametrize("name", TRANSFORMS)
def test_every_transform_is_exported(name: str) -> None:
    make = TRANSFORMS[name]
    x = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    found = exported(make(xform), types(*SMALL, constraints=("b >= 3",)))
    check(found(x[:3], x), jax.jit(make(jax))(x[:3], x))


POLICIES = ["save_nothing", "save_everything", "save_dots", "open:min_cut", "auto",
            budget("2 KiB", of="saved", symbolic={"b": 16}),
            budget("9 KiB", verify=False, symbolic={"b": 16}),
            budget("20 KiB", symbolic={"b": 16})]  # fmt: skip


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_gradients_are_the_same_under_every_policy(policy: Any) -> None:
    f = lambda w, x: total(jnp.tanh(jnp.tanh(x @ w) @ w)) + loss(w, x)
    x = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    found = exported(xform.grad(f, policy=policy), types(*SMALL))(x[:3], x)
    check(found, jax.jit(jax.grad(f))(x[:3], x))


def test_tangents_of_integers_have_symbolic_shapes() -> None:
    push = lambda w, x: xform.jvp(normalized, (w, x), (w, x))[1]
    jaxpr = jax.make_jaxpr(push)(*types(*SMALL))
    assert [a.dtype for a in jaxpr.out_avals] == ["float32", "float32", jax.dtypes.float0]
    assert str(jaxpr.out_avals[2].shape) == "(b,)"


# Budgets and plans.


def deep(w: Any, x: Any) -> Any:
    for _ in range(6):
        x = jnp.tanh(x @ w)
    return jnp.sum(x)


DEEP = ("16, 16", "b, 16")


@pytest.mark.parametrize(("policy", "remedy"), [
    ("budget:1MiB", "xform.policies.budget(..., symbolic={'b': 128})"),
    ("saved:1MiB", "xform.policies.budget(..., symbolic={'b': 128})"),
    ("slices:budget:1MiB", "xform.policies.budget(..., symbolic={'b': 128})"),
    (budget("1MiB", symbolic={"c": 8}), "symbolic={'b': 128}"),
])  # fmt: skip
def test_a_budget_asks_for_the_sizes(policy: Any, remedy: str) -> None:
    with pytest.raises(WrongArgument, match="the budget has no size for b") as caught:
        exported(xform.grad(deep, policy=policy), types(*DEEP))
    assert remedy in str(caught.value)


def test_a_budget_within_a_region_asks_for_the_sizes() -> None:
    regional = lambda policy: xform.grad(xform.remat(deep, policy=policy))
    with pytest.raises(WrongArgument, match="the budget has no size for b"):
        exported(regional("saved:1KiB"), types(*DEEP))
    exported(regional(budget("1KiB", of="saved", symbolic={"b": 64})), types(*DEEP))


def test_a_budget_of_a_hessian_product() -> None:
    """The arrays that the function closes over have symbolic dimensions too."""
    product = lambda policy: (
        lambda w, x: xform.hvp(lambda w: deep(w, x), (w,), (w * 2,), policy=policy)
    )
    with pytest.raises(WrongArgument, match="the budget has no size for b"):
        exported(product("budget:1MiB"), types(*DEEP))
    found = exported(product(budget("60 KiB", symbolic={"b": 16})), types(*DEEP))
    x = np.random.default_rng(0).normal(size=(21, 16)).astype(np.float32)
    check(found(x[:16], x), jax.jit(product(None))(x[:16], x))


def test_sizes_of_a_budget_satisfy_the_constraints() -> None:
    policy = budget("1 MiB", symbolic={"b": 7})
    with pytest.raises(WrongArgument, match=r"its sizes violate the constraint b >= 8"):
        exported(xform.grad(deep, policy=policy), types(*DEEP, constraints=("b >= 8",)))


@pytest.mark.parametrize("symbolic", [{"b": 0}, {"b": 1.5}, {"b": True}, [("b", 3)]])
def test_a_size_is_a_positive_integer(symbolic: Any) -> None:
    with pytest.raises(WrongArgument, match="does not map names of dimensions to sizes"):
        budget("1 MiB", symbolic=symbolic)
    with pytest.raises(WrongArgument, match="does not map names of dimensions to sizes"):
        fit(symbolic=symbolic)


def test_a_plan_is_that_of_its_sizes(tmp_path: Path) -> None:
    """The plan at a size has the decisions and the bytes of a plan for that size."""
    known = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((16, 16), (64, 16))]
    policy = budget("30 KiB", symbolic={"b": 64})
    found = xform.plan(deep, *types(*DEEP), policy=policy, verify=False)
    expected = xform.plan(deep, *known, policy=policy, verify=False)
    decisions = lambda plan: [(row.value, row.decision, row.marginal_bytes) for row in plan]
    assert decisions(found) == decisions(expected)
    assert any(row.decision == "RECOMPUTE" and row.marginal_flops > 16**3 for row in found)
    assert found.predicted_bytes == expected.predicted_bytes
    assert found.symbolic == (("b", 64),)
    assert not expected.symbolic
    assert "bytes and FLOPs for b = 64: other sizes take other bytes" in str(found)
    assert {row.type for row in found} == {"float32[b,16]"}
    found.save(tmp_path / "plan.json")
    again = xform.load(tmp_path / "plan.json")
    assert again.to_dict() == found.to_dict()
    # It is a policy for all sizes, and keeps its bytes at that size.
    gradient = exported(xform.grad(deep, policy=again), types(*DEEP))
    compiled = jax.jit(gradient).lower(*known).compile().memory_analysis()
    parts = ("argument", "output", "temp")
    assert sum(getattr(compiled, f"{part}_size_in_bytes") for part in parts) <= 30 * 1024
    x = np.random.default_rng(0).normal(size=(21, 16)).astype(np.float32)
    check(gradient(x[:16], x), jax.jit(jax.grad(deep))(x[:16], x))


def test_compiled_bytes_are_those_of_the_sizes() -> None:
    """The argument that is not read takes no bytes."""
    f = lambda w, x, unused: deep(w, x)
    known = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((16, 16), (128, 16), (128,))]
    found = xform.plan(f, *types(*DEEP, "b"))
    assert found.symbolic == (("b", 128),)
    assert found.compiled_bytes == xform.plan(f, *known).compiled_bytes


def test_the_default_plans_with_128() -> None:
    plan = xform.plan(deep, *types(*DEEP), verify=False)
    assert plan.symbolic == (("b", 128),)
    table = xform.residuals(deep, *types(*DEEP))
    assert table.title == "kept for the backward pass of deep, min_cut, for b = 128"
    assert table.total_bytes == plan.saved_bytes == 6 * 128 * 16 * 4


def test_two_budgets_of_one_program_count_their_own_sizes() -> None:
    """A jitted function is traced once, and planned for each of the two sizes."""
    inner = jax.jit(deep)
    f = lambda w, x: inner(w, inner(w, x) + x)
    for size in (8, 32):
        policy = budget("1 MiB", of="saved", symbolic={"b": size})
        assert xform.residuals(f, *types(*DEEP), policy=policy).total_bytes // (size * 64) == 12
        planned = derivative_at("show", deep, types(*DEEP), 0, False).planned(policy)
        assert f"SAVED, {human_bytes(size * 64)}" in show_schedule(planned.schedule)


def test_the_memory_of_a_device_is_a_budget() -> None:
    plan = lambda policy: xform.plan(deep, *types(*DEEP), policy=policy, target="tpu:v5e",
                                     verify=False)  # fmt: skip
    with pytest.raises(WrongArgument, match=r"xform.policies.fit\(..., symbolic=\{'b': 128\}\)"):
        plan("auto")
    assert plan(fit(symbolic={"b": 64})).symbolic == (("b", 64),)


def test_infeasible_budgets_name_the_sizes() -> None:
    policy = budget("4 KiB", verify=False, symbolic={"b": 64})
    with pytest.raises(BudgetInfeasible, match=r"verify=False, symbolic=\{'b': 64\}\)"):
        exported(xform.grad(deep, policy=policy), types(*DEEP))


def test_a_loop_of_symbolic_length_is_not_split() -> None:
    f = lambda w, xs: total(lax.scan(lambda h, x: (jnp.tanh(h @ w + x), None), xs[0], xs)[0])
    policy = budget("600 B", of="saved", symbolic={"n": 64})
    with pytest.raises(BudgetInfeasible):
        exported(xform.grad(f, policy=policy), types("4, 4", "n, 4"))


def test_slices_of_a_known_axis() -> None:
    """Tokens run in slices, the batch has a symbolic size."""
    f = lambda w, x: jnp.sum(jax.nn.logsumexp(x @ w, -1))
    arguments = types("4, 512", "64, b, 4")
    policy = budget("150 KiB", slices=True, symbolic={"b": 2})
    plan = xform.plan(f, *arguments, policy=policy, verify=False)
    assert len(plan.slices) == 1
    x = np.random.default_rng(0).normal(size=(64, 3, 4)).astype(np.float32)
    w = np.random.default_rng(1).normal(size=(4, 512)).astype(np.float32)
    check(exported(xform.grad(f, policy=plan), arguments)(w, x), jax.jit(jax.grad(f))(w, x))


def test_slices_of_a_symbolic_axis_are_refused() -> None:
    f = lambda w, x: jnp.sum(jax.nn.logsumexp(x @ w, -1))
    policy = budget("150 KiB", slices=True, verify=False, symbolic={"b": 128})
    with pytest.raises(BudgetInfeasible, match="no axis of symbolic length is sliced"):
        exported(xform.grad(f, policy=policy), types("4, 512", "b, 4"))


REPORTS: dict[str, Callable[..., Any]] = {
    "memory_analysis": lambda f, *xs: xform.memory_analysis(xform.grad(f), *xs),
    "fits": lambda f, *xs: xform.fits(xform.grad(f), *xs, target="tpu:v5e"),
    "max_batch": lambda f, *xs: xform.memory.max_batch(xform.grad(f), *xs, target="tpu:v5e"),
    "compare": lambda f, *xs: xform.compare(f, *xs, policies=["min_cut"]),
    "pareto": lambda f, *xs: xform.pareto(f, *xs),
    "sliced": lambda f, *xs: exported(xform.sliced(f, "1 MiB"), xs),
    "jacobian": lambda f, *xs: exported(xform.jacobian(f, chunk=2), xs),
    "sparse.hessian": lambda f, *xs: exported(xform.sparse.hessian(f), xs),
    "plan_names": lambda f, *xs: xform.plan_names(lambda w, x, policy: jax.grad(f)(w, x), *xs,
                                                  policy="budget:1MiB"),
}  # fmt: skip


@pytest.mark.parametrize("name", REPORTS)
def test_some_functions_need_known_sizes(name: str) -> None:
    with pytest.raises(WrongArgument, match="the dimension b of an argument is symbolic") as caught:
        REPORTS[name](deep, *types(*DEEP))
    assert "pass arguments of known sizes, such as those with b = 128" in str(caught.value)


def test_windows_along_a_symbolic_axis_are_refused() -> None:
    f = lambda x: total(lax.reduce_window(x, 1.0, lambda a, b: a * b, (2,), (1,), "VALID"))
    with pytest.raises(UnsupportedParam, match="an axis of symbolic length b"):
        exported(xform.grad(f), types("b"))


# Exported functions that are differentiated later.


def test_the_derivative_that_jax_export_adds() -> None:
    """`vjp_order` lets JAX differentiate xform's operations in an exported program."""
    f = lambda w, x: total(jnp.tanh(x @ w))
    found = export.export(jax.jit(xform.grad(f)))(*types(*SMALL))
    found = export.deserialize(found.serialize(vjp_order=1))
    x = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    second = lambda gradient: jax.jit(jax.grad(lambda w: total(gradient(w, x))))(x[:3])
    check(second(found.call), second(jax.grad(f)))


def test_the_derivative_of_a_call_of_an_exported_function() -> None:
    called = export.export(jax.jit(loss))(*types(*SMALL)).call
    x = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    expected = jax.jit(jax.grad(loss))(x[:3], x)
    check(xform.grad(called)(x[:3], x), expected)
    check(exported(xform.grad(called), types(*SMALL))(x[:3], x), expected)
    with pytest.raises(NotDifferentiable, match="forward-mode"):
        xform.jvp(called, (x[:3], x), (x[:3], x))
