"""The rules of calls: `jit`, remat regions (`jax.checkpoint`), and other calls of a program.

A small jitted function (most of `jax.numpy`) is inlined: the planner decides about each value in
its body. A large one stays a call. It is analyzed once and compiled once, however often it is
called. A remat region always stays a call, because its own policy decides which values in it are
saved.

The *Joint* of a body is its forward and backward pass, traced as one program. A *schedule* says
which values of the forward pass are saved. A call that stays a call becomes a *Node*, which runs
its two passes: `forward` returns outputs and a *token* (the saved values); `backward` returns the
derivatives, from the token and the *seeds* (cotangents of the outputs, or for `linearize` tangents
of the inputs). The base classes `Structured` and `Node` describe all methods
(`xform.interpret.node`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from xform._jax import (
    JaxprEqn,
    is_inlined,
    jaxpr_and_consts,
    jit,
    match_weak_type,
    primitives,
    staging,
)
from xform._jax.mutable import is_mutable
from xform.errors import NotDifferentiable, XformError
from xform.interpret import emit
from xform.interpret.absent import reduced_joint
from xform.interpret.joint import Joint, analyze, will_be_compiled
from xform.interpret.jvp import jvp
from xform.interpret.node import Node, Schedules, Structured, gather, spread
from xform.interpret.pullback import pullback
from xform.passes.structured import called_body, chosen_sharding, has_shardings, plain_call_body
from xform.program.arithmetic import Value, as_jax_values
from xform.program.flow import BodyFunction, Flow
from xform.program.hijax import lower_all
from xform.program.ir import Mask, Program, evaluate, lift_constants, program, trace
from xform.program.source import frame
from xform.registry.table import declare
from xform.registry.traits import Traits

# In a traced program, a call of a body with this many equations stays a call. If operations run one
# by one, all calls of jitted functions stay calls.
_LARGE = 48


def size(prog: Program) -> int:
    """Return the number of equations of a program. A nested call counts as its body's equations."""
    if "size" not in prog.cache:
        prog.cache["size"] = sum(
            1 if (inner := plain_call_body(e)) is None else size(inner) for e in prog.equations
        )
    return prog.cache["size"]


class CallNode(Node):
    """The forward and backward pass of a call. Subclasses run them jitted or traced."""

    joint: Joint

    def __init__(self, eqn: JaxprEqn, joint: Joint, push: bool):
        super().__init__(eqn, [joint], joint.seeded, joint.results, push)
        self.joint = joint

    def reads(self, schedules: Schedules) -> Mask:
        return schedules[0].reads

    def dependent_results(self, given: Mask) -> Mask:
        return reduced_joint(self.joint, given).present_results

    def forward(self, schedules: Schedules, xs: Sequence[Value], used: Mask):
        return emit.forward(schedules[0], xs, used)

    def backward(self, schedules: Schedules, token: Any, xs: Sequence[Value],
                 seeds: Sequence[Value], together: bool) -> list[Value]:  # fmt: skip
        return emit.backward(schedules[0], token, xs, seeds, together)


class _JitNode(CallNode):
    """Two jitted functions, made once for each schedule: 16 calls of a layer compile once."""

    def forward(self, schedules: Schedules, xs: Sequence[Value], used: Mask):
        def run(xs: list[Value]) -> tuple[list[Value], Any]:
            outs, saved = emit.forward(schedules[0], xs, used)
            return gather(outs, used), saved

        options = self._shardings(used)
        outs, saved = self._jitted(schedules[0], "forward", used, run, **options)(list(xs))
        return spread(outs, used), saved

    def backward(self, schedules: Schedules, token: Any, xs: Sequence[Value],
                 seeds: Sequence[Value], together: bool) -> list[Value]:  # fmt: skip
        def run(token: Any, xs: list[Value], seeds: list[Value]) -> list[Value]:
            return emit.backward(schedules[0], token, xs, seeds, together)

        return self._jitted(schedules[0], "backward", together, run)(token, list(xs), list(seeds))

    def _jitted(self, schedule: Any, part: str, variant: Any, run: Any, **options: Any) -> Any:
        """Return `run` as a jitted function. It is made once for each schedule, part and variant.

        `part` is "forward" or "backward".
        """
        if (part, variant) not in schedule.cache:
            run.__name__ = f"{self.eqn.params['name']}_{part}"
            schedule.cache[part, variant] = jit(run, **options)
        return schedule.cache[part, variant]

    def _shardings(self, used: Mask) -> dict[str, Any]:
        """Return options of `jax.jit` for the forward part: the user's shardings, if any."""
        if not has_shardings(self.eqn):
            return {}
        params = self.eqn.params
        outs = gather([chosen_sharding(s) for s in params["out_shardings"]], used)
        return {
            "in_shardings": ([chosen_sharding(s) for s in params["in_shardings"]],),
            "out_shardings": (outs, None),
        }


class Jit(Structured):
    """The rule of `jit`: a small one is inlined, a large one becomes a pair of jitted calls."""

    takes_python_numbers = True

    def rebuild(self, eqn: JaxprEqn, xs: Sequence[Value], functions: Sequence[BodyFunction],
                each: Any = None) -> tuple[list[Value], Any]:  # fmt: skip
        options = {k: eqn.params[k] for k in ("inline", "keep_unused")}
        if has_shardings(eqn):
            ins, outs = ([chosen_sharding(s) for s in eqn.params[f"{side}_shardings"]]
                         for side in ("in", "out"))  # fmt: skip
            options |= {"in_shardings": (ins, None), "out_shardings": (outs, None)}
        return jit(functions[0], **options)(list(xs), each)

    def inlined(self, eqn: JaxprEqn, staged: bool) -> Program | None:
        if not staged or has_shardings(eqn):
            return None
        prog = called_body(eqn)
        return prog if is_inlined(eqn.params) or size(prog) < _LARGE else None

    def jvp_of(self, eqn: JaxprEqn, xs: Sequence[Value], dxs: Sequence[Value], wanted: Mask):
        on = tuple([dx is not None for dx in dxs])
        seeds = gather(dxs, on)
        types = tuple(map(jax.typeof, seeds))
        options = tuple(map(eqn.params.get, _OPTIONS))
        key, cache = ("jvp", wanted, on, types, options), called_body(eqn).cache
        if key not in cache:
            cache[key] = _staged_jvp(eqn, on, types, wanted)
        params, has_tangent, run = cache[key]
        # During a trace, binding the primitive is faster than calling a jitted function. Outside a
        # trace it is slower.
        if staging() or has_shardings(eqn):
            outs = eqn.primitive.bind(*xs, *seeds, **params)
        else:
            outs = run(*xs, *seeds)
        return outs[: len(wanted)], spread(outs[len(wanted) :], has_tangent)

    def vjp(self, eqn: JaxprEqn, xs: Sequence[Value], active: Mask, wanted: Mask):
        xs = as_jax_values(xs)
        inlined = self.inlined(eqn, will_be_compiled()) is not None
        # A Node would lose the logs of users' backward functions in its body (`interpret.logs`). So
        # such a body is inlined. This `analyze` costs nothing extra: it is cached, and a Node needs
        # it too.
        if inlined or (not has_shardings(eqn) and analyze(called_body(eqn), active, wanted).logs):
            return pullback(called_body(eqn), active, wanted, xs)
        return super().vjp(eqn, xs, active, wanted)

    def transposed(self, eqn: JaxprEqn, xs: Sequence[Value], active: Mask, wanted: Mask):
        if (body := self.inlined(eqn, True)) is None:
            return super().transposed(eqn, xs, active, wanted)
        return pullback(body, active, wanted, as_jax_values(xs), linear=True)

    def split(self, eqn: JaxprEqn, xs: Sequence[Value], dxs: Sequence[Value], wanted: Mask):
        xs, dxs = as_jax_values(xs), _weak_as(dxs, called_body(eqn).in_avals)
        if self.inlined(eqn, will_be_compiled()):
            return jvp(called_body(eqn), xs, dxs, split=True, wanted=wanted)
        return super().split(eqn, xs, dxs, wanted)

    def node(self, eqn: JaxprEqn, active: Mask, wanted: Mask, push: bool) -> Node:
        return _JitNode(eqn, analyze(called_body(eqn), active, wanted, push), push)


def _weak_as(dxs: Sequence[Value], avals: Sequence[Any]) -> list[Value]:
    """Return the tangents of a body's inputs, with the weak types of the inputs, as in JAX."""
    pairs = zip(dxs, avals, strict=True)
    return [None if dx is None else match_weak_type(dx, aval) for dx, aval in pairs]


def _staged_jvp(eqn: JaxprEqn, on: Mask, types: Sequence[Any], wanted: Mask
                ) -> tuple[dict[str, Any], Mask, Callable[..., list[Value]]]:  # fmt: skip
    """Trace the jvp of a jit. A tangent has the sharding and the weak type of its primal.

    `on` says which inputs have a tangent, and `types` has the types of these tangents.

    Returns:
      The parameters of a jit equation that computes the jvp, a mask of the outputs that have a
      tangent, and the jvp as a jitted function.
    """
    prog, has_tangent = called_body(eqn), []

    def push(*args: Value) -> list[Value]:
        dxs = _weak_as(spread(args[len(on) :], on), prog.in_avals)
        ys, dys = jvp(prog, args[: len(on)], dxs, wanted=wanted)
        has_tangent[:] = [dy is not None for dy in dys]
        return [*ys, *gather(dys, tuple(has_tangent))]

    push.__name__ = f"{eqn.params['name']}_jvp"
    try:
        jaxpr = jax.make_jaxpr(push)(*prog.in_avals, *types)
    except XformError as error:
        if error.where:
            raise
        raise error.at(frame(eqn)) from None  # JAX cuts tracebacks at the start of a trace
    params: dict[str, Any] = {**eqn.params, "jaxpr": jaxpr, "name": push.__name__}
    params["donated_invars"] = (False,) * (len(on) + len(types))
    for end, mask in (("in", on), ("out", has_tangent)):
        for name in (f"{end}_shardings", f"{end}_layouts"):
            params[name] = (*params[name], *gather(params[name], mask))
    return params, tuple(has_tangent), jit(lambda *args: evaluate(program(jaxpr), args))


class InlineCall(Jit):
    """The rule of calls that are always replaced by their body."""

    def derivative_flow(self, eqn: JaxprEqn) -> Flow | None:
        return self.flow(eqn)

    def rebuild(self, eqn: JaxprEqn, xs: Sequence[Value], functions: Sequence[BodyFunction],
                each: Any = None) -> tuple[list[Value], Any]:  # fmt: skip
        return functions[0](list(xs), each)

    def inlined(self, eqn: JaxprEqn, staged: bool) -> Program | None:
        return called_body(eqn)

    def jvp_of(self, eqn: JaxprEqn, xs: Sequence[Value], dxs: Sequence[Value], wanted: Mask):
        return jvp(called_body(eqn), xs, dxs, wanted=wanted)


class RegionNode(CallNode):
    """The forward and backward pass of a remat region.

    The region's own policy decides which values in it are saved. Its recomputed operations wait at
    a barrier for cotangents, unless JAX's option `prevent_cse` is False. Then the compiler may
    merge them with the forward pass.
    """

    region = True

    def __init__(self, eqn: JaxprEqn, joint: Joint, push: bool, policy: Any, prevent_cse: Any):
        super().__init__(eqn, joint, push)
        self.policy = policy or _save_nothing
        self.prevent_cse = prevent_cse

    def forward(self, schedules: Schedules, xs: Sequence[Value], used: Mask):
        run = lambda xs: emit.forward(schedules[0], xs, used)
        return _run_traced(schedules[0], ("forward", used), run, list(xs))

    def backward(self, schedules: Schedules, token: Any, xs: Sequence[Value],
                 seeds: Sequence[Value], together: bool) -> list[Value]:  # fmt: skip
        together = together and self.prevent_cse is not False
        run = lambda token, xs, seeds: emit.backward(schedules[0], token, xs, seeds, together)
        return _run_traced(schedules[0], ("backward", together), run, token, list(xs), list(seeds))


def _run_traced(schedule: Any, key: Any, f: Callable[..., Any], *args: Any) -> Any:
    """Call `f` on pytrees. Outside `jit`, trace it first, so that its loops are compiled once.

    The traced program is cached on the schedule, by `key` and the types of the arguments.
    """
    if staging():
        return f(*args)
    leaves, tree = jax.tree.flatten(args)
    types = tuple(map(jax.typeof, leaves))
    key = (key, tree, types)
    if key not in schedule.cache:
        out_trees: list[Any] = []

        def flat(*leaves: Value) -> list[Value]:
            ys, out_tree = jax.tree.flatten(f(*tree.unflatten(leaves)))
            out_trees.append(out_tree)
            return ys

        schedule.cache[key] = trace(flat, *types), out_trees[0]
    prog, out_tree = schedule.cache[key]
    return out_tree.unflatten(evaluate(prog, leaves))


def remat_region_of(
    jaxpr: Any, args: Sequence[Value], policy: Any, prevent_cse: bool | tuple[bool, ...]
):
    """Run a jaxpr as a remat region. Values that it closes over become arguments of the region."""
    opened, consts = jaxpr_and_consts(jaxpr)
    if any(is_mutable(jax.typeof(x)) for x in consts):
        raise NotDifferentiable(
            "checkpoint of a function that closes over a mutable value",
            "the recompute would write to it a second time",
            "",
            "pass its contents, return what the function writes, or drop checkpoint",
        )
    if consts:
        prog = program(jaxpr)
        if "lifted" not in prog.cache:
            lifted, _ = lift_constants(prog)
            lifted_jaxpr = jax.make_jaxpr(lambda *xs: evaluate(lifted, xs))(*lifted.in_avals)
            prog.cache["lifted"] = jaxpr_and_consts(lifted_jaxpr)[0]
        opened = prog.cache["lifted"]
        if isinstance(prevent_cse, tuple):
            prevent_cse = (*(False,) * len(consts), *prevent_cse)
    return _REMAT.bind(*consts, *args, jaxpr=_with_primitives(opened), prevent_cse=prevent_cse,
                       policy=policy, differentiated=False)  # fmt: skip


def _with_primitives(jaxpr: Any) -> Any:
    """Return a region's jaxpr with primitives in place of operation objects (`program.hijax`).

    JAX's policies recognize a checkpoint name only if it is a primitive.
    """
    cache = program(jaxpr).cache
    if "lowered" not in cache:
        lowered = lower_all(jaxpr)
        cache["lowered"] = None if lowered is jaxpr else lowered  # a cache must not hold its owner
    return cache["lowered"] or jaxpr


def _save_nothing(*_: Any, **__: Any) -> bool:
    """Return the policy of a region without a policy: as in JAX, it saves nothing."""
    return False


class Remat(Structured):
    """The rule of remat regions, made by `jax.checkpoint` or `xform.checkpoint`."""

    def rebuild(self, eqn: JaxprEqn, xs: Sequence[Value], functions: Sequence[BodyFunction],
                each: Any = None) -> tuple[list[Value], Any]:  # fmt: skip
        (function,) = functions
        if eqn.params["differentiated"]:  # JAX lowers such a region with an optimization barrier
            return function(lax.optimization_barrier(list(xs)), each)
        leaves, tree = jax.tree.flatten((list(xs), each))
        out_trees: list[Any] = []

        def of_leaves(*leaves: Value) -> list[Value]:
            results, out_tree = jax.tree.flatten(function(*tree.unflatten(leaves)))
            out_trees.append(out_tree)
            return results

        jaxpr = jax.make_jaxpr(of_leaves)(*map(jax.typeof, leaves))
        prevent_cse = eqn.params["prevent_cse"]
        if not isinstance(prevent_cse, bool) and len(prevent_cse) != len(leaves):
            prevent_cse = True
        outs = remat_region_of(jaxpr, leaves, eqn.params["policy"], prevent_cse)
        return out_trees[0].unflatten(outs)

    def jvp(self, eqn: JaxprEqn, xs: Sequence[Value], dxs: Sequence[Value]):
        on = tuple(dx is not None for dx in dxs)
        args = [*xs, *gather(dxs, on)]
        types, cache = tuple(map(jax.typeof, args)), called_body(eqn).cache
        if ("jvp", on, types) not in cache:
            cache["jvp", on, types] = self._jvp_jaxpr(called_body(eqn), on, types)
        jaxpr, has_tangent = cache["jvp", on, types]
        prevent = eqn.params["prevent_cse"]
        prevent = prevent if isinstance(prevent, bool) else True
        out = remat_region_of(jaxpr, args, eqn.params["policy"], prevent)
        n = len(eqn.outvars)
        return out[:n], spread(out[n:], has_tangent)

    def _jvp_jaxpr(self, prog: Program, on: Mask, types: Sequence[Any]) -> tuple[Any, Mask]:
        """Return a jaxpr that computes the jvp of a region, and which outputs have a tangent.

        `on` says which inputs have a tangent. `types` has the types of inputs and tangents.
        """
        has_tangent: list[bool] = []

        def run(*args: Value) -> list[Value]:
            ys, dys = jvp(prog, args[: len(on)], spread(args[len(on) :], on))
            has_tangent[:] = [dy is not None for dy in dys]
            return [*ys, *gather(dys, has_tangent)]

        return jax.make_jaxpr(run)(*types), tuple(has_tangent)

    def vjp(self, eqn: JaxprEqn, xs: Sequence[Value], active: Mask, wanted: Mask):
        if eqn.params["differentiated"]:  # the recompute in a derivative that JAX made
            return pullback(called_body(eqn), active, wanted, lax.optimization_barrier(tuple(xs)))
        return super().vjp(eqn, xs, active, wanted)

    def node(self, eqn: JaxprEqn, active: Mask, wanted: Mask, push: bool) -> Node:
        joint = analyze(called_body(eqn), active, wanted, push)
        return RegionNode(eqn, joint, push, eqn.params["policy"], eqn.params["prevent_cse"])


_REMAT = primitives()["remat2"]

# The parameters that describe the call of a jit equation.
_OPTIONS = (
    "in_shardings", "out_shardings", "in_layouts", "out_layouts", "donated_invars", "ctx_mesh",
    "name", "keep_unused", "inline", "compiler_options_kvs",
)  # fmt: skip
declare(Jit, "jit", "structured", (), Traits(call="jaxpr"), supported_params=("jaxpr", *_OPTIONS))
declare(Remat, "remat2", "structured", (),
        Traits(call="jaxpr", calls="region", pure=False),
        supported_params=("jaxpr", "prevent_cse", "differentiated", "policy"))  # fmt: skip
for _name in ("closed_call", "core_call", "core_closed_call"):
    declare(InlineCall, _name, "structured", (), Traits(call="call_jaxpr"),
            supported_params=("call_jaxpr", "name"))  # fmt: skip
declare(InlineCall, "eval_jaxpr", "structured", (), Traits(call="jaxpr"),
        supported_params=("jaxpr", "call_jaxpr"))  # fmt: skip
# The forward function of a custom_vjp with `optimize_remat`.
declare(InlineCall, "remat_opt", "structured", (),
        Traits(call="fwd_jaxpr", calls="custom"),
        supported_params=("fwd_jaxpr", "fun_jaxpr_thunk", "num_consts", "num_res"))  # fmt: skip
