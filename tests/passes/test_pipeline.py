"""Passes on functions and nested programs: composition, effects, invariants, time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import xform
from tests.calls import counted
from xform import passes
from xform.errors import WrongArgument
from xform.passes.base import size
from xform.program import ir
from xform.steering.barrier import barrier

ALL = passes.Pipeline([p() for p in passes.PASSES.values()])
X = np.linspace(-1, 1, 4, dtype=np.float32)


def names(f, *args) -> list[str]:
    return [e.primitive.name for e in jax.make_jaxpr(f)(*args).eqns]


def model(w, x, *, scale=1.0, how="sin"):
    """A function of a dict of arrays, with a keyword argument that is not an array, and a loop."""
    step = lambda h, w: (getattr(jnp, how)(h * w["a"]) * 1.0 + w["b"], h)
    y, hs = lax.scan(step, x * scale, w)
    return {"y": y.sum(), "hs": hs}


W = {"a": np.ones((3, 4), np.float32) / 2, "b": np.ones((3, 4), np.float32)}


def close(a, b) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), a, b)


def test_a_function_keeps_its_signature() -> None:
    f = ALL(model)
    assert f.__name__ == "model"
    close(f(W, X), model(W, X))
    close(f(W, x=X, scale=2.0, how="cos"), model(W, X, scale=2.0, how="cos"))
    close(f(W, 0.5 * jnp.asarray(X)), model(W, 0.5 * X))


@pytest.mark.parametrize("wrap", [ALL, lambda f: jax.jit(ALL(f)), lambda f: ALL(jax.jit(f))])
def test_passes_compose_with_jit_grad_and_vmap(wrap) -> None:
    loss = lambda w, x: model(w, x)["y"]
    f, want = wrap(loss), jax.jit(jax.grad(loss))(W, X)
    for grad in (jax.grad, xform.grad):
        close(jax.jit(grad(f))(W, X), want)
    close(jax.jit(wrap(xform.grad(loss)))(W, X), want)
    batch = np.stack([X, 2 * X])
    mapped = jax.jit(jax.vmap(jax.grad(f), (None, 0)))(W, batch)
    close(jax.tree.map(lambda g: g[0], mapped), want)


def test_passes_compose_with_derivatives_outside_jit() -> None:
    loss = lambda x: jnp.sum(jnp.sin(x) * 1.0)
    f = ALL(loss)
    close(jax.grad(f)(X), np.cos(X))
    close(xform.grad(f)(X), np.cos(X))
    close(xform.jvp(f, (X,), (X,))[1], np.sum(np.cos(X) * X))
    close(xform.hvp(f, (X,), (X,)), -np.sin(X) * X)


def test_closed_over_tracers() -> None:
    outer = lambda y: jnp.sum(ALL(lambda x: x * y * jnp.sin(y))(X))
    np.testing.assert_allclose(jax.grad(outer)(2.0), jax.grad(
        lambda y: jnp.sum(X * y * jnp.sin(y)))(2.0), rtol=1e-6)  # fmt: skip


def test_custom_rules_are_kept_unless_asked() -> None:
    @jax.custom_jvp
    def f(x):
        return jnp.sin(x)

    f.defjvp(lambda xs, dxs: (f(*xs), 10.0 * dxs[0]))
    assert float(jax.grad(ALL(f))(1.0)) == 10.0
    assert names(ALL(f), 1.0) == ["custom_jvp_call"]
    bare = passes.Inline(custom=True)(f)
    assert names(bare, 1.0) == ["sin"]
    np.testing.assert_allclose(jax.grad(bare)(1.0), np.cos(1.0), rtol=1e-6)


def test_inline_leaves_large_and_placed_calls() -> None:
    g = jax.jit(lambda x: jnp.sin(jnp.cos(x)))
    assert names(passes.Inline()(g), X) == ["cos", "sin"]
    assert names(passes.Inline(max_equations=1)(g), X) == ["jit"]
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    assert names(passes.Inline()(jax.jit(jnp.sin, out_shardings=one)), X) == ["jit"]


def test_calls_of_one_function_stay_one_function() -> None:
    g = jax.jit(lambda x: jnp.sin(x) * 1.0 + jnp.sin(x))
    f = passes.Pipeline([passes.Simplify(), passes.Cse(), passes.Dce()])(lambda x: g(g(g(x))))
    eqns = jax.make_jaxpr(f)(X).eqns
    assert [e.primitive.name for e in eqns] == ["jit"] * 3
    assert len({id(e.params["jaxpr"]) for e in eqns}) == 1
    assert len(eqns[0].params["jaxpr"].eqns) == 2


def test_effects_stay_in_order(capfd: pytest.CaptureFixture) -> None:
    def loud(x):
        def step(c, _):
            jax.debug.print("in {}", c[0], ordered=True)
            return (c[0] + 1.0, c[1] * 2.0), None

        jax.debug.print("before", ordered=True)
        jax.debug.print("before", ordered=True)
        (c, _), _ = lax.scan(step, (x, x), None, length=2)
        del c
        lax.cond(x > 0, lambda: jax.debug.print("yes", ordered=True), lambda: None)
        return x * 1.0

    assert float(ALL(loud)(1.0)) == 1.0
    jax.effects_barrier()
    out = capfd.readouterr().out.split("\n")
    assert [line for line in out if line] == ["before", "before", "in 1.0", "in 2.0", "yes"]


def test_a_reference_from_outside() -> None:
    ref = jax.new_ref(jnp.zeros(()))

    def f(x):
        ref[...] = x * 1.0
        ref[...] = ref[...] + x
        return x

    ALL(f)(jnp.float32(2.0))
    assert float(ref[...]) == 4.0


def test_cse_does_not_merge_barriers_or_checkpoints() -> None:
    def f(x):
        y, z = lax.optimization_barrier(x), lax.optimization_barrier(x)
        g = jax.checkpoint(jnp.sin)
        return [jnp.cos(y) + jnp.cos(z), g(x) + g(x), *barrier([x], [y]), *barrier([x], [y])]

    assert names(passes.Cse()(f), X) == names(f, X)


def test_cse_tells_alike_from_equal() -> None:
    f = lambda x: [lax.integer_pow(x, 2), lax.integer_pow(x, 3), x * 0.0, x * -0.0, x + 1, x + 1.0,
                   x.astype(np.float16), x.astype(jnp.bfloat16)]  # fmt: skip
    assert len(names(passes.Cse()(f), X)) == 7  # `x + 1` and `x + 1.0` are the same sum
    noise = lambda key: [jax.random.normal(key, (2,)), jax.random.normal(key, (2,))]
    merged = passes.Pipeline([passes.Inline(), passes.Cse()])(noise)
    assert names(merged, jax.random.key(0)).count("random_bits") == 1


def test_fold_has_a_limit() -> None:
    f = lambda x: x * jnp.sin(jnp.arange(8.0)).sum()
    assert names(passes.Fold()(f), np.float32(1)) == ["mul"]
    assert "sin" in names(passes.Fold(max_bytes=16)(f), np.float32(1))
    loop = lambda x: x + lax.fori_loop(0, 3, lambda i, c: c + 1.0, 0.0)
    assert names(passes.Fold()(loop), np.float32(1))[0] in ("scan", "while")


def test_fold_leaves_tracers() -> None:
    f = jax.jit(lambda y: passes.Fold()(lambda x: x * jnp.sin(y))(X))
    close(f(2.0), X * np.sin(2.0))


def test_outputs_are_arrays_as_of_jit() -> None:
    f = lambda x: (x, jnp.float32(2) * 3, 2.0, 1, True, 1j, np.arange(3.0), jnp.asarray(2.0) * 3,
                   jnp.arange(3) * 2, np.float16(1), jax.random.key(0))  # fmt: skip
    inside = lambda x: [y.astype(y.dtype) for y in passes.Fold()(f)(x)[:-1]]
    for made in (passes.Fold()(f), ALL(f)):
        got, want = made(X), jax.jit(f)(X)
        assert all(isinstance(y, jax.Array) for y in got)
        assert [*map(jax.typeof, got)] == [*map(jax.typeof, want)]
        assert [y.weak_type for y in got[:-1]] == [y.weak_type for y in want[:-1]]
        close(got[:-1], want[:-1])
    close(jax.jit(inside)(X), inside(X))
    none = lambda x: np.zeros(2, jax.dtypes.float0)
    assert ALL(none)(X).dtype == jax.dtypes.float0


@pytest.mark.parametrize("given", [passes.Cse(), None, 5])
def test_passes_that_are_no_list(given) -> None:
    with pytest.raises(WrongArgument) as caught:
        passes.Pipeline(given)
    assert str(caught.value) == (
        f"Pipeline\n  problem: {given!r} is not a list of passes\n"
        "  remedy:  pass a list, such as Pipeline([xform.passes.Cse()])"
    )


def test_dce_of_nested_programs() -> None:
    def f(x):
        def step(carry, s):
            i, a, b, c = carry
            return (i + 1, a * s, a + b, c + s), (a, b)

        (_, a, b, c), (ys, _) = lax.scan(step, (0, x, x, x), jnp.ones((5, 4)))
        dead = lax.cond(a[0] > 0, lambda: (a, b), lambda: (b, a))[1]
        call = jax.jit(lambda a, b: (jnp.sin(a), jnp.cos(b)))(a, c)
        return [ys, call[0], lax.while_loop(lambda s: s[0] < 3, lambda s: (
            s[0] + 1, s[1] * 2, s[2] * dead), (0, a, b))[1]]  # fmt: skip

    before = ir.trace(f, X)
    after = passes.Dce()(before)
    assert (
        passes.listing(after)
        == """\
inputs  a:f32[4]
  b:f32[5,4] = broadcast_in_dim[shape=(5,4)] 1.0
  c:f32[4] d:f32[5,4] = scan[length=5] a b
    body: e:f32[4] f:f32[4]
      g:f32[4] = mul e f
    return g e
  h:f32[4] = jit[name=<lambda>] c
    body: i:f32[4]
      j:f32[4] = sin i
    return j
  k:i32[] l:f32[4] = while 0 c
    condition: m:i32[] n:f32[4]
      o:bool[] = lt m 3
    return o
    body: p:i32[] q:f32[4]
      r:i32[] = add p 1
      s:f32[4] = mul q 2.0
    return r s
outputs d h l"""
    )
    passes.verify(before, after)
    close(ir.evaluate(after, [X]), ir.evaluate(before, [X]))


def test_a_second_time_changes_nothing() -> None:
    once = ALL(ir.program(jax.make_jaxpr(model)(W, X)))
    assert ALL(once) is once


def chain(n: int):
    def f(x):
        for _ in range(n):
            x = lax.sin(lax.neg(lax.neg(x)))
            x = lax.add(x, lax.sin(x))
        return [x]

    return f


def test_work_is_linear() -> None:
    def work(n: int) -> int:
        prog = ir.trace(chain(n), X)
        assert size(prog) == 5 * n
        done, after = counted(lambda: ALL(prog))
        assert size(after) == 3 * n
        return done

    work(10)
    assert work(1000) < 6 * work(200)


@pytest.mark.parametrize("kind", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit])
def test_on_a_mesh(kind) -> None:
    mesh = jax.make_mesh((8,), ("d",), (kind,))
    spec = jax.sharding.PartitionSpec("d")

    def f(x):
        step = lambda c, _: ((c[0] * 1.0 + jnp.sin(c[0]), c[1]), None)
        c = lax.scan(step, (x, x), None, length=3)[0][0]
        return lax.cond(True, lambda c: c.T.T, lambda c: c, c) + jnp.sin(jnp.arange(4.0))

    total = lambda x: lax.psum(f(x), "d")
    mapped = lambda f: jax.shard_map(f, mesh=mesh, in_specs=spec,
                                     out_specs=jax.sharding.PartitionSpec())  # fmt: skip
    x = np.linspace(-1, 1, 32, dtype=np.float32).reshape(8, 4)
    with jax.set_mesh(mesh):
        there = jax.device_put(x, jax.sharding.NamedSharding(mesh, spec))
        got = jax.jit(lambda x: (ALL(f)(x), mapped(ALL(total))(x), ALL(mapped(total))(x)))(there)
    want = f(x)
    close(list(got), [want, want.sum(0)[None], want.sum(0)[None]])
    assert got[0].sharding.is_equivalent_to(there.sharding, 2)


def test_a_note_of_a_named_axis_is_no_effect() -> None:
    """JAX records named axes as effects: dead sums over them are dropped, equal ones merged."""

    def f(x):
        lax.psum(jnp.sin(x), "d")
        return lax.psum(x, "d") + lax.psum(x, "d") * lax.axis_index("d") * lax.axis_index("d")

    mesh, spec = jax.make_mesh((8,), ("d",)), jax.sharding.PartitionSpec("d")
    both = [passes.Dce(), passes.Cse()]
    mapped = lambda f: jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    passed = mapped(passes.Pipeline(both)(f))
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.arange(8.0), jax.sharding.NamedSharding(mesh, spec))
        (eqn,) = jax.make_jaxpr(passed)(x).eqns
        names = [e.primitive.name for e in eqn.params["jaxpr"].eqns]
        assert (names.count("sin"), names.count("psum"), names.count("axis_index")) == (0, 1, 1)
        close([passed(x)], [mapped(f)(x)])
