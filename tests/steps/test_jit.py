"""`xform.jit`: a byte budget for a whole step."""

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import xform
from xform.errors import BudgetInfeasible, OtherProgram, WrongArgument
from xform.memory.targets import parse_target
from xform.planner.device import current_device
from xform.policies import budget
from xform.steps import jit
from xform.steps.program import StepProgram
from xform.steps.search import StepSearch
from xform.steps.step_plan import StepPlan

Step = Callable[..., Any]


def net(ws: Any, x: Any) -> Any:
    return jax.lax.scan(lambda h, w: (jnp.sin(h @ w), None), x, ws)[0]


def loss(ws: Any, x: Any) -> Any:
    return jnp.mean(net(ws, x) ** 2)


def sgd(ws, x):
    value, grads = xform.value_and_grad(loss)(ws, x)
    return ws - 0.1 * grads, value


def adam(ws, state, x):
    grads = xform.grad(loss)(ws, x)
    updates, state = optax.adam(1e-3).update(grads, state)
    return optax.apply_updates(ws, updates), state


def microbatches(ws, xs):
    def add(total, x):
        value, grads = xform.value_and_grad(loss)(ws, x)
        return total + grads, value

    grads, values = jax.lax.scan(add, jnp.zeros_like(ws), xs)
    return ws - 0.1 * grads, values


def gan(g, d, z, x):
    dg = xform.grad(lambda g: jnp.mean(net(d, net(g, z))))(g)
    dd = xform.grad(lambda d: jnp.mean(net(d, x)) - jnp.mean(net(d, net(g, z))))(d)
    return g - 0.1 * dg, d + 0.1 * dd


@jax.jit
def jitted_gradient(ws, x):
    return xform.grad(loss)(ws, x)


def two_jits(ws, x):
    ws = ws - 0.1 * jitted_gradient(ws, x)
    return ws - 0.1 * jitted_gradient(ws, x + 1)


def by_vjp(ws, x):
    y, pull = xform.vjp(lambda ws: net(ws, x), ws)
    return ws - 0.1 * pull(y)[0]


def frozen(ws, x):
    half = lambda half: loss(jnp.concatenate([jax.lax.stop_gradient(ws[:6]), half]), x)
    return ws.at[6:].add(-0.1 * xform.grad(half)(ws[6:]))


def averaged(ws, mean, x):
    ws = ws - 0.1 * xform.grad(loss)(ws, x)
    return ws, 0.9 * mean + 0.1 * ws


def per_example(ws, x):
    grads = jax.vmap(xform.grad(loss), (None, 0))(ws, x.reshape(4, 16, 32))
    return ws - 0.1 * jnp.mean(grads, 0)


def second_order(ws, x):
    along = lambda ws: jnp.vdot(xform.grad(loss)(ws, x), jnp.ones_like(ws))
    return ws - 0.1 * xform.grad(along)(ws)


def numbers(*shape: int, seed: int = 0) -> Any:
    return jax.random.normal(jax.random.key(seed), shape) / 6


WS, X = numbers(12, 32, 32), numbers(64, 32, seed=1)
STEPS: dict[str, tuple[Step, tuple[Any, ...]]] = {
    "sgd": (sgd, (WS, X)),
    "adam": (adam, (WS, optax.adam(1e-3).init(WS), X)),
    "microbatches": (microbatches, (WS, numbers(4, 64, 32))),
    "gan": (gan, (WS, WS * 2, X, X + 1)),
    "two jits": (two_jits, (WS, X)),
    "vjp": (by_vjp, (WS, X)),
    "frozen": (frozen, (WS, X)),
    "averaged": (averaged, (WS, WS, X)),
    "per example": (per_example, (WS, X)),
    "second order": (second_order, (WS, X)),
}


def quick(name: str) -> Any:
    """A step as a parameter; most of them are slow, as they are compiled 20 times."""
    return name if name in ("adam", "gan") else pytest.param(name, marks=pytest.mark.slow)


def compiled_bytes(step: Step, *args: Any, **options: Any) -> int:
    said: Any = jax.jit(step, **options).lower(*args).compile().memory_analysis()
    total = said.argument_size_in_bytes + said.output_size_in_bytes + said.temp_size_in_bytes
    return total - said.alias_size_in_bytes


def assert_equal(a: Any, b: Any) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), a, b)


@pytest.mark.parametrize("name", [quick(name) for name in STEPS])
def test_a_budget_is_kept_or_refused_with_a_true_floor(name: str) -> None:
    step, args = STEPS[name]
    default, want = compiled_bytes(step, *args), jax.jit(step)(*args)
    refused: list[tuple[float, BudgetInfeasible]] = []
    for share in (0.8, 0.3):
        planned = xform.jit(step, budget(int(share * default)))
        try:
            got = planned(*args)
        except BudgetInfeasible as error:
            refused.append((share, error))
            continue
        size = planned.plan.compiled_bytes or default
        assert size <= share * default
        assert size == planned.memory_analysis().total_bytes
        assert_equal(got, want)
    for share, error in refused:
        floor = error.floor_bytes
        assert floor > share * default
        assert "The largest buffers" in str(error)
        lowest = xform.jit(step, budget(floor))
        assert_equal(lowest(*args), want)
        assert lowest.plan.compiled_bytes == floor


@contextlib.contextmanager
def counting_compilations() -> Iterator[list[str]]:
    """A list that has one entry for each program that XLA compiles inside the context."""
    compiled: list[str] = []
    listen = lambda event, _, **__: compiled.append(event) if "backend_compile" in event else None
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def test_the_planned_program_is_the_one_that_runs() -> None:
    planned = xform.jit(sgd, budget(int(0.8 * compiled_bytes(sgd, WS, X))))
    with counting_compilations() as compiled:
        out = planned(WS, X)
        assert len(compiled) == planned.plan.compiles
        again = planned(WS, X)
        planned.lower(WS, X).compile()
        assert planned.memory_analysis().total_bytes == planned.plan.compiled_bytes
        assert len(compiled) == planned.plan.compiles
    assert_equal(out, again)


def unrolled(ws, x):
    def loss(ws):
        h = x
        for w in ws:
            h = jnp.tanh(h @ w)
        return jnp.mean(h**2)

    return [w - 0.1 * g for w, g in zip(ws, xform.grad(loss)(ws), strict=True)]


class Traced:
    """A step as a function of `jax.jit`, which `memory_analysis` lowers and compiles itself."""

    def __init__(self, planned: Any):
        self.trace, self.lower, self.__wrapped__ = planned.trace, planned.lower, planned

    def __call__(self, *args: Any) -> Any:
        return self.__wrapped__(*args)


@pytest.mark.parametrize(
    ("step", "policy", "args"),
    [
        (adam, None, STEPS["adam"][1]),
        (sgd, "budget:200KiB", STEPS["sgd"][1]),
        (unrolled, "save_dots", ([*WS[:6]], X)),
    ],
)
def test_the_report_is_that_of_memory_analysis(
    step: Step, policy: Any, args: tuple[Any, ...]
) -> None:
    planned = xform.jit(step, policy, donate_argnums=0)
    lowered = planned.lower(*args)
    with counting_compilations() as compiled:
        lowered.compile()
        report = lowered.memory_analysis().to_dict()
        assert len(compiled) == (policy is None or "budget" not in policy)
    want = xform.memory_analysis(Traced(planned), *args).to_dict()
    # `memory_analysis` does not know how this function was planned.
    of_policy = {"compiled", "policy", "code", "planned"}
    assert {k for k in want if report[k] != want[k]} <= {"compile_seconds", *of_policy}
    again = xform.memory_analysis(planned, *args).to_dict()
    assert {k for k in again if report[k] != again[k]} <= {"compile_seconds", "planned"}


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize(
    "weights", [PartitionSpec(), PartitionSpec(None, "data")], ids=["data", "fsdp"]
)
def test_a_budget_is_for_each_device_of_a_mesh(kind: Any, weights: Any) -> None:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    place = lambda x, spec: jax.device_put(jnp.copy(x), NamedSharding(mesh, spec))
    ws, state = place(WS, weights), optax.adam(1e-3).init(WS)
    state = jax.tree.map(lambda y: place(y, weights if y.ndim else PartitionSpec()), state)
    x = place(numbers(512, 32), PartitionSpec("data"))
    with jax.set_mesh(mesh):
        want = jax.jit(adam)(ws, state, x)
        default = compiled_bytes(adam, ws, state, x, donate_argnums=(0, 1))
        planned = xform.jit(adam, budget(int(0.8 * default)), donate_argnums=(0, 1))
        got = planned(ws, state, x)
    assert (planned.plan.compiled_bytes or default) <= 0.8 * default
    assert planned.memory_analysis().to_dict()["device"]["count"] == 8
    assert ws.is_deleted()
    assert_equal(got, want)


def test_arguments_may_be_on_two_meshes() -> None:
    auto = (AxisType.Auto,) * 2
    meshes = (
        jax.make_mesh((8,), ("a",), axis_types=auto[:1]),
        jax.make_mesh((4, 2), ("b", "c"), axis_types=auto),
    )
    specs = PartitionSpec("a"), PartitionSpec(None, "b", "c")
    x, ws = (
        jax.device_put(y, NamedSharding(mesh, spec))
        for y, mesh, spec in zip((X, WS), meshes, specs, strict=True)
    )
    assert_equal(xform.jit(sgd)(ws, x), jax.jit(sgd)(WS, X))


def test_static_arguments_and_keywords() -> None:
    def step(n, ws, *, rate, name="sgd"):
        assert isinstance(n, int)
        assert name == "sgd"
        return ws - rate * xform.grad(loss)(ws, jnp.ones((n, 32)))

    planned = xform.jit(step, "budget:1MiB", static_argnums=0, static_argnames="name")
    for n, rate in ((4, 0.1), (8, 0.2), (4, 0.3)):
        assert_equal(planned(n, WS, rate=rate, name="sgd"), step(n, WS, rate=rate))


def test_a_static_argument_of_variable_position() -> None:
    def step(ws, *sizes):
        assert all(isinstance(n, int) for n in sizes)
        return ws - xform.grad(loss)(ws, jnp.ones((*sizes, 32)))

    assert_equal(xform.jit(step, static_argnums=1)(WS, 4), step(WS, 4))


def test_types_without_arrays_and_new_shapes() -> None:
    types = jax.ShapeDtypeStruct(WS.shape, WS.dtype), jax.ShapeDtypeStruct(X.shape, X.dtype)
    planned = xform.jit(sgd, "budget:1MiB")
    lowered = planned.lower(*types)
    assert "stablehlo" in lowered.as_text()
    assert lowered.compile()(WS, X)[0].shape == WS.shape
    assert planned.trace(*types).jaxpr.out_avals[0].shape == WS.shape
    first = planned.plan
    assert first.compiles > 0
    planned(WS, X)  # is planned again, and JAX has compiled all of it
    assert (planned.plan.compiles, planned.plan.compile_seconds) == (0, 0)
    assert "compiled in" not in planned.plan.summary
    assert "compile " not in str(planned.memory_analysis())
    first = planned.plan
    assert_equal(planned(WS, X[:8]), jax.jit(sgd)(WS, X[:8]))
    assert planned.plan is not first


def test_a_setting_that_changes_the_trace_plans_again() -> None:
    planned = xform.jit(sgd, "budget:1MiB")
    planned(WS, X)
    first = planned.plan
    with jax.default_matmul_precision("highest"):
        planned(WS, X)
    assert planned.plan is not first


def test_a_plan_of_a_step_is_a_policy_and_is_kept_on_disk(tmp_path: Any) -> None:
    size = int(0.8 * compiled_bytes(sgd, WS, X))
    made = xform.jit(sgd, budget(size), plans=tmp_path)
    want = made(WS, X)
    (file,) = tmp_path.iterdir()
    again = xform.jit(sgd, budget(size), plans=tmp_path)
    assert_equal(again(WS, X), want)
    assert list(tmp_path.iterdir()) == [file]
    assert again.plan.seconds == 0
    loaded = StepPlan.load(file)
    follows = xform.jit(sgd, loaded)
    assert_equal(follows(WS, X), want)
    assert follows.memory_analysis().total_bytes == made.plan.compiled_bytes
    file.write_text("{")
    assert_equal(xform.jit(sgd, budget(size), plans=tmp_path)(WS, X), want)
    with pytest.raises(OtherProgram, match="derivative that the plan does not have"):
        xform.jit(by_vjp, loaded)(WS, X)


@pytest.mark.parametrize("policy", [None, "save_nothing", "saved:100KiB", xform.policies.save_dots])
def test_other_policies_apply_to_each_derivative(policy: Any) -> None:
    explicit = lambda ws, x: ws - 0.1 * xform.grad(loss, policy=policy)(ws, x)
    given = lambda ws, x: ws - 0.1 * xform.grad(loss)(ws, x)
    want, size = jax.jit(explicit)(WS, X), compiled_bytes(explicit, WS, X)
    planned = xform.jit(given, policy)
    with counting_compilations() as compiled:
        assert_equal(planned(WS, X), want)
        (plan,) = planned.plan
        assert plan.compiled_bytes == planned.memory_analysis().total_bytes == size
        planned.lower(WS, X).compile()
        assert len(compiled) == 1
    assert abs(plan.predicted_bytes - size) < 0.02 * size
    assert plan.explain(plan.rows[0].value) in planned.explain(plan.rows[0].value)
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (WS, X)]
    assert xform.jit(given, policy, target="cpu:1").lower(*types).plan.compiled_bytes == size


def test_a_plan_of_the_derivative_is_a_policy() -> None:
    (made,) = xform.plan(xform.jit(sgd), WS, X, policy="save_nothing")
    follows = xform.jit(sgd, made)
    assert_equal(follows(WS, X), jax.jit(sgd)(WS, X))
    (plan,) = follows.plan
    assert plan.record == made.record
    assert plan.compiled_bytes == made.compiled_bytes
    with pytest.raises(OtherProgram, match="another program"):
        follows(WS[:6], X)


def test_a_budget_inside_a_step_without_one_is_ignored_with_a_warning() -> None:
    inner = xform.jit(sgd, "budget:1MiB")
    outer = xform.jit(lambda ws, x: inner(ws, x), "save_nothing")
    with pytest.warns(UserWarning, match="outermost"):
        assert_equal(outer(WS, X), jax.jit(sgd)(WS, X))


def test_derivatives_with_a_policy_of_their_own_keep_it() -> None:
    def step(ws, x):
        grads = xform.grad(loss, policy=xform.policies.save_everything)(ws, x)
        return ws - 0.1 * xform.grad(loss)(ws - grads, x)

    planned = xform.jit(step, budget(compiled_bytes(step, WS, X)))
    planned(WS, X)
    assert len(planned.plan) == 1


def test_inside_another_transformation_a_budget_is_ignored_with_a_warning() -> None:
    planned = xform.jit(sgd, "budget:1MiB")
    with pytest.warns(UserWarning, match="outermost"):
        got = jax.jit(planned)(WS, X)
    assert_equal(got, jax.jit(sgd)(WS, X))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        batched = jax.vmap(planned, (None, 0))(WS, X.reshape(2, 32, 32))
        outer = xform.jit(lambda ws, x: planned(ws, x), "budget:1MiB")
        assert_equal(outer(WS, X), jax.jit(sgd)(WS, X))
    assert_equal(batched[0], jax.vmap(sgd, (None, 0))(WS, X.reshape(2, 32, 32))[0])


def test_a_time_limit_ends_the_search_with_a_warning() -> None:
    size = int(0.5 * compiled_bytes(sgd, WS, X))
    planned = xform.jit(sgd, budget(size), time_limit=0)
    with pytest.warns(UserWarning, match="stopped at its time limit.*exceeds the budget"):
        planned(WS, X)
    assert planned.plan.compiles == 1


@pytest.fixture
def autotuning(monkeypatch: Any) -> dict[str, list[bool]]:
    """Treat the CPU as a GPU, which autotunes: the first autotuned program takes 1 GiB more.

    The result has a list with one entry for each compilation: whether it autotuned.
    """
    compiled: dict[str, list[bool]] = {"autotuned": []}
    compile_step = StepProgram.compile

    def compile_(self: Any, decisions: Any, args: Any, kwargs: Any, autotune: bool = True) -> Any:
        step = compile_step(self, decisions, args, kwargs, autotune)
        compiled["autotuned"].append(autotune)
        if compiled["autotuned"].count(True) == 1 and autotune:
            sizes = step.compilation.bytes | {"temp": 2**30}
            figures = dataclasses.replace(step.compilation, bytes=sizes)
            return dataclasses.replace(step, compilation=figures)
        return step

    monkeypatch.setattr(StepProgram, "autotunes", True)
    monkeypatch.setattr(StepProgram, "compile", compile_)
    return compiled


def test_candidates_are_not_autotuned_and_the_program_that_runs_decides(
    autotuning: dict[str, list[bool]],
) -> None:
    ws, x = jnp.ones((12, 64, 64)) / 64, jnp.ones((256, 64))
    default = jax.jit(sgd).lower(ws, x).compile().memory_analysis()
    size = default.temp_size_in_bytes + default.argument_size_in_bytes
    step = xform.jit(sgd, budget(size + default.output_size_in_bytes))
    for got, want in zip(step(ws, x), sgd(ws, x), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5)
    compiled = [*autotuning["autotuned"]]
    # The default fits, but not once it is autotuned. So another plan runs.
    free = xform.jit(sgd)
    free(ws, x)
    ((key, chosen),) = step.plan.plans.items()
    assert chosen.record != free.plan.plans[key].record
    assert compiled.count(True) == 2
    assert compiled[-1]
    assert not compiled[0]
    assert step.plan.compiles == len(compiled)


def test_a_program_that_cannot_be_autotuned_for_lack_of_memory_runs(monkeypatch: Any) -> None:
    """The device has too little free memory for autotuning: the size of the candidate stays."""
    compile_step, compiled = StepProgram.compile, list[bool]()

    def compile_(self: Any, decisions: Any, args: Any, kwargs: Any, autotune: bool = True) -> Any:
        compiled.append(autotune)
        assert len(compiled) < 5
        step = compile_step(self, decisions, args, kwargs, autotune)
        unknown = dataclasses.replace(step.compilation, bytes={}, refused="out of memory")
        return dataclasses.replace(step, compilation=unknown) if autotune else step

    monkeypatch.setattr(StepProgram, "autotunes", True)
    monkeypatch.setattr(StepProgram, "compile", compile_)
    step = xform.jit(sgd, "budget:1KiB", time_limit=0)
    with pytest.warns(UserWarning, match="stopped at its time limit.*exceeds the budget"):
        assert_equal(step(WS, X), sgd(WS, X))
    assert compiled == [False, True]


def test_a_step_whose_first_trace_differs_from_later_ones() -> None:
    traces: list[int] = []

    def step(ws: Any, x: Any) -> Any:
        traces.append(1)
        scale = 1.0 if len(traces) > 1 else jnp.cos(jnp.zeros(()))  # the same number
        return ws - 0.1 * xform.grad(lambda ws: scale * loss(ws, x))(ws)

    size = compiled_bytes(step, WS, X)
    traces.clear()
    planned, x = xform.jit(step, budget(int(0.8 * size))), jnp.asarray(X)
    with counting_compilations() as compiled:
        out = planned(WS, x)
    np.testing.assert_allclose(out, jax.jit(sgd)(WS, X)[0], rtol=1e-5)
    assert planned.plan.compiled_bytes <= 0.8 * size
    assert planned.plan.recompute_flops > 0
    # The programs of the search that met the first trace count too, and so does their time.
    assert planned.plan.compiles == len(compiled)


def test_without_verify_the_simulation_decides_and_one_program_is_compiled() -> None:
    size = int(0.8 * compiled_bytes(sgd, WS, X))
    planned = xform.jit(sgd, budget(size, verify=False))
    with counting_compilations() as compiled:
        got = planned(WS, X)
        assert len(compiled) == 1
    assert_equal(got, jax.jit(sgd)(WS, X))
    assert planned.plan.compiles == 0
    assert planned.plan.recompute_flops > 0


def test_a_budget_above_the_memory_of_the_device_is_that_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such a program would be refused by the compiler of a device that is not attached."""
    capacity = int(0.8 * compiled_bytes(sgd, WS, X))
    here = parse_target(None)
    device = dataclasses.replace(here.device, capacity_bytes=capacity)
    monkeypatch.setattr(jit, "parse_target", lambda _: dataclasses.replace(here, device=device))
    planned = xform.jit(sgd, "budget:1GiB")
    assert_equal(planned(WS, X), jax.jit(sgd)(WS, X))
    assert planned.plan.compiled_bytes <= capacity
    device = dataclasses.replace(here.device, capacity_bytes=2**16)
    with pytest.raises(BudgetInfeasible, match=r"budget\('1GiB'\)[^$]*a program may take 64.0 KiB"):
        xform.jit(sgd, "budget:1GiB")(WS, X)


def test_a_step_without_a_derivative() -> None:
    planned = xform.jit(lambda x: x + 1, "budget:1MiB")
    assert float(planned(1.0)) == 2
    assert not len(planned.plan)
    with pytest.raises(BudgetInfeasible, match="nothing to plan"):
        xform.jit(lambda x: x + 1, "budget:1KiB")(X)
    planned(X)
    exact = budget(planned.memory_analysis().total_bytes)
    np.testing.assert_array_equal(xform.jit(lambda x: x + 1, exact)(X), X + 1)


def test_plan_before_a_call_and_unsupported_jit_requests_raise() -> None:
    planned = xform.jit(sgd, "budget:1MiB")
    with pytest.raises(WrongArgument, match="call it first"):
        _ = planned.plan
    with pytest.raises(WrongArgument, match=r"lower\(\.\.\.\)"):
        xform.jit(sgd).memory_analysis()
    with pytest.raises(WrongArgument, match="lower"):
        xform.jit(sgd, "budget:1MiB", target="cpu:8")(WS, X)


def test_a_target_that_is_not_here() -> None:
    types = jax.ShapeDtypeStruct(WS.shape, WS.dtype), jax.ShapeDtypeStruct(X.shape, X.dtype)
    lowered, again = (
        xform.jit(sgd, "budget:600KiB", target="cpu:1").lower(*types) for _ in range(2)
    )
    assert (lowered.plan.compiled_bytes or 2**30) <= 600 * 2**10
    assert lowered.memory_analysis().total_bytes == lowered.plan.compiled_bytes
    with pytest.raises(WrongArgument, match="not attached"):
        lowered.compile()
    assert (again.plan.compiles, again.plan.compiled_bytes) == (0, lowered.plan.compiled_bytes)
    assert again.plan.seconds > 0


def test_plans_for_an_absent_target_are_those_of_its_backend(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The search makes plans of slices itself, so it runs where the target is planned for."""
    backends: list[str] = []

    def run(self: StepSearch) -> Any:
        backends.append(current_device().backend)
        raise OtherProgram("", "", "", "")

    monkeypatch.setattr(StepSearch, "run", run)
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (WS, X)]
    for target in ("gpu:h100", "tpu:v5e:1x1", "cpu"):
        with pytest.raises(OtherProgram):
            xform.jit(sgd, "slices:budget:1GiB", target=target).lower(*types)
    assert backends == ["gpu", "tpu", "cpu"]
