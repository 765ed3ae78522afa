"""Calls: jit, remat regions and the like.

A small jitted function (most of `jax.numpy`) is inlined, so that a schedule sees through it. A
large one stays a call: it is analyzed once however often it is called, and the compiler compiles it
once. A remat region is always a node, because its own policy decides inside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from xform._jax import JaxprEqn, closed, inlines, primitives, staging, weak_as
from xform._jax.mutable import is_mutable
from xform.errors import NotDifferentiable, XformError
from xform.interpret import emit
from xform.interpret.absent import reduced_joint
from xform.interpret.activity import path
from xform.interpret.joint import Joint, analyze, will_be_compiled
from xform.interpret.jvp import jvp
from xform.interpret.node import Node, Schedules, Structured, gather, spread
from xform.interpret.pullback import pullback
from xform.passes.structured import called_body, chosen_sharding, has_shardings, plain_call_body
from xform.program.arithmetic import Value, as_jax_values
from xform.program.hijax import lower_all
from xform.program.ir import Mask, Program, evaluate, lift_constants, program, trace
from xform.program.source import frame
from xform.registry.table import declare
from xform.registry.traits import Traits

# In a traced program, a body with this many equations stays a function of its own. If operations
# run one by one, every call that the user compiles stays a call.
_LARGE = 48


def size(prog: Program) -> int:
    """Return the number of equations, including those of nested calls."""
    if "size" not in prog.cache:
        prog.cache["size"] = sum(
            1 if (inner := plain_call_body(e)) is None else size(inner) for e in prog.equations
        )
    return prog.cache["size"]


class CallNode(Node):
    """A call whose forward and backward parts are calls."""

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
    """A call whose parts are jitted once for each schedule: 16 calls of a layer compile once."""

    def forward(self, schedules: Schedules, xs: Sequence[Value], used: Mask):
        def run(xs: list[Value]) -> tuple[list[Value], Any]:
            outs, kept = emit.forward(schedules[0], xs, used)
            return gather(outs, used), kept

        outs, kept = self._jitted(schedules[0], "forward", used, run, **self._places(used))(
            list(xs)
        )
        return spread(outs, used), kept

    def backward(self, schedules: Schedules, token: Any, xs: Sequence[Value],
                 seeds: Sequence[Value], together: bool) -> list[Value]:  # fmt: skip
        def run(token: Any, xs: list[Value], seeds: list[Value]) -> list[Value]:
            return emit.backward(schedules[0], token, xs, seeds, together)

        return self._jitted(schedules[0], "backward", together, run)(token, list(xs), list(seeds))

    def _jitted(self, schedule: Any, part: str, kind: Any, run: Any, **options: Any) -> Any:
        """Return a part of a schedule as a jitted function, made once for each `kind`."""
        if (part, kind) not in schedule.cache:
            run.__name__ = f"{self.eqn.params['name']}_{part}"
            schedule.cache[part, kind] = jax.jit(run, **options)
        return schedule.cache[part, kind]

    def _places(self, used: Mask) -> dict[str, Any]:
        """Return the shardings of the forward part, for a jit that has some."""
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

    def active(self, eqn: JaxprEqn, active: Mask) -> Mask:
        return path(called_body(eqn), active).outputs

    def useful(self, eqn: JaxprEqn, active: Mask, wanted: Mask) -> Mask:
        return path(called_body(eqn), active, wanted).inputs

    def inlined(self, eqn: JaxprEqn, staged: bool) -> Program | None:
        if not staged or has_shardings(eqn):
            return None
        prog = called_body(eqn)
        return prog if inlines(eqn.params) or size(prog) < _LARGE else None

    def jvp_of(self, eqn: JaxprEqn, xs: Sequence[Value], dxs: Sequence[Value], wanted: Mask):
        on = tuple([dx is not None for dx in dxs])
        seeds = gather(dxs, on)
        types = tuple(map(jax.typeof, seeds))
        options = tuple(map(eqn.params.get, _OPTIONS))
        key, cache = ("jvp", wanted, on, types, options), called_body(eqn).cache
        if key not in cache:
            cache[key] = _staged_jvp(eqn, on, types, wanted)
        params, moving, run = cache[key]
        # Staging a jit is faster than calling a jitted function. Outside a trace it is slower.
        if staging() or has_shardings(eqn):
            outs = eqn.primitive.bind(*xs, *seeds, **params)
        else:
            outs = run(*xs, *seeds)
        return outs[: len(wanted)], spread(outs[len(wanted) :], moving)

    def vjp(self, eqn: JaxprEqn, xs: Sequence[Value], active: Mask, wanted: Mask):
        xs = as_jax_values(xs)
        inlined = self.inlined(eqn, will_be_compiled()) is not None
        # A node loses what its body logs. The node uses the same analysis.
        if inlined or (not has_shardings(eqn) and analyze(called_body(eqn), active, wanted).logs):
            return pullback(called_body(eqn), active, wanted, xs)
        return super().vjp(eqn, xs, active, wanted)

    def transposed(self, eqn: JaxprEqn, xs: Sequence[Value], active: Mask, wanted: Mask):
        if (small := self.inlined(eqn, True)) is None:
            return super().transposed(eqn, xs, active, wanted)
        return pullback(small, active, wanted, as_jax_values(xs), linear=True)

    def split(self, eqn: JaxprEqn, xs: Sequence[Value], dxs: Sequence[Value], wanted: Mask):
        xs, dxs = as_jax_values(xs), _weak_as(dxs, called_body(eqn).in_avals)
        if self.inlined(eqn, will_be_compiled()):
            return jvp(called_body(eqn), xs, dxs, split=True, wanted=wanted)
        return super().split(eqn, xs, dxs, wanted)

    def node(self, eqn: JaxprEqn, active: Mask, wanted: Mask, push: bool) -> Node:
        return _JitNode(eqn, analyze(called_body(eqn), active, wanted, push), push)


def _weak_as(dxs: Sequence[Value], avals: Sequence[Any]) -> list[Value]:
    """Return the tangents of a body's inputs, with the inputs' weak types, as JAX stages a call."""
    pairs = zip(dxs, avals, strict=True)
    return [None if dx is None else weak_as(dx, aval) for dx, aval in pairs]


def _staged_jvp(eqn: JaxprEqn, on: Mask, types: Sequence[Any], wanted: Mask
                ) -> tuple[dict[str, Any], Mask, Callable[..., list[Value]]]:  # fmt: skip
    """Stage a jit of inputs and tangents; return its parameters, its moving outputs, and its call.

    A tangent has the sharding and the weak type of its primal.
    """
    prog, moving = called_body(eqn), []

    def push(*args: Value) -> list[Value]:
        dxs = _weak_as(spread(args[len(on) :], on), prog.in_avals)
        ys, dys = jvp(prog, args[: len(on)], dxs, wanted=wanted)
        moving[:] = [dy is not None for dy in dys]
        return [*ys, *gather(dys, tuple(moving))]

    push.__name__ = f"{eqn.params['name']}_jvp"
    try:
        jaxpr = jax.make_jaxpr(push)(*prog.in_avals, *types)
    except XformError as error:
        if error.where:
            raise
        raise error.at(frame(eqn)) from None  # JAX cuts tracebacks at the start of a trace
    params: dict[str, Any] = {**eqn.params, "jaxpr": jaxpr, "name": push.__name__}
    params["donated_invars"] = (False,) * (len(on) + len(types))
    for end, mask in (("in", on), ("out", moving)):
        for name in (f"{end}_shardings", f"{end}_layouts"):
            params[name] = (*params[name], *gather(params[name], mask))
    return params, tuple(moving), jax.jit(lambda *args: evaluate(program(jaxpr), args))


class InlineCall(Jit):
    """The rule of calls that are always replaced by their body."""

    def inlined(self, eqn: JaxprEqn, staged: bool) -> Program | None:
        return called_body(eqn)

    def jvp_of(self, eqn: JaxprEqn, xs: Sequence[Value], dxs: Sequence[Value], wanted: Mask):
        return jvp(called_body(eqn), xs, dxs, wanted=wanted)


class RegionNode(CallNode):
    """A remat region. Its own policy decides inside, and its recompute waits for cotangents."""

    region = True

    def __init__(self, eqn: JaxprEqn, joint: Joint, push: bool, policy: Any, prevent_cse: Any):
        super().__init__(eqn, joint, push)
        self.policy = policy or _nothing
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
    """Call `f` on pytrees. Outside `jit`, trace it once, so that its loops are compiled once."""
    if staging():
        return f(*args)
    leaves, tree = jax.tree.flatten(args)
    types = tuple(map(jax.typeof, leaves))
    key = (key, tree, types)
    if key not in schedule.cache:
        trees: list[Any] = []

        def flat(*leaves: Value) -> list[Value]:
            ys, out = jax.tree.flatten(f(*tree.unflatten(leaves)))
            trees.append(out)
            return ys

        schedule.cache[key] = trace(flat, *types), trees[0]
    prog, out = schedule.cache[key]
    return out.unflatten(evaluate(prog, leaves))


def remat_region_of(
    jaxpr: Any, args: Sequence[Value], policy: Any, prevent_cse: bool | tuple[bool, ...]
):
    """Run a jaxpr as a remat region. Values that it closes over become arguments of the region."""
    opened, consts = closed(jaxpr)
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
            full, _ = lift_constants(prog)
            jaxpr_of_all = jax.make_jaxpr(lambda *xs: evaluate(full, xs))(*full.in_avals)
            prog.cache["lifted"] = closed(jaxpr_of_all)[0]
        opened = prog.cache["lifted"]
        if isinstance(prevent_cse, tuple):
            prevent_cse = (*(False,) * len(consts), *prevent_cse)
    return _REMAT.bind(*consts, *args, jaxpr=_settled(opened), prevent_cse=prevent_cse,
                       policy=policy, differentiated=False)  # fmt: skip


def _settled(jaxpr: Any) -> Any:
    """Return a region's jaxpr with names as primitives, because JAX's policies see only those."""
    cache = program(jaxpr).cache
    if "settled" not in cache:
        settled = lower_all(jaxpr)
        cache["settled"] = None if settled is jaxpr else settled  # a cache must not hold its key
    return cache["settled"] or jaxpr


def _nothing(*_: Any, **__: Any) -> bool:
    """The policy of a region without a policy: as in JAX, it saves nothing."""
    return False


class Remat(Structured):
    """The rule of `jax.checkpoint`, which marks a remat region of xform's or JAX's own."""

    def active(self, eqn: JaxprEqn, active: Mask) -> Mask:
        return path(called_body(eqn), active).outputs

    def useful(self, eqn: JaxprEqn, active: Mask, wanted: Mask) -> Mask:
        return path(called_body(eqn), active, wanted).inputs

    def jvp(self, eqn: JaxprEqn, xs: Sequence[Value], dxs: Sequence[Value]):
        on = tuple(dx is not None for dx in dxs)
        args = [*xs, *gather(dxs, on)]
        types, cache = tuple(map(jax.typeof, args)), called_body(eqn).cache
        if ("jvp", on, types) not in cache:
            cache["jvp", on, types] = self._pushes(called_body(eqn), on, types)
        jaxpr, nonzero = cache["jvp", on, types]
        prevent = eqn.params["prevent_cse"]
        prevent = prevent if isinstance(prevent, bool) else True
        out = remat_region_of(jaxpr, args, eqn.params["policy"], prevent)
        n = len(eqn.outvars)
        return out[:n], spread(out[n:], nonzero)

    def _pushes(self, prog: Program, on: Mask, types: Sequence[Any]) -> tuple[Any, Mask]:
        """Return the jaxpr of a region with its tangents, and which outputs have one."""
        nonzero: list[bool] = []

        def run(*args: Value) -> list[Value]:
            ys, dys = jvp(prog, args[: len(on)], spread(args[len(on) :], on))
            nonzero[:] = [dy is not None for dy in dys]
            return [*ys, *gather(dys, nonzero)]

        return jax.make_jaxpr(run)(*types), tuple(nonzero)

    def vjp(self, eqn: JaxprEqn, xs: Sequence[Value], active: Mask, wanted: Mask):
        if eqn.params["differentiated"]:
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
declare(Jit, "jit", "structured", (), Traits(call="jaxpr"), known=("jaxpr", *_OPTIONS))
declare(Remat, "remat2", "structured", (),
        Traits(call="jaxpr", calls="region", pure=False),
        known=("jaxpr", "prevent_cse", "differentiated", "policy"))  # fmt: skip
for _name in ("closed_call", "core_call", "core_closed_call"):
    declare(InlineCall, _name, "structured", (), Traits(call="call_jaxpr"),
            known=("call_jaxpr", "name"))  # fmt: skip
declare(InlineCall, "eval_jaxpr", "structured", (), Traits(call="jaxpr"),
        known=("jaxpr", "call_jaxpr"))  # fmt: skip
# The forward function of a custom_vjp with `optimize_remat`.
declare(InlineCall, "remat_opt", "structured", (),
        Traits(call="fwd_jaxpr", calls="custom"),
        known=("fwd_jaxpr", "fun_jaxpr_thunk", "num_consts", "num_res"))  # fmt: skip
