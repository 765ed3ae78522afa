"""Each error says what was asked, what blocks it, where, and what to do, and has JAX's type too."""

import inspect
import pickle
import re
import sys
from types import SimpleNamespace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.extend.core import Primitive
from jax.sharding import NamedSharding, PartitionSpec

import xform
from xform import commands, errors, passes
from xform.memory import remote
from xform.memory.lowering import LoweredProgram
from xform.memory.targets import parse_target
from xform.planner.cuts import highs
from xform.planner.cuts.highs import Model
from xform.program.ir import trace

X = np.array([0.3, -0.7, 1.1], np.float32)
HERE = __file__
CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))

ruleless_p = Primitive("ruleless")
ruleless_p.def_impl(lambda x: x)
ruleless_p.def_abstract_eval(lambda x: x)

strict_p = Primitive("strict_of_test_errors")
strict_p.def_impl(lambda x, mode: x)
strict_p.def_abstract_eval(lambda x, mode: x)


@jax.custom_vjp
def reverse_only(x):
    return x


reverse_only.defvjp(lambda x: (x, None), lambda res, ct: (ct,))


@pytest.fixture(scope="module", autouse=True)
def _rule() -> None:
    xform.extend.pointwise(strict_p, lambda y, x: 1)


def f(x):
    return x * 2


def unsolved():
    model = Model()
    model.row((model.column(cost=1.0), 1.0))
    stopped = SimpleNamespace(status=1, message="it looked at too much", x=None)
    with mock.patch.object(highs.scipy.optimize, "milp", return_value=stopped):
        model.solve(1.0, model.cost, 1.0, exact=True)


def times(x):
    f = jax.custom_vjp(lambda y: x * y)
    f.defvjp(lambda y: (x * y, None), lambda res, ct: (x * ct,))
    return f


def other_program():
    return xform.vjp(lambda x: jnp.sum(jnp.cos(x)), X, policy=of_sine())


def of_sine():
    return xform.plan(lambda x: jnp.sum(jnp.sin(x)), X, verify=False)


def fails(x):
    raise RuntimeError("of its own")


fails.inputs = lambda: (X,)


wave = lambda x: jnp.sum(jnp.sin(x))


def spread() -> jax.Array:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.device_put(jnp.ones(8), NamedSharding(mesh, PartitionSpec("data")))


def without_matplotlib():
    plan = of_sine()
    with mock.patch.dict(sys.modules, {"matplotlib.figure": None}):
        plan.plot("plan.png")


def compiler_crashes():
    lowered = LoweredProgram("step", b"", 1, [], [], ())
    with mock.patch.object(remote, "WORKER", (sys.executable, "-c", "import sys; sys.exit('Oh')")):
        remote.compile_there(lowered, parse_target("gpu:h100"), 60)


GOLDEN = {
    "compilation failed": (
        compiler_crashes,
        errors.CompilationFailed,
        RuntimeError,
        """\
step for target='gpu:h100'
  problem: the compiler exited with status 1; the end of its log:
    Oh
  remedy:  try a smaller program; if that fails too, report the compiler's log""",
    ),
    "another program": (
        other_program,
        errors.OtherProgram,
        ValueError,
        """\
<Plan of <lambda>, min_cut, peak 48 B predicted>
  problem: it was made for another program; the first difference is at equation 0: the plan has \
`float32[3] = sin[] i0`, the program `float32[3] = cos[] i0`
  where:   HERE
  remedy:  make a new plan with xform.plan for this function, these shapes and dtypes, and the \
same argnums""",
    ),
    "no derivative in a step": (
        lambda: xform.plan(xform.jit(lambda x: jax.grad(jnp.sin)(x)), 1.0),
        errors.WrongArgument,
        TypeError,
        """\
plan of <lambda>
  problem: the step takes no derivative without a policy of its own, so there is nothing to plan
  where:   HERE
  remedy:  differentiate in the step with xform.grad, without policy= (xform.install() replaces \
jax.grad); or pass a loss, without xform.jit""",
    ),
    "a budget on Auto axes": (
        lambda: jax.jit(xform.grad(wave, policy=xform.policies.budget("1 MiB"))).lower(spread()),
        errors.UnknownShardings,
        ValueError,
        """\
policy=budget('1 MiB') of <lambda>
  problem: the budget limits the bytes of each device, but inside jit nothing says how values are \
sharded over a mesh with Auto axes {'data': 8}
  where:   HERE
  remedy:  give the budget to xform.jit of the whole step, which asks the compiler; or make the \
axes Explicit""",
    ),
    "missing extra": (
        without_matplotlib,
        errors.MissingExtra,
        ImportError,
        """\
Plan.plot
  problem: matplotlib is not installed
  remedy:  install it: pip install 'jax-xform[plot]', or pip install matplotlib""",
    ),
    "infeasible peak": (
        lambda: xform.plan(lambda x: jnp.sum(jnp.sin(x)), X, verify=False,
                           policy=xform.policies.budget(3)),
        errors.BudgetInfeasible,
        ValueError,
        """\
policy=budget('3 B')
  problem: the lowest peak found is 48 B (simulated): arguments 16 B, outputs 16 B, saved values \
0 B, the rest temporary
  remedy:  raise the budget, donate arguments that are not read later, make the batch or the \
sequence smaller, shard the largest arguments, or offload saved values""",
    ),
    "coupled update": (
        lambda: xform.fused_update(lambda p: jnp.sum(p["a"]) * p["b"], CLIPPED)(
            {"a": X, "b": X[0]}, CLIPPED.init({"a": X, "b": X[0]})
        ),
        errors.CoupledUpdate,
        ValueError,
        """\
fused_update: update each parameter as soon as its gradient is complete
  problem: the update of ['a'] (and 1 more) reads a result of add that depends on the gradients of \
2 parameters: ['a'], ['b']. optax.clip_by_global_norm is such an update: its norm is known only \
when all gradients are
  where:   HERE
  remedy:  use xform.clip_by_previous_global_norm, which takes the norm of the step before; or \
clip each parameter alone, as optax.clip and optax.clip_by_block_rms do; or keep the separate \
update of xform.grad""",
    ),
    "a solver that stopped": (
        unsolved,
        errors.NotSolved,
        RuntimeError,
        """\
a budget with solver='exact'
  problem: HiGHS stopped without a proof that its plan is the best: it looked at too much
  remedy:  use solver='auto', which takes the best plan that HiGHS finds""",
    ),
    "infeasible budget": (
        lambda: xform.residuals(lambda x: lax.fori_loop(0, 3, lambda _, x: jnp.sin(x), x).sum(), X,
                                policy=xform.policies.budget(3, of="saved")),
        errors.BudgetInfeasible,
        ValueError,
        """\
policy=budget('3 B', of='saved')
  problem: the smallest plan saves 36 B: float32[3] x 3 of cos at HERE
  where:   HERE
  remedy:  raise the budget, make the batch or the sequence smaller, or apply xform.remat to the \
functions that compute these values""",
    ),
    "a folder that is not there": (
        lambda: xform.memory_analysis(lambda x: x, X).save_html("/nope/x.html"),
        errors.FileNotWritten,
        OSError,
        """\
writing /nope/x.html
  problem: FileNotFoundError: No such file or directory
  remedy:  choose a file in an existing folder that is writable""",
    ),
    "missing rule": (
        lambda: xform.grad(lambda x: jnp.sum(ruleless_p.bind(x)))(jnp.asarray(X)),
        errors.MissingRule,
        NotImplementedError,
        """\
derivative of ruleless
  problem: xform has no rule for the primitive 'ruleless'
  where:   HERE
  remedy:  declare one with xform.extend (pointwise, linear, bilinear, composite), wrap the call \
in jax.custom_vjp, or cut it off with jax.lax.stop_gradient""",
    ),
    "unknown parameter": (
        lambda: xform.grad(lambda x: jnp.sum(strict_p.bind(x, mode="odd")))(jnp.asarray(X)),
        errors.UnsupportedParam,
        NotImplementedError,
        """\
derivative of strict_of_test_errors
  problem: its rule does not support the parameter mode='odd'
  where:   HERE
  remedy:  declare a rule with xform.extend that takes it as a keyword-only argument""",
    ),
    "forward of custom_vjp": (
        lambda: xform.jvp(lambda x: reverse_only(x), (1.0,), (1.0,)),
        errors.NoForwardMode,
        TypeError,
        """\
forward-mode autodiff (jvp) of a custom_vjp function
  problem: its rule says how to pull cotangents back, not how to push tangents forward
  where:   HERE
  remedy:  use reverse mode (grad, vjp), or give the function a jax.custom_jvp rule instead""",
    ),
    "custom_vjp over a value": (
        lambda: jax.jit(xform.grad(lambda x: times(x)(x)))(1.0),
        errors.NotDifferentiable,
        TypeError,
        """\
derivative of a custom_vjp function
  problem: it closes over a value that is being differentiated, which its rule cannot see
  where:   HERE
  remedy:  pass the value as an argument of the function""",
    ),
    "a number of what is differentiated": (
        lambda: xform.grad(lambda x: x * float(x))(1.0),
        errors.DerivativeLost,
        jax.errors.ConcretizationTypeError,
        """\
float() of a value that is being differentiated, float32[]
  problem: the result carries no derivative: everything computed from it would count as constant
  where:   HERE
  remedy:  compute with jax.numpy instead of numpy, scipy or math; or, if the value \
should be constant, convert jax.lax.stop_gradient(x); print, f-strings, comparisons and int(x) \
need neither""",
    ),
    "an array of what is differentiated": (
        lambda: xform.grad(lambda x: np.sum(np.sin(x)))(X),
        errors.DerivativeLost,
        jax.errors.TracerArrayConversionError,
        None,
    ),
    "not a scalar": (
        lambda: xform.grad(f)(X),
        errors.NotScalar,
        TypeError,
        """\
grad of f: gradient only defined for scalar-output functions
  problem: it returned an array of shape (3,)
  remedy:  reduce the output to a scalar, or use vjp or jacrev""",
    ),
    "not one scalar": (
        lambda: xform.value_and_grad(lambda x: (x, x))(1.0),
        errors.NotScalar,
        TypeError,
        None,
    ),
    "a loss and more": (
        lambda: xform.grad(lambda x: (x, {"aux": x}))(1.0),
        errors.NotScalar,
        TypeError,
        """\
grad of <lambda>: gradient only defined for scalar-output functions
  problem: it returned a tuple of float, float
  remedy:  reduce the output to a scalar, or use vjp or jacrev, or has_aux=True if the first of \
two outputs is the loss""",
    ),
    "integer leaf": (
        lambda: xform.grad(lambda p: p["w"])({"w": 1.0, "step": 3}),
        errors.WrongDtype,
        TypeError,
        """\
grad requires real- or complex-valued inputs (a sub-dtype of np.inexact)
  problem: the input ['step'] has dtype int32
  remedy:  pass a float, name other arguments in argnums, or set allow_int=True""",
    ),
    "integer input": (
        lambda: xform.grad(f)(3),
        errors.WrongDtype,
        TypeError,
        """\
grad requires real- or complex-valued inputs (a sub-dtype of np.inexact)
  problem: an input has dtype int32
  remedy:  pass a float, name other arguments in argnums, or set allow_int=True""",
    ),
    "not holomorphic": (
        lambda: xform.grad(f, holomorphic=True)(1.0),
        errors.WrongDtype,
        TypeError,
        """\
grad with holomorphic=True requires inputs with complex dtype
  problem: an input has dtype float32
  remedy:  pass complex inputs, or drop holomorphic""",
    ),
    "complex output": (
        lambda: xform.grad(f)(1.0 + 1j),
        errors.WrongDtype,
        TypeError,
        """\
grad requires real-valued outputs
  problem: an output has dtype complex64
  remedy:  use vjp, or set holomorphic=True if the function is complex-differentiable""",
    ),
    "integer output": (
        lambda: xform.grad(lambda x: jnp.argmax(x))(X),
        errors.WrongDtype,
        TypeError,
        """\
grad requires real-valued outputs
  problem: an output has dtype int32
  remedy:  use vjp, or set holomorphic=True if the function is complex-differentiable""",
    ),
    "no array": (
        lambda: xform.grad(f)("text"),
        errors.WrongDtype,
        TypeError,
        """\
grad
  problem: an argument of type str is not an array
  remedy:  pass arrays, numbers or pytrees of them; bind other arguments with functools.partial""",
    ),
    "cotangent of another shape": (
        lambda: xform.vjp(f, X)[1](np.ones(2, np.float32)),
        errors.WrongCotangent,
        ValueError,
        """\
pullback of f
  problem: a cotangent is float32[2], the output it belongs to float32[3]
  remedy:  pass a cotangent of the output's shape and dtype""",
    ),
    "cotangent of another dtype": (
        lambda: xform.vjp(f, X)[1](np.ones(3, np.float16)),
        errors.WrongCotangent,
        ValueError,
        """\
pullback of f
  problem: a cotangent is float16[3], the output it belongs to float32[3]
  remedy:  pass a cotangent of the output's shape and dtype""",
    ),
    "cotangent of another tree": (
        lambda: xform.vjp(f, X)[1]((X, X)),
        errors.WrongCotangent,
        ValueError,
        """\
pullback of f
  problem: the cotangent's tree is PyTreeDef((*, *)), the output's is PyTreeDef(*)
  remedy:  pass a cotangent with the tree of the function's output""",
    ),
    "several cotangents": (
        lambda: xform.vjp(f, X)[1](X, X),
        errors.WrongCotangent,
        TypeError,
        """\
pullback of f
  problem: it was called with 2 arguments
  remedy:  pass one cotangent with the tree of the function's output, such as a tuple""",
    ),
    "tangent of another shape": (
        lambda: xform.jvp(f, (X,), (np.ones(2, np.float32),)),
        errors.WrongTangent,
        ValueError,
        """\
jvp of f
  problem: a tangent is float32[2], but its primal float32[3] needs float32[3]
  remedy:  pass tangents of the primals' shapes and dtypes; for integers, \
np.zeros(shape, jax.dtypes.float0)""",
    ),
    "tangent of an integer": (
        lambda: xform.jvp(f, (1,), (1,)),
        errors.WrongTangent,
        TypeError,
        """\
jvp of f
  problem: a tangent is int32[], but its primal int32[] needs float0[]
  remedy:  pass tangents of the primals' shapes and dtypes; for integers, \
np.zeros(shape, jax.dtypes.float0)""",
    ),
    "tangents of another tree": (
        lambda: xform.jvp(f, (X,), ((X, X),)),
        errors.WrongTangent,
        TypeError,
        None,
    ),
    "push of another tree": (
        lambda: xform.linearize(f, X)[1](X, X),
        errors.WrongTangent,
        TypeError,
        None,
    ),
    "primals that are no tuple": (
        lambda: xform.jvp(f, X, X),
        errors.WrongArgument,
        TypeError,
        """\
jvp with primals of type ndarray
  problem: primals must be a tuple or list with one entry for each argument of the function
  remedy:  for a function of one argument pass primals=(x,)""",
    ),
    "argnums out of range": (
        lambda: xform.grad(f, 2)(1.0),
        errors.WrongArgument,
        ValueError,
        """\
grad with argnums=2
  problem: the function was called with 1 positional argument
  remedy:  pass the arguments to differentiate by position; keywords are held constant""",
    ),
    "argnums twice": (
        lambda: xform.grad(f, (0, 0))(1.0),
        errors.WrongArgument,
        TypeError,
        """\
grad with argnums=(0, 0)
  problem: it names one argument twice
  remedy:  name each argument once""",
    ),
    "no function": (lambda: xform.vjp(3, 1.0), errors.WrongArgument, TypeError, None),
    "no function for grad": (lambda: xform.grad(3), errors.WrongArgument, TypeError, None),
    "no pair": (
        lambda: xform.grad(f, has_aux=True)(1.0),
        errors.WrongArgument,
        TypeError,
        """\
grad with has_aux=True
  problem: f returned an array, not a pair (output, auxiliary)
  remedy:  return a pair, or drop has_aux""",
    ),
    "not linear": (
        lambda: xform.linear_transpose(lambda x: jnp.sin(x), X),
        errors.NotLinear,
        TypeError,
        None,
    ),
    "a function on the command line that fails": (
        lambda: commands.run(["residuals", f"{__name__}:fails"]),
        errors.FailedFunction,
        errors.XformError,
        None,
    ),
    "a pass that drops an output": (
        lambda: passes.verify(trace(lambda x: [x, x], X), trace(lambda x: [x], X), "mine"),
        errors.BrokenPass,
        AssertionError,
        """\
pass 'mine' on a program of 0 equations
  problem: its outputs were f32[3], f32[3] and are now f32[3]
  remedy:  fix the pass or leave it out; its method `rewrite` returns the wrong program""",
    ),
    "two rules": (
        lambda: xform.extend.pointwise(lax.sin_p, lambda y, x: 1),
        errors.WrongRule,
        AssertionError,
        """\
declaration of a rule for sin
  problem: xform has a rule for that primitive
  remedy:  bind a primitive of your own, or wrap the call in jax.custom_jvp or jax.custom_vjp""",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", GOLDEN)
def test_text_and_types(name: str) -> None:
    call, kind, jaxs, text = GOLDEN[name]
    with pytest.raises(kind) as caught:
        call()
    error = caught.value
    assert isinstance(error, jaxs)
    assert isinstance(error, errors.XformError)
    assert error.request
    assert error.problem
    assert error.remedy
    if text is not None:
        line = inspect.getsourcelines(call)[1]
        got = re.sub(re.escape(HERE) + r":(\d+)\S* \(.*\)", "HERE", str(error))
        assert got == text
        if "HERE" in text:
            at = int(re.search(re.escape(HERE) + r":(\d+)", error.where).group(1))
            assert line <= at <= line + 1


@pytest.mark.parametrize("name", GOLDEN)
def test_errors_survive_pickling(name: str) -> None:
    call, kind, *_ = GOLDEN[name]
    with pytest.raises(kind) as caught:
        call()
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)
    assert type(again) is type(caught.value)


JAX_RAISES = {
    "a number of what is differentiated": lambda: jax.grad(lambda x: x * float(x))(1.0),
    "an array of what is differentiated": lambda: jax.grad(lambda x: np.sum(np.sin(x)))(X),
    "not a scalar": lambda: jax.grad(f)(X),
    "not one scalar": lambda: jax.value_and_grad(lambda x: (x, x))(1.0),
    "integer input": lambda: jax.grad(f)(3),
    "not holomorphic": lambda: jax.grad(f, holomorphic=True)(1.0),
    "complex output": lambda: jax.grad(f)(1.0 + 1j),
    "integer output": lambda: jax.grad(lambda x: jnp.argmax(x))(X),
    "no array": lambda: jax.grad(f)("text"),
    "cotangent of another shape": lambda: jax.vjp(f, X)[1](np.ones(2, np.float32)),
    "cotangent of another dtype": lambda: jax.vjp(f, X)[1](np.ones(3, np.float16)),
    "cotangent of another tree": lambda: jax.vjp(f, X)[1]((X, X)),
    "several cotangents": lambda: jax.vjp(f, X)[1](X, X),
    "tangent of another shape": lambda: jax.jvp(f, (X,), (np.ones(2, np.float32),)),
    "tangent of an integer": lambda: jax.jvp(f, (1,), (1,)),
    "tangents of another tree": lambda: jax.jvp(f, (X,), ((X, X),)),
    "primals that are no tuple": lambda: jax.jvp(f, X, X),
    "argnums out of range": lambda: jax.grad(f, 2)(1.0),
    "no function": lambda: jax.vjp(3, 1.0),
    "no function for grad": lambda: jax.grad(3),
    "no pair": lambda: jax.grad(f, has_aux=True)(1.0),
    "forward of custom_vjp": lambda: jax.jvp(reverse_only, (1.0,), (1.0,)),
    "missing rule": lambda: jax.grad(lambda x: jnp.sum(ruleless_p.bind(x)))(jnp.asarray(X)),
}


@pytest.mark.parametrize("name", JAX_RAISES)
def test_code_that_catches_jaxs_error_catches_ours(name: str) -> None:
    with pytest.raises(Exception) as theirs:  # noqa: PT011
        JAX_RAISES[name]()
    with pytest.raises(theirs.type):
        GOLDEN[name][0]()


@pytest.mark.parametrize("wrap", [
    jax.jit, jax.checkpoint,
    lambda f: lambda x: lax.scan(lambda c, _: (f(c), None), x, None, length=2)[0],
    lambda f: lambda x: lax.cond(x[0] > 0, f, lambda x: x, x),
], ids=["jit", "remat", "scan", "cond"])  # fmt: skip
def test_the_place_is_the_users_line_inside_loops_and_calls(wrap) -> None:
    inner = lambda x: ruleless_p.bind(x)
    line = inspect.getsourcelines(inner)[1]
    with pytest.raises(errors.MissingRule) as caught:
        xform.grad(lambda x: jnp.sum(wrap(inner)(x)))(jnp.asarray(X))
    assert f"{HERE}:{line}" in caught.value.where


def test_an_error_of_the_users_function_comes_through_unchanged() -> None:
    class Mine(Exception):
        pass

    def bad(x):
        raise Mine("the user's own")

    for t in (xform.grad(bad), lambda x: xform.jvp(bad, (x,), (x,)), xform.hessian(bad)):
        with pytest.raises(Mine, match="own"):
            t(1.0)


def test_python_control_flow_on_a_traced_value_is_jaxs_error() -> None:
    with pytest.raises(jax.errors.TracerBoolConversionError):
        jax.jit(xform.grad(lambda x: x if x > 0 else -x))(1.0)


def test_every_error_class_is_documented_and_tested() -> None:
    kinds = {
        c for c in vars(errors).values() if inspect.isclass(c) and c.__module__ == errors.__name__
    }
    assert kinds - {errors.XformError} <= {kind for _, kind, *_ in GOLDEN.values()}
    assert all(inspect.getdoc(c) for c in kinds)
