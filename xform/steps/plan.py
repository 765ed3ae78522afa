"""`plan`: decide which values the backward pass saves, for a loss or for a training step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, overload

from xform.errors import WrongArgument
from xform.introspection.callables import definition_site, function_name
from xform.planner.plan.plan import Plan
from xform.steps.step import TrainingStep, is_step, refuse_loss_options
from xform.steps.step_plan import StepPlan
from xform.terminal import progress_line
from xform.transforms.function import Tree
from xform.transforms.loss_plan import plan_loss


@overload
def plan(  # pyright: ignore[reportOverlappingOverload]
    f: TrainingStep,
    *args: Tree,
    policy: Any = None,
    argnums: int | Sequence[int] | None = 0,
    has_aux: bool = False,
    target: str | None = None,
    donate_argnums: int | Sequence[int] = (),
    verify: bool = True,
) -> StepPlan: ...


@overload
def plan(
    f: Callable[..., Any],
    *args: Tree,
    policy: Any = None,
    argnums: int | Sequence[int] | None = 0,
    has_aux: bool = False,
    target: str | None = None,
    donate_argnums: int | Sequence[int] = (),
    verify: bool = True,
) -> Plan: ...


def plan(
    f: Any,
    *args: Tree,
    policy: Any = None,
    argnums: int | Sequence[int] | None = 0,
    has_aux: bool = False,
    target: str | None = None,
    donate_argnums: int | Sequence[int] = (),
    verify: bool = True,
) -> Any:
    """Decide which values the backward pass of `f` saves, and compile it to measure its memory.

    Args:
      f: a loss, or a training step. A step is a function that `xform.jit`, `xform.flax.jit` or
        `xform.equinox.filter_jit` returns; it takes derivatives itself, without `policy=`. Any
        other function is a loss: a pure function of pytrees of arrays, as for `grad`, or of Flax
        NNX modules, as for `xform.flax.grad`. `plan` compiles the whole step, or the `grad` of the
        loss. If the loss returns more than a scalar, or with `argnums=None`, it compiles both parts
        of `vjp` instead.
      *args: arrays, or `jax.ShapeDtypeStruct`s in pytrees; nothing is run or allocated. Dimensions
        may be symbolic, as for `jax.export`. The plan then applies to all sizes. Its bytes are
        those of one size for each symbol, which the plan names: 128, or the size in a budget, such
        as `budget("8GiB", symbolic={"b": 64})`.
      policy: a policy of `xform.policies` or `jax.checkpoint_policies`, or its text, such as
        "save_dots" or "auto", which fits the target's memory. None is the policy of the step, or
        `min_cut` for a loss. A budget limits the bytes on each device. On a mesh of explicit axes,
        types say how values are sharded. On a mesh of `Auto` axes only the compiler knows, so a
        plan that is not compiled counts values with their unsharded sizes.
      argnums: for a loss, the position or positions of the arguments to differentiate, as for
        `grad`, or an `nnx.DiffState`, as for `xform.flax.grad`; None is every argument, as for
        `vjp`.
      has_aux: for a loss, whether it returns a pair `(output, auxiliary)`; the second is not
        differentiated.
      target: the device to plan and compile for, such as "cpu", "tpu:v5e:1x1" or "gpu:h100",
        attached or not; None is the target of the step, or JAX's default backend for a loss.
        `python -m xform doctor` lists the names.
      donate_argnums: for a loss, positions of the arguments whose memory the compiled function may
        reuse, as for `jax.jit`.
      verify: whether to compile. For a budget of the peak, `plan` compiles at most seven plans, the
        default included (eight before it raises BudgetInfeasible), and returns one whose compiled
        bytes fit. No plan is compiled twice, and earlier compilations change no plan.

    Returns:
      For a loss, a `Plan`: a table of the saved, recomputed and offloaded values, with totals, and
      with simulated and compiled bytes. It is also a policy: `xform.grad(f, policy=plan)` follows
      it when compiled.

      For a step, a `StepPlan`, which has a `Plan` for each derivative that the step takes without
      `policy=`. The bytes are those of the step. It is also a policy: `xform.jit(step, plan)`
      follows it, and searches for nothing.

    Raises:
      BudgetInfeasible: no plan was found that fits. The error's `floor_bytes` is the lowest peak
        found, measured by the compiler with `verify`, else simulated.
      WrongArgument: `f`, `argnums`, `policy` or `target` is unusable; or a step takes no derivative
        without a policy of its own.
      MissingExtra: a package that compiles for the target is not installed.
      CompilationFailed: the target's compiler failed.

    Cost: one trace of `f` and its derivatives, the search for a plan, and one compilation; for a
    budget of the peak, as many compilations as under `verify`.

    >>> def loss(w, x):
    ...     step = lambda h, w: (jnp.sin(h @ w), None)
    ...     return jax.lax.scan(step, x, w)[0].sum()
    >>> w = jax.ShapeDtypeStruct((12, 64, 64), jnp.float32)
    >>> x = jax.ShapeDtypeStruct((32, 64), jnp.float32)
    >>> small = xform.plan(loss, w, x,
    ...                    policy="saved:100KiB", verify=False)
    >>> [(row.value, row.decision, row.loops) for row in small]
    [('scan.0/carry.0', 'SAVE', (12,)), ('scan.0/cos.2', 'RECOMPUTE', (12,))]
    >>> small.saved_bytes
    98304

    A training step, where the peak includes the optimizer's state:

    >>> def update(w, momentum, x):
    ...     momentum = 0.9 * momentum + xform.grad(loss)(w, x)
    ...     return w - 0.1 * momentum, momentum
    >>> step = xform.jit(update, donate_argnums=(0, 1))
    >>> least = xform.plan(step, w, w, x, policy="budget:750KiB")
    >>> least.compiled_bytes <= 750 * 2**10
    True
    """
    if not is_step(f):
        return plan_loss(f, args, policy, argnums, has_aux, target, donate_argnums, verify)
    refuse_loss_options(f, "plan", argnums=argnums != 0, has_aux=has_aux)
    if donate_argnums != ():
        raise WrongArgument(
            f"plan of {function_name(f)}, a function of xform.jit, with donate_argnums=",
            "the function is jitted already, with its own options",
            definition_site(f),
            "give donate_argnums to xform.jit",
        )
    with progress_line.show(f"planning {function_name(f)}"):
        made = f.under(policy, target, verify).lower(*args).bounded_plan(verify)
    if made.plans:
        return made
    raise WrongArgument(
        f"plan of {function_name(f)}",
        "the step takes no derivative without a policy of its own, so there is nothing to plan",
        definition_site(f),
        "differentiate in the step with xform.grad, without policy= (xform.install() replaces "
        "jax.grad); or pass a loss, without xform.jit",
    )
