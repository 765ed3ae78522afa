"""A program before fusion has as many operations of each kind as XLA's."""

import collections
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive

from tests.kernels import kernels
from xform.planner.simulate.flat import flatten, flatten_iteration
from xform.planner.simulate.profiles import CPU, GPU, TPU
from xform.planner.simulate.steps import FlatProgram
from xform.program.ir import trace
from xform.steering.barrier import barrier

X = jax.ShapeDtypeStruct((64, 64), jnp.float32)
ONE = 64 * 64 * 4
WORDS = {"mul": "multiply", "div": "divide", "dot_general": "dot", "sin": "sine",
         "exp": "exponential", "sub": "subtract"}  # fmt: skip
COUNTED = {"multiply", "divide", "add", "subtract", "dot", "sine", "exponential", "transpose"}


def of(f, *args, by=CPU, n_cotangents: int = 0) -> FlatProgram:
    prog = trace(lambda *xs: jax.tree.leaves(f(*xs)), *(args or (X,)))
    return flatten(prog, by, n_cotangents)


def names(flat: FlatProgram) -> list[str]:
    return [s.primitive.name for s in flat.steps]


KINDS = {
    "equal computations": lambda x: jnp.sin(x) * jnp.exp(jnp.sin(x)),
    "in calls too": lambda x: jax.jit(lambda x: jnp.exp(x) @ x)(x) - jnp.exp(x),
    "dead code": lambda x: jnp.sin(x) if jnp.exp(x) is not None else x,
    "a power": lambda x: (x @ x) ** 8,
    "an odd power": lambda x: (x @ x) ** 3,
    "a square and a product": lambda x: jnp.square(x @ x) + (x @ x) * (x @ x),
    "what is transposed twice": lambda x: jnp.sin(x).T.T * x,
    "a transposed square": lambda x: jnp.exp((x @ x).T @ x),
    "a number that divides": lambda x: jnp.sin(x) / 3.0,
    "a column that divides": lambda x: (jnp.sin(x) / (x[:, :1] + 2)) @ (x / (x[:, :1] + 2)),
    "a repeated one": lambda x: jnp.sin(x) / lax.broadcast_in_dim(x[0] + 2, x.shape, (1,)),
    "nothing added": lambda x: jnp.sin(x) + 0.0,
    "a view of a view": lambda x: jnp.exp(x.reshape(32, 128).reshape(4096)) * 2,
    "an outer product": lambda x: jnp.einsum("i,j->ij", x[0], x[1]),
    "a region": lambda x: jax.checkpoint(lambda x: jnp.sin(x) * 2)(x) - x,
}


@pytest.mark.parametrize("name", KINDS)
def test_as_many_operations_are_left_as_by_xla(name: str) -> None:
    f = KINDS[name]
    ours = collections.Counter(WORDS.get(n, n) for n in names(of(f)))
    theirs = collections.Counter(d for k in kernels(f, X) for d in k.does)
    assert {k: n for k, n in ours.items() if k in COUNTED} == {
        k: n for k, n in theirs.items() if k in COUNTED
    }


def test_identities_reshapes_and_no_op_casts_make_no_steps() -> None:
    flat = of(lambda x: (x, x.reshape(64, 64), lax.convert_element_type(x, jnp.float32)))
    assert (flat.steps, set(flat.outputs)) == ((), set(flat.inputs))


@pytest.mark.parametrize(("shape", "dtype", "size"), [
    ((), jnp.float32, 4), ((0, 3), jnp.float32, 0), ((5,), jnp.int8, 5), ((3,), jnp.bfloat16, 6),
])  # fmt: skip
def test_bytes_of_small_empty_and_narrow_values(shape, dtype, size: int) -> None:
    flat = of(lambda x: x * x, jax.ShapeDtypeStruct(shape, dtype))
    assert [c.bytes for c in (*flat.inputs, *flat.outputs)] == [size, size]


def test_products_of_narrow_numbers_are_wide_where_the_compiler_widens_them() -> None:
    x = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)
    f = lambda x: x @ x
    (cpu,), (gpu,) = ([s.results[0].bytes for s in of(f, x, by=by).steps if s.primitive.name
                       == "dot_general"] for by in (CPU, GPU))  # fmt: skip
    assert (cpu, gpu) == (ONE if CPU.widens_products else ONE // 2, ONE // 2)


def test_a_barrier_is_a_step_only_on_its_own_backends() -> None:
    steps = {
        "everywhere": {CPU: 1, GPU: 1, TPU: 1},
        "cpu and tpu": {CPU: 1, GPU: 0, TPU: 1},
        "accelerators": {CPU: 0, GPU: 1, TPU: 1},
    }
    for where, by in itertools.product(steps, (CPU, GPU, TPU)):
        f = lambda x, ct, where=where: barrier([x], [ct], where)[0] * 2
        found = names(of(f, X, X, by=by))
        assert len(found) - sum(n in ("mul", "repeat") for n in found) == steps[where][by]


def test_a_barrier_does_not_wait_for_the_cotangent_of_a_scalar() -> None:
    one = jax.ShapeDtypeStruct((), jnp.float32)
    f = lambda x, ct: barrier([x], [ct])[0] * 2
    known, unknown = (names(of(f, X, one, n_cotangents=n)) for n in (1, 0))
    assert len(known) == len(unknown) - 1


def test_a_primitive_of_another_library_is_what_its_implementation_does() -> None:
    checked, kernel = Primitive("checked"), Primitive("kernel")
    checked.def_impl(lambda x, *, weighted: x * jnp.exp(x) if weighted else x)
    kernel.def_impl(np.asarray)  # no tracer
    for primitive in (checked, kernel):
        primitive.def_abstract_eval(lambda x, **params: x)
    assert names(of(lambda x: checked.bind(jnp.sin(x), weighted=False))) == ["sin"]
    assert names(of(lambda x: checked.bind(x, weighted=True))) == ["exp", "mul"]
    assert names(of(lambda x: kernel.bind(jnp.sin(x)))) == ["sin", "kernel"]


def test_device_put_to_host_is_a_step_on_gpu_but_not_on_cpu() -> None:
    f = lambda x: jax.device_put(jnp.sin(x), jax.memory.Space.Host)
    assert names(of(f)) == ["sin"]
    there = of(f, by=GPU)
    assert names(there) == ["sin", "device_put"]
    assert there.outputs[0].bytes == 0


@pytest.mark.parametrize("length", [0, 1, 7])
def test_a_loop_is_one_step_that_starts_from_its_state_and_its_stacks(length: int) -> None:
    f = lambda x, w: lax.scan(lambda c, _: (c @ w, (c, jnp.sum(c))), x, None, length=length)
    flat = of(f, X, X)
    (loop,) = (s for s in flat.steps if s.primitive.name == "scan")
    assert [c.bytes for c in loop.initial_values] == [ONE, length * ONE, length * 4]
    assert [c.bytes for c in loop.results] == [ONE, length * ONE, length * 4]
    assert loop.initial_values[0] is flat.inputs[0]


def test_a_scan_iteration_slices_its_inputs_and_updates_its_stacks() -> None:
    prog = trace(lambda c, x: [jnp.sin(c) * x, jnp.exp(c), x], X, X)
    (eqn,) = trace(lambda c, xs: lax.scan(lambda c, x: (jnp.sin(c) * x, (jnp.exp(c), x)), c, xs),
                   X, jax.ShapeDtypeStruct((5, 64, 64), jnp.float32)).equations  # fmt: skip
    flat = flatten_iteration(prog, CPU, eqn, 1, 2)
    found = collections.Counter(names(flat))
    assert found == {"dynamic_slice": 1, "sin": 1, "mul": 1, "exp": 1, "dynamic_update_slice": 2}
    # A stacked value is not written twice.
    assert [c.bytes for c in flat.outputs] == [ONE, 0, 0]
