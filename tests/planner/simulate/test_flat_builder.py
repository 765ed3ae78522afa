"""Steps are added once each, and unused steps never."""

import itertools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from xform.planner.simulate.flat_builder import FlatBuilder, OperationKey
from xform.planner.simulate.profiles import CPU, GPU, Profile
from xform.planner.simulate.steps import FlatProgram
from xform.program.fingerprint import operation_text
from xform.program.ir import Program, trace

X = jnp.ones((3, 5))


class Plainly(FlatBuilder):
    """Make each equation a step, unchanged."""

    def add_equation(self, eqn, reads):
        return self.add_step(eqn.primitive, (tuple(reads), self.operation_key(eqn)), eqn, reads)


def added(f, *args, by: Profile = CPU, n_cotangents: int = 0) -> tuple[Plainly, FlatProgram]:
    prog = args[0] if isinstance(args[0], Program) else trace(f, *args)
    work = Plainly(by)
    n = len(prog.inputs) - n_cotangents
    values = [*work.inputs(prog.inputs[:n]), *work.cotangent_inputs(prog.inputs[n:])]
    return work, work.build(values, work.add_program(prog, values))


def names(flat: FlatProgram) -> list[str]:
    return [s.primitive.name for s in flat.steps]


def test_equal_computations_are_one_step_except_products() -> None:
    _, flat = added(lambda x: [jnp.sin(x) + jnp.exp(jnp.sin(x)), jnp.sin(x)], X)
    assert names(flat) == ["sin", "exp", "add"]
    _, flat = added(lambda x: [jnp.sum(x, 0), jnp.sum(x, 1)], X)
    assert names(flat) == ["reduce_sum"] * 2
    _, flat = added(lambda x: [(x @ x.T) @ (x @ x.T)], X)
    assert names(flat).count("dot_general") == 2


def test_operation_keys_equal_iff_texts_equal_and_texts_made_lazily(monkeypatch) -> None:
    def f(x):
        scan = lambda by: lax.scan(lambda c, _: (c * by, None), x, None, length=3)[0]
        return [
            scan(2.0),
            scan(2.0),
            scan(3.0),
            lax.slice(x, (0, 1), (2, 3)),
            x[:2, 1:3],
            x[:2, :2],
        ]

    equations = trace(f, X).equations
    of = [OperationKey(e) for e in equations]
    for (a, x), (b, y) in itertools.product(zip(of, equations, strict=True), repeat=2):
        assert (a == b) == (operation_text(x) == operation_text(y))
        assert a != b or hash(a) == hash(b)
    assert len(set(of)) == len(set(map(operation_text, equations))) < len(of)
    assert of[0] != operation_text(equations[0])

    asked: list[str] = []
    module = "xform.planner.simulate.flat_builder.operation_text"
    monkeypatch.setattr(module, lambda e: asked.append(e.primitive.name) or operation_text(e))
    _, flat = added(lambda x: [jnp.sum(jnp.sin(x), 0), jnp.cos(x)], X)
    assert (names(flat), asked) == (["sin", "reduce_sum", "cos"], [])


def test_a_parameter_that_was_not_given_makes_no_difference() -> None:
    (eqn,) = trace(lambda x: [jnp.sin(x)], X).equations
    bare = eqn.replace(params={k: v for k, v in eqn.params.items() if v is not None})
    assert len(bare.params) < len(eqn.params)
    assert (OperationKey(bare), hash(OperationKey(bare))) == (
        OperationKey(eqn),
        hash(OperationKey(eqn)),
    )


def test_dead_steps_are_removed_but_effects_stay() -> None:
    def f(x):
        jax.debug.print("{}", jnp.cos(x)[0, 0])
        return [jnp.sin(x) if jnp.exp(x) is not None else x]

    _, flat = added(f, X)
    assert "exp" not in names(flat)
    assert {"sin", "cos"} < set(names(flat))

    # Two prints of one value are two steps.
    def twice(x):
        for _ in range(2):
            jax.debug.print("{}", x[0, 0])
        return [x]

    prints = [n for n in names(added(twice, X)[1]) if "debug" in n or "callback" in n]
    assert len(prints) == 2


def test_readers_are_steps_that_stay_each_once() -> None:
    _, flat = added(lambda x: [jnp.sin(x) * jnp.sin(x), jnp.exp(x)][:1], X)
    (x,) = flat.inputs
    assert [s.primitive.name for s in x.readers] == ["sin"]
    sin, mul = flat.steps
    assert sin.results[0].readers == [mul]
    assert mul.results[0].maker is mul
    assert (flat.outputs, mul.results[0].readers) == ((mul.results[0],), [])


def test_constants_are_no_operands_and_their_results_are_compile_time() -> None:
    table = jnp.arange(15.0).reshape(3, 5)
    work, flat = added(lambda x: [x * table + 2.0], X)
    assert [len(s.operands) for s in flat.steps] == [1, 1]
    other = trace(lambda x: [jnp.sin(table) * jnp.cos(x)], X)
    work = Plainly(CPU)
    values = work.inputs(other.inputs)
    (made,) = work.add_program(other, values)
    assert made.maker is not None
    known = {
        s.primitive.name: work.is_compile_time(s.results[0])
        for s in work.build(values, [made]).steps
    }
    assert known == {"sin": True, "cos": False, "mul": False}


@pytest.mark.parametrize(("seed", "known"), [(jnp.float32(1), True), (jnp.ones(3), False)])
def test_the_cotangent_of_a_scalar_is_seen(seed, known: bool) -> None:
    work, flat = added(lambda x, ct: [jnp.exp(ct * 2) * jnp.sum(x)], X, seed, n_cotangents=1)
    (exp,) = (s for s in flat.steps if s.primitive.name == "exp")
    assert work.is_compile_time(exp.results[0]) is known
    assert not work.is_compile_time(flat.outputs[0])


def test_bytes_are_those_of_the_type_and_none_on_the_host() -> None:
    for x in (X, X.astype(jnp.bfloat16), jnp.ones((0, 3)), jnp.int8(1)):
        _, flat = added(lambda x: [x * x], x)
        assert [c.bytes for c in (*flat.inputs, *flat.outputs)] == [x.nbytes] * 2
    there = trace(lambda x: [jax.device_put(x, jax.memory.Space.Host)], X)
    sizes = {by.name: added(None, there, by=by)[1].outputs[0].bytes for by in (CPU, GPU)}
    assert sizes == {"cpu": X.nbytes, "gpu": 0}


def test_a_program_of_nothing() -> None:
    _, flat = added(lambda x: [], X)
    assert (flat.steps, flat.outputs) == ((), ())
    _, flat = added(lambda x: [x, x, 1.0], X)
    assert flat.outputs[0] is flat.outputs[1] is flat.inputs[0]
    assert flat.outputs[2].kind == "constant"
