"""`plan_names`: the exported policy keeps what the plan promises, under plain JAX."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import xform
from xform.errors import BudgetInfeasible, WrongArgument
from xform.names.plain_step import KEEPS_REGIONS
from xform.terminal.text import byte_count

WIDTH, DEPTH = 64, 6
MIB = 2**20
NEWER = jax.__version_info__ >= (0, 11)


def of_type(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


WS = {
    "q": of_type(DEPTH, WIDTH, WIDTH),
    "up": of_type(DEPTH, WIDTH, 4 * WIDTH),
    "down": of_type(DEPTH, 4 * WIDTH, WIDTH),
}
X = of_type(2048, WIDTH)


def block(x, w):
    q = checkpoint_name(x @ w["q"], "query_proj")
    up = checkpoint_name(jnp.tanh(q) @ w["up"], "mlpwi")
    return x + checkpoint_name(jax.nn.gelu(up) @ w["down"], "mlpwo")


def scanned(ws, x, policy):
    layer = jax.checkpoint(block, policy=policy)
    loss = lambda ws: jnp.mean(lax.scan(lambda x, w: (layer(x, w), None), x, ws)[0] ** 2)
    return jax.grad(loss)(ws)


def unrolled(ws, x, policy):
    layer = jax.checkpoint(block, policy=policy)

    def loss(ws):
        y = x
        for i in range(DEPTH):
            y = layer(y, jax.tree.map(lambda w: w[i], ws))  # noqa: B023
        return jnp.mean(y**2)

    return jax.grad(loss)(ws)


PROGRAMS = {"scanned": scanned, "unrolled": unrolled}


def plain_bytes(f, policy, **options):
    """Return the compiled bytes under plain JAX."""
    run = functools.partial(f, policy=policy)
    compiled = jax.jit(run, compiler_options=options or None).lower(WS, X).compile()
    sizes = compiled.memory_analysis()
    ends = sizes.argument_size_in_bytes + sizes.output_size_in_bytes
    return ends + sizes.temp_size_in_bytes - sizes.alias_size_in_bytes


@pytest.fixture(scope="module", params=PROGRAMS)
def planned(request):
    """Yield a function, compiler options, and plans within three budgets."""
    f = PROGRAMS[request.param]
    options = {} if request.param == "scanned" else KEEPS_REGIONS
    least = plain_bytes(f, jax.checkpoint_policies.nothing_saveable, **options)
    names = jax.checkpoint_policies.save_only_these_names("query_proj", "mlpwi")
    most = plain_bytes(f, names, **options)
    budgets = [round(least + share * (most - least)) for share in (0.1, 0.5, 1.0)]
    plans = [
        xform.plan_names(f, WS, X, policy=xform.policies.budget(n), free=False,
                         compiler_options=options or None)
        for n in budgets
    ]  # fmt: skip
    return f, options, budgets, plans


def test_the_exported_policy_takes_the_promised_bytes(planned) -> None:
    f, options, budgets, plans = planned
    for budget, plan in zip(budgets, plans, strict=True):
        space = {"layer": lambda x: x}
        exec(plan.as_code(), space)
        for policy in (plan.checkpoint_policy(), space["policy"]):
            assert plain_bytes(f, policy, **options) == pytest.approx(plan.compiled_bytes, rel=0.02)
        assert plan.compiled_bytes <= budget


def test_a_larger_budget_recomputes_less(planned) -> None:
    *_, plans = planned
    work = [plan.recompute_flops for plan in plans]
    assert work == sorted(work, reverse=True)
    assert work[0] > work[-1] == 0
    assert set(plans[-1].saved) == {"query_proj", "mlpwi"}  # the backward pass reads no `mlpwo`
    assert plans[0].saved == () or plans[0].recompute_flops < plans[0].nothing.recompute_flops


def test_the_recomputed_flops_are_those_of_the_products(planned) -> None:
    *_, plans = planned
    products = 2 * X.shape[0] * WIDTH * WIDTH * DEPTH
    assert plans[-1].nothing.recompute_flops == 5 * products  # q, and four times as much for up


def test_the_summary_compares_with_the_free_plan() -> None:
    plan = xform.plan_names(scanned, WS, X, policy="budget:20MiB")
    assert plan.free is not None
    assert plan.free.compiled_bytes <= 20 * MIB
    assert "the restriction to names: it recomputes" in plan.summary
    assert plan.summary in str(plan)
    assert not xform.is_installed()


def test_a_library_that_marks_its_layers() -> None:
    """`RegionPolicy` puts the policy into regions that have none."""

    def marked(ws, x):
        layer = jax.checkpoint(block)
        return jnp.mean(lax.scan(lambda x, w: (layer(x, w), None), x, ws)[0] ** 2)

    def gradient(ws, x, policy):
        return jax.grad(xform.passes.RegionPolicy(policy)(marked))(ws, x)

    budget = "budget:24MiB"
    plan = xform.plan_names(gradient, WS, X, policy=budget, free=False)
    direct = xform.plan_names(scanned, WS, X, policy=budget, free=False)
    assert plan.names == direct.names
    assert plain_bytes(scanned, plan.checkpoint_policy()) == plan.compiled_bytes


def test_a_jitted_step_with_an_optimizer_and_donation() -> None:
    def step(ws, momentum, x, policy):
        grads = scanned(ws, x, policy)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
        return jax.tree.map(lambda w, m: w - 0.1 * m, ws, momentum), momentum

    plan = xform.plan_names(step, WS, WS, X, policy="budget:24MiB", donate_argnums=(0, 1),
                            free=False)  # fmt: skip
    jitted = jax.jit(step, static_argnames="policy", donate_argnums=(0, 1))
    again = xform.plan_names(jitted, WS, WS, X, policy="budget:24MiB", free=False)
    assert (plan.names, plan.compiled_bytes) == (again.names, again.compiled_bytes)
    with pytest.raises(WrongArgument, match=r"give the options to jax\.jit"):
        xform.plan_names(jitted, WS, WS, X, policy="budget:24MiB", donate_argnums=0)


def test_a_budget_that_no_set_fits_names_the_lowest_peak() -> None:
    with pytest.raises(BudgetInfeasible, match=r"xform\.jit") as error:
        xform.plan_names(scanned, WS, X, policy="budget:1MiB", free=False)
    least = plain_bytes(scanned, jax.checkpoint_policies.nothing_saveable)
    assert error.value.floor_bytes == pytest.approx(least, rel=0.02)


@pytest.mark.skipif(NEWER, reason="XLA keeps jax.checkpoint there")
def test_unrolled_layers_on_a_cpu_need_an_option_which_the_error_names() -> None:
    with pytest.raises(BudgetInfeasible, match="cse_barrier_expander"):
        xform.plan_names(unrolled, WS, X, policy="budget:16MiB", free=False)


def gradient_of(f):
    return lambda ws, x, policy: jax.grad(lambda ws: jnp.mean(f(ws, x, policy)))(ws)


def no_region(ws, x, policy):
    return block(x, jax.tree.map(lambda w: w[0], ws))


def other_region(ws, x, policy):
    return jax.checkpoint(no_region, static_argnums=2)(ws, x, 0)


def no_names(ws, x, policy):
    return jax.checkpoint(lambda ws: jnp.sin(x @ ws["q"][0]), policy=policy)(ws)


MISTAKES = {
    "no region": (gradient_of(no_region), "no remat region", "jax.checkpoint(layer, policy="),
    "no policy": (gradient_of(other_region), "do not get this policy", "RegionPolicy"),
    "no names": (gradient_of(no_names), "no value in its remat regions", "checkpoint_name"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_missing_regions_policies_or_names_raise_with_a_remedy(mistake: str) -> None:
    f, problem, remedy = MISTAKES[mistake]
    with pytest.raises(WrongArgument) as error:
        xform.plan_names(f, WS, X, policy="budget:1GiB")
    assert problem in error.value.problem
    assert remedy in error.value.remedy
    assert "test_plan_names.py" in error.value.where


@pytest.mark.parametrize("policy", ["save_dots", "saved:1GiB", None])
def test_only_budgets_of_the_peak_are_accepted(policy) -> None:
    with pytest.raises(WrongArgument, match="no budget of the peak"):
        xform.plan_names(scanned, WS, X, policy=policy)


def test_a_step_needs_the_parameter() -> None:
    def other_name(ws, x, remat):
        return scanned(ws, x, remat)

    with pytest.raises(WrongArgument, match="has no parameter 'policy'") as error:
        xform.plan_names(other_name, WS, X, policy="budget:1GiB")
    assert "lambda *args, policy: other_name(*args, other=policy)" in error.value.remedy
    renamed = lambda *args, policy: other_name(*args, remat=policy)
    plan = xform.plan_names(renamed, WS, X, policy="budget:1GiB", free=False)
    assert plan.compiled_bytes < 2**30


def test_the_budget_is_kept_in_bytes() -> None:
    plan = xform.plan_names(scanned, WS, X, policy="budget:30MiB", free=False)
    assert plan.budget_bytes == byte_count("30MiB")


def test_a_second_budget_compiles_only_new_sets() -> None:
    def gradient(ws, x, policy):
        return scanned(ws, x, policy)

    plan_within = lambda n: xform.plan_names(
        gradient, WS, X, policy=xform.policies.budget(n), free=False
    )
    first = plan_within(24 * MIB)
    again = plan_within(24 * MIB)
    assert first.compiles > again.compiles == 0
    assert (first.names, first.compiled_bytes) == (again.names, again.compiled_bytes)


def test_another_function_with_the_same_forward_pass_is_planned_for_itself() -> None:
    """Its second half saves everything under each policy."""

    def gradient(ws, x, policy):
        layer = jax.checkpoint(block, policy=policy)
        other = jax.checkpoint(block, policy=jax.checkpoint_policies.everything_saveable)

        def loss(ws):
            first, second = (jax.tree.map(lambda w: w[i : i + 3], ws) for i in (0, 3))  # noqa: B023
            y = lax.scan(lambda x, w: (layer(x, w), None), x, first)[0]
            return jnp.mean(lax.scan(lambda x, w: (other(x, w), None), y, second)[0] ** 2)

        return jax.grad(loss)(ws)

    plan = xform.plan_names(gradient, WS, X, policy="budget:1GiB", free=False)
    assert plain_bytes(gradient, plan.checkpoint_policy()) == plan.compiled_bytes
