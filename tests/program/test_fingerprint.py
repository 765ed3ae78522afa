"""Fingerprints are equal only for equal programs: programs, parameters, types and constants."""

import dataclasses
import enum
import functools
import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import xform
from tests.sharding import mesh
from xform import errors, policies
from xform._jax import Jaxpr, jaxprs_of, primitive_named, primitives
from xform.program.fingerprint import (
    fingerprint,
    listing,
    operation_text,
    parameters_text,
    text_of,
    type_text,
)
from xform.program.ir import trace

FAMILIES = [
    path.stem for path in sorted((Path(__file__).parent.parent / "rules/cases").glob("[a-z]*.py"))
]
CASES = [c for f in FAMILIES for c in importlib.import_module(f"tests.rules.cases.{f}").CASES]
FIRST = {c.primitive: c for c in reversed(CASES)}
X, W = np.linspace(0.1, 1.2, 12, dtype=np.float32).reshape(4, 3), np.eye(3, dtype=np.float32)


@jax.custom_jvp
def doubled(x):
    return 2 * x


doubled.defjvp(lambda xs, dxs: (doubled(*xs), 2 * dxs[0]))


@jax.custom_vjp
def halved(x):
    return x / 2


halved.defvjp(lambda x: (x / 2, None), lambda _, ct: (ct / 2,))


def sharded(f, **options):
    return jax.shard_map(f, mesh=mesh(), in_specs=P(), out_specs=P(), **options)


def references(x):
    ref = jax.new_ref(x)
    ref[0] += 1.0
    return ref[...]


# Primitives whose rules are tested elsewhere.
ELSEWHERE = {
    "cond": lambda x: lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x),
    "scan": lambda x: lax.scan(lambda c, x: (c * x, c), x[0], x),
    "while": lambda x: lax.while_loop(lambda x: x[0, 0] < 9, lambda x: x * 2, x),
    "jit": jax.jit(lambda x: jnp.sin(x)),
    "remat": jax.checkpoint(jnp.sin, policy=jax.checkpoint_policies.save_only_these_names("h")),
    "custom_jvp": doubled,
    "custom_vjp": halved,
    "solve": lambda x: jnp.linalg.solve(x[:3] + 9 * W, x[0]),
    "collectives": sharded(
        lambda x: (lax.psum(x, "i"), lax.ppermute(x, "i", [(0, 1)]), lax.all_gather(x, "i")),
        check_vma=False,
    ),
    "callback": lambda x: jax.pure_callback(np.sin, jax.typeof(x), x),
    "references": references,
    "constraint": lambda x: lax.with_sharding_constraint(x, NamedSharding(mesh(), P(None))),
    "key": lambda x: x + jax.random.normal(jax.random.key(0), x.shape),
}


def equations(found: Any) -> list[Any]:
    """Return the equations of a program, including nested ones."""
    within = (getattr(j, "jaxpr", j) for e in found for j in jaxprs_of(e))
    return [*found, *(e for j in within for e in equations(j.eqns))]


def traced(f, *args):
    return trace(lambda *xs: jax.tree.leaves(f(*xs)), *args)


def other(value: Any) -> Any:
    """Return another value that differs as little as possible."""
    match value:
        case bool():
            return not value
        case enum.Enum():
            return next(iter(m for m in type(value) if m is not value), None)
        case int() | float():
            return value + 1
        case str():
            return f"{value}x"
        case None:
            return 0
        case np.dtype():
            return np.dtype("int8" if value != "int8" else "int16")
        case np.generic():
            return type(value)(value + 1)
        case tuple() if hasattr(value, "_fields"):
            return value._replace(**{value._fields[-1]: other(value[-1])})
        case tuple() | list():
            return (*value[:-1], other(value[-1])) if value else (0,)
        case frozenset():
            return value | {"x"}
        case NamedSharding():
            return NamedSharding(value.mesh, value.spec, memory_kind="pinned_host")
        case jax.sharding.Mesh():
            return jax.make_mesh((2,), ("other",))
        case Jaxpr():
            return jax.make_jaxpr(lambda x: x)(1.0).jaxpr
    if hasattr(value, "eqns"):
        return jax.make_jaxpr(lambda x: x)(1.0)
    if dataclasses.is_dataclass(value):
        name = dataclasses.fields(value)[-1].name
        return dataclasses.replace(value, **{name: other(getattr(value, name))})
    return object()


def check(f, *args) -> None:
    one, two = traced(f, *args), traced(f, *args)
    assert listing(one) == listing(two)
    assert fingerprint(one) == fingerprint(two)
    for eqn in equations(one.equations):
        assert parameters_text(eqn) == parameters_text(eqn)
        for name, value in eqn.params.items():
            changed = eqn.replace(params={**eqn.params, name: other(value)})
            assert parameters_text(changed) != parameters_text(eqn), (
                f"{eqn.primitive}: {name}={value!r}"
            )


@pytest.mark.parametrize("name", FIRST)
def test_another_parameter_is_another_equation(name: str) -> None:
    check(FIRST[name].fun, *map(jnp.asarray, FIRST[name].args))


@pytest.mark.parametrize("name", ELSEWHERE)
def test_another_parameter_of_a_structured_equation(name: str) -> None:
    check(ELSEWHERE[name], X)


# Values.


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


@dataclasses.dataclass(frozen=True)
class Pair:
    a: Any
    b: Any = dataclasses.field(default=0, compare=False)


class Same:
    """An object that claims to be equal to everything."""

    def __init__(self, n):
        self.n = n

    def __eq__(self, _):
        return True

    def __hash__(self):
        return 0


class Bare:
    __slots__ = ("n",)


class Counted:
    """An object that computes its length on first use, and stores it."""

    def __init__(self, *items):
        self.items = items

    def __eq__(self, other):
        return self.items == other.items

    def __hash__(self):
        return hash(self.items)

    @functools.cached_property
    def length(self):
        return len(self.items)


def closing(n):
    return lambda x: x * n


def wave(x):
    return np.sin(x)


DIFFERENT = [
    1, 1.0, True, np.int32(1), np.float32(1), np.float64(1), "1", b"1", None, (), (1,), [1],
    ((1,),),
    0.0, -0.0, float("nan"), 1j, {}, {"a": 1}, {"a": 2}, frozenset((1,)), {1}, range(1), ...,
    np.ones(2, np.float32), np.ones(2), np.ones((2, 1)), np.zeros(2), jnp.ones(2), jnp.zeros(2),
    jax.random.key(0), jax.random.key(1), np.dtype("float32"), np.dtype("bfloat16"),
    lax.Precision.HIGH, lax.Precision.HIGHEST, Colour.RED, Colour.BLUE, Pair(1), Pair(1.0),
    Pair(1, 1), Same(1), Same(2), Bare(), Bare(), object(), object(), closing(1), closing(2),
    closing(1.0), lambda x: x, lambda x: x + 1, wave, np.sin, np.cos, functools.partial(wave, 1),
    functools.partial(wave, 2), Primitive("sin"), Primitive("sin"), lax.sin_p, P("i"), P(),
    P(None), mesh(), mesh(AxisType.Explicit), mesh(i=4, j=2), mesh(i=2, j=4),
    NamedSharding(mesh(), P("i")), NamedSharding(mesh(), P()),
    NamedSharding(mesh(AxisType.Explicit), P(unreduced={"i"})),
    NamedSharding(mesh(AxisType.Explicit), P(reduced={"i"})),
    P(unreduced={"i"}), P(reduced={"i"}), NamedSharding(mesh(), P(), memory_kind="pinned_host"),
    jax.tree.structure((1, 2)),
    jax.tree.structure([1, 2]), jax.tree.structure({"a": 1}), jax.tree.structure(1),
    jax.typeof(jnp.ones(2)), jax.typeof(jnp.ones(3)), jax.make_jaxpr(jnp.sin)(1.0),
    jax.make_jaxpr(jnp.cos)(1.0), lax.GatherDimensionNumbers((0,), (), ()),
    lax.GatherDimensionNumbers((), (0,), ()), jax.devices()[0], jax.devices()[1],
]  # fmt: skip


def test_cached_properties_do_not_change_the_text_of_an_object() -> None:
    value, other = Counted(1, 2), Counted(1, 3)
    before = text_of(value)
    assert value.length == other.length == 2
    assert before == text_of(value) != text_of(other)


def test_text_of_a_scan_is_unchanged_by_cached_parameter_values() -> None:
    """Parameters of JAX 0.11 store the list of their values once it was read."""
    w = np.stack([W, W])
    prog = trace(lambda x, w: lax.scan(lambda x, w: (jnp.sin(x @ w), None), x, w)[0], X, w)
    (loop,) = [e for e in prog.equations if e.primitive.name == "scan"]
    before = operation_text(loop)
    for param in loop.params.values():
        getattr(param, "vals", None)
    assert operation_text(loop) == before


def test_values_that_differ_have_different_texts() -> None:
    texts = [text_of(x) for x in DIFFERENT]
    assert len(set(texts)) == len(texts)
    assert texts == [text_of(x) for x in DIFFERENT]
    assert "" not in texts


def test_equal_values_have_one_text() -> None:
    for make in (
        lambda: np.arange(3), lambda: jnp.arange(3), lambda: closing(1), lambda: Pair((1, "a")),
        lambda: {"b": 1, "a": 2}, lambda: NamedSharding(mesh(), P("i")), lambda: Same(3),
        lambda: jax.checkpoint_policies.save_only_these_names("a", "b"),
        lambda: jax.make_jaxpr(lambda x: jnp.sin(x) + np.arange(3))(1.0),
    ):  # fmt: skip
        assert text_of(make()) == text_of(make())


def test_a_list_that_contains_itself_has_a_text() -> None:
    ring: list[Any] = [1]
    ring.append(ring)
    assert text_of(ring) == text_of(ring) != text_of([1, [1]])


def test_a_number_is_not_given_twice() -> None:
    seen = set()
    for _ in range(20):
        seen.add(text_of(object()))
    assert len(seen) == 20


def test_types() -> None:
    def of(shape=(2,), dtype=np.float32, **more):
        return type_text(jax.core.ShapedArray(shape, dtype, **more))

    explicit, auto = (mesh(kind).abstract_mesh for kind in (AxisType.Explicit, AxisType.Auto))
    found = [
        of(), of((2, 1)), of(dtype=np.int32), of(weak_type=True),
        of(memory_space=jax.memory.Space.Host), of((8,)),
        of((8,), sharding=NamedSharding(auto, P(None))),
        of((8,), sharding=NamedSharding(explicit, P(None))),
        of((8,), sharding=NamedSharding(explicit, P("i"))),
    ]  # fmt: skip
    assert len(set(found)) == len(found)
    assert found[0] == "float32[2]"
    vma = []

    def body(x):
        vma.append(type_text(jax.typeof(x)))
        vma.append(type_text(jax.typeof(lax.pcast(x, "i", to="varying"))))
        return x

    jax.eval_shape(sharded(body), X)
    assert vma[0] != vma[1]


def test_constants_count_by_content() -> None:
    one, two, again = (traced(lambda x, n=n: x + np.full(3, n), X[0]) for n in (1.0, 2.0, 1.0))
    assert fingerprint(one) == fingerprint(again) != fingerprint(two)


def test_the_context_of_an_equation_counts() -> None:
    with jax.set_mesh(mesh()):
        (there,) = traced(jnp.sin, X).equations
    (here,) = traced(jnp.sin, X).equations
    assert operation_text(there) != operation_text(here)
    with jax.threefry_partitionable(False):
        (elsewhere,) = traced(jnp.sin, X).equations
    assert parameters_text(elsewhere) != parameters_text(here)


def test_a_mesh_that_types_name_is_not_asked_of_the_context_too() -> None:
    """If JAX traced a function before, its equations have the context of that trace."""
    with jax.set_mesh(mesh()):
        (there,) = traced(jnp.sin, X).equations
    (here,) = traced(jnp.sin, X).equations
    assert operation_text(there) == operation_text(there.replace(ctx=here.ctx))
    # If no type names a mesh, the context does.
    assert parameters_text(here) != parameters_text(here.replace(ctx=there.ctx))


def test_none_is_absent_for_jax_and_not_for_others() -> None:
    (dot,) = traced(jnp.dot, W, W).equations
    assert dot.params["precision"] is None
    without = {k: v for k, v in dot.params.items() if k != "precision"}
    assert parameters_text(dot) == parameters_text(dot.replace(params=without))
    own = dot.replace(primitive=Primitive("dot_general"))
    assert parameters_text(own) != parameters_text(own.replace(params=without))
    assert operation_text(own) != operation_text(dot)


# In another process.

PROGRAM = """
import jax, jax.numpy as jnp, numpy as np
from tests.program import test_fingerprint as t
for name, f in sorted(t.ELSEWHERE.items()):
    print(name, t.fingerprint(t.traced(f, t.X)))
print(t.text_of([t.closing(2), t.Colour.RED, t.Pair({"b", "a", "c"}), t.wave, t.mesh()]))
"""


def test_a_program_has_one_fingerprint_before_and_after_pallas_is_imported() -> None:
    of_program = lambda: fingerprint(trace(lambda x, i: [x[i]], X, np.array([0, 2])))
    before = of_program()
    pytest.importorskip("jax.experimental.pallas.tpu_sc", exc_type=ImportError)
    assert primitive_named("a name that no primitive has") is None  # all modules were searched
    assert of_program() == before
    public = primitives()
    for name in ("gather", "scatter", "swap"):
        assert primitive_named(name) is public[name]


def test_texts_are_those_of_another_process() -> None:
    said_there = [
        subprocess.run([sys.executable, "-c", "import tests.conftest" + PROGRAM], check=True,
                       env={**os.environ, "PYTHONHASHSEED": seed},
                       capture_output=True, text=True).stdout
        for seed in ("1", "2")
    ]  # fmt: skip
    assert said_there[0] == said_there[1]
    assert len(said_there[0].splitlines()) == len(ELSEWHERE) + 1


# Code that uses fingerprints.


def three(constrain, w, x):
    for _ in range(3):
        x = constrain(jnp.tanh(x @ w))
    return jnp.sum(x)


def constrained(spec, kind=AxisType.Auto):
    where = NamedSharding(mesh(kind), spec)
    return functools.partial(three, lambda x: lax.with_sharding_constraint(x, where))


WEIGHTS, ROWS = np.eye(16, dtype=np.float32), np.ones((64, 16), np.float32)


def test_losses_that_differ_in_a_sharding_constraint_are_asked_about_one_by_one() -> None:
    for spec in (P("i"), P()):
        assert xform.plan(constrained(spec), WEIGHTS, ROWS).compiles == 1
        assert xform.plan(constrained(spec), WEIGHTS, ROWS).compiles == 0


def test_losses_that_differ_in_a_constant_are_asked_about_one_by_one() -> None:
    def loss(n):
        held = jnp.full(3, n)
        return lambda x: jnp.sum(jnp.sin(x) * held)

    assert [xform.plan(loss(n), X).compiles for n in (0.25, 0.75, 0.25)] == [1, 1, 0]


@pytest.mark.parametrize("given", ["plain", AxisType.Auto, AxisType.Explicit])
def test_a_sharded_function_is_planned(given: Any, tmp_path: Path) -> None:
    x = jnp.asarray(ROWS)
    if given == "plain":
        f = constrained(P("i"))
    else:
        x = jax.device_put(x, NamedSharding(mesh(given), P("i")))
        f = constrained(P("i")) if given == AxisType.Auto else functools.partial(three, jnp.sin)
    w = jnp.asarray(WEIGHTS) / 3
    if given != "plain":
        w = jax.device_put(w, NamedSharding(mesh(given), P()))
    most = xform.residuals(f, w, x).total_bytes
    for policy in (policies.min_cut, policies.budget(most // 2, of="saved")):
        made = xform.plan(f, w, x, policy=policy)
        made.save(tmp_path / "plan.json")
        for by in (made, type(made).load(tmp_path / "plan.json")):
            got = jax.jit(xform.grad(f, policy=by))(w, x)
            np.testing.assert_allclose(got, jax.jit(jax.grad(f))(w, x), rtol=2e-5)


def test_a_function_of_manual_axes_is_planned() -> None:
    body = functools.partial(three, jnp.sin)
    f = jax.shard_map(lambda w, x: lax.psum(body(w, x), "i"), mesh=mesh(),
                      in_specs=(P(), P("i")), out_specs=P())  # fmt: skip
    made = xform.plan(f, WEIGHTS, ROWS)
    got = jax.jit(xform.grad(f, policy=made))(WEIGHTS, ROWS)
    np.testing.assert_allclose(got, jax.grad(f)(WEIGHTS, ROWS), rtol=2e-5)


def test_a_plan_tells_precision() -> None:
    f = lambda precision: lambda w: jnp.sum(jnp.sin(jnp.dot(w, w, precision=precision)))
    made = xform.plan(f("highest"), W, verify=False)
    xform.grad(f("highest"), policy=made)(W)
    with pytest.raises(errors.OtherProgram, match=r"Precision\.HIGHEST"):
        jax.jit(xform.grad(f("high"), policy=made))(W)


def test_a_plan_serves_the_next_batch() -> None:
    """Closed-over values enter by type: a plan decides nothing by values."""
    loss = lambda x: lambda w: jnp.sum(jnp.sin(x @ w))
    made = xform.plan(loss(jnp.asarray(X)), W, verify=False)
    got = jax.jit(lambda w, x: xform.grad(loss(x), policy=made)(w))(W, X + 1)
    np.testing.assert_allclose(got, jax.grad(loss(X + 1))(W), rtol=1e-5)


def test_equal_equations_are_merged_and_no_others() -> None:
    own, twin = (Primitive("own") for _ in range(2))
    for p in (own, twin):
        p.def_abstract_eval(lambda x: x)
    cse = xform.passes.Cse()
    count = lambda f: len(cse(traced(f, X)).equations)
    assert count(lambda x: (own.bind(x), own.bind(x))) == 1
    assert count(lambda x: (own.bind(x), twin.bind(x))) == 2
    assert count(lambda x: (x @ W, jnp.dot(x, W, precision="highest"))) == 2
    own.def_abstract_eval(lambda x, table: x)
    table = lambda dtype: Pair("table", np.zeros(2, dtype))  # JAX does not compare the items
    drawn = lambda x, *dtypes: [own.bind(x, table=table(d)) for d in dtypes]
    assert count(lambda x: drawn(x, np.float32, np.float32)) == 1
    assert count(lambda x: drawn(x, np.float32, np.int32)) == 2
