"""The verifier and its messages, on passes that are broken on purpose."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from xform import passes
from xform._jax import Literal, Var
from xform.errors import BrokenPass, WrongArgument
from xform.program import ir

X = np.ones(3, np.float32)


def f(x):
    y = jnp.sin(x)
    jax.debug.print("{}", y[0])
    return [y * 2.0, jnp.cos(y)]


def with_equations(prog, equations, **other):
    return dataclasses.replace(prog, equations=tuple(equations), cache={}, **other)


def unread(prog):
    return with_equations(prog, prog.equations[1:])


def twice(prog):
    return with_equations(prog, [prog.equations[0], *prog.equations])


def backwards(prog):
    return with_equations(prog, prog.equations[::-1])


def ill_typed(prog):
    """Declare a cosine to be an integer."""
    last = prog.equations[-1]
    v = Var(last.outvars[0].aval.update(dtype=np.dtype(np.int32)))
    return with_equations(prog, [*prog.equations, last.replace(outvars=[v])])


def misfit(prog):
    """Add arrays of other shapes."""
    *_, last = ir.trace(lambda x, y: [x + y], X, X).equations
    z = ir.trace(lambda x: [x], np.ones(4, np.float32)).inputs[0]
    wrong = last.replace(invars=[prog.inputs[0], z])
    return dataclasses.replace(
        with_equations(prog, [*prog.equations, wrong]), consts=((z, np.ones(4, np.float32)),)
    )


def silent(prog):
    return with_equations(prog, [e for e in prog.equations if not e.effects])


def louder(prog):
    (loud,) = (e for e in prog.equations if e.effects)
    return with_equations(prog, [*prog.equations, loud])


def narrower(prog):
    return dataclasses.replace(prog, outputs=prog.outputs[:1], cache={})


def other_type(prog):
    return dataclasses.replace(prog, outputs=(prog.outputs[0], _one()), cache={})


def nothing_makes(prog):
    return dataclasses.replace(prog, outputs=(prog.outputs[0], Var(prog.outputs[1].aval)), cache={})


def same_input(prog):
    (v,) = prog.inputs
    return dataclasses.replace(prog, consts=((v, X), *prog.consts), cache={})


def _one():
    return Literal(np.float32(1), ir.trace(lambda x: [x], np.float32(1)).inputs[0].aval)


WRONG = {
    unread: "equation 0, `.*`, reads a value that no earlier equation makes",
    twice: r"equation 1, `b:f32\[3\] = sin a`, makes a value that already exists",
    backwards: "equation 0, `.*`, reads a value that no earlier equation makes",
    ill_typed: r"equation \d, `b:i32\[3\] = cos a`, makes f32\[3\]",
    misfit: r"equation \d+, `c:f32\[3\] = add a b`, is not well typed: .*shapes.*",
    silent: r"the effects changed \(1 before, 0 now\), or their order, at debug_(print|callback)",
    louder: r"the effects changed \(1 before, 2 now\), or their order, at debug_(print|callback)",
    narrower: r"its outputs were f32\[3\], f32\[3\] and are now f32\[3\]",
    other_type: r"its outputs were f32\[3\], f32\[3\] and are now f32\[3\], f32\[\]",
    nothing_makes: "nothing computes output 1",
    same_input: "an input or constant appears twice",
}


@pytest.mark.parametrize("change", WRONG)
def test_a_broken_pass_is_named_with_the_first_wrong_equation(change) -> None:
    prog = ir.trace(f, X)
    broken = dataclasses.make_dataclass(
        "Broken", [], bases=(passes.Pass,), frozen=True,
        namespace={"name": "broken", "rewrite": lambda self, prog: change(prog)},
    )  # fmt: skip
    with pytest.raises(BrokenPass) as e:
        passes.Pipeline([passes.Dce(), broken()])(prog)
    asked, problem, *rest = str(e.value).splitlines()
    assert asked == f"pass 'broken' on a program of {len(prog.equations)} equations"
    assert re.fullmatch(f"  problem: {WRONG[change]}", problem), problem
    if "equation" in problem or "effects" in problem:
        assert re.fullmatch(r"  where:   .*test_verify\.py:\d+\S* \(\S+\)", rest.pop(0))
    assert rest == [
        "  remedy:  fix the pass or leave it out; its method `rewrite` returns the wrong program"
    ]
    assert isinstance(passes.Pipeline([broken()], verify=False)(prog), ir.Program)


def test_effects_are_counted_in_loops_and_calls() -> None:
    def loud(x):
        def step(c, _):
            jax.debug.print("{}", c)
            return c + 1.0, None

        return [lax.scan(step, x, None, length=3)[0]]

    prog, quiet = ir.trace(loud, 0.0), ir.trace(lambda x: [x + 1.0], 0.0)
    with pytest.raises(BrokenPass, match=r"effects changed \(1 before, 0 now\)"):
        passes.verify(prog, quiet)
    passes.verify(prog, passes.Pipeline([p() for p in passes.PASSES.values()])(prog))


def test_weak_types_are_types() -> None:
    strong, weak = ir.trace(lambda x: [x], np.float32(1)), ir.trace(lambda x: [x], 1.0)
    with pytest.raises(BrokenPass, match=r"its inputs were f32\[\] and are now f32\[\] \(weak\)"):
        passes.verify(strong, weak)


def test_a_pipeline_of_something_else() -> None:
    with pytest.raises(WrongArgument, match="is not a pass"):
        passes.Pipeline([passes.Dce])
    with pytest.raises(WrongArgument, match="3 is not a function"):
        passes.Dce()(3)
