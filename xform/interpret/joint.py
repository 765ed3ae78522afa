"""The joint program: the forward and the backward part of a derivative, as data.

`analyze` traces a program together with its pullback (for `linearize`, with its pushforward) once.
Equations that depend on a cotangent (tangent) are the backward part. All others are the forward
part, and their values are the candidates for saving. Structured equations appear as `fork` and
`join`, with Joints of their own (`node`). A `Schedule` says which candidates are saved. `emit` runs
both parts under a schedule.
"""

from __future__ import annotations

import contextvars
import dataclasses
import functools
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from xform._jax import (
    JaxprEqn,
    Offloadable,
    Var,
    cotangent_aval,
    has_effects,
    name_p,
    staging,
    tangent_aval,
)
from xform.errors import WrongCotangent
from xform.interpret.absent import CotangentGroups, ReducedJoint, remove_markers, start_p
from xform.interpret.activity import path
from xform.interpret.checkpoints import SNAPSHOTS
from xform.interpret.jvp import jvp
from xform.interpret.logs import collect_logs
from xform.interpret.node import Node, fork_p, gather, join_p, resolve_node_references, spread
from xform.interpret.pullback import pullback
from xform.passes.dce import live
from xform.passes.erased import is_reshape, unchanged_operand
from xform.passes.inline import inlinable_body, inline_bodies
from xform.passes.simplify import Simplify
from xform.program.arithmetic import Value
from xform.program.ir import Mask, Program, trace
from xform.program.source import frame
from xform.registry.table import traits
from xform.storage.bounded_cache import BoundedCache


@dataclasses.dataclass(frozen=True, eq=False)
class Joint:
    """The forward and the backward part of one program.

    Attributes:
      program: both parts as one program, from inputs and seeds to outputs and results.
      inputs, seeds: the two groups of the program's inputs.
      outputs, backward_outputs: the results of the forward and of the backward part.
      active: which inputs are differentiated.
      seeded: which outputs bring a cotangent (with `push`: which inputs bring a tangent).
      results: which inputs receive a cotangent (with `push`: which outputs receive a tangent).
      push: whether the backward part pushes tangents.
      forward, backward: the equations of the two parts.
      cotangent_groups: which cotangents one call of a user's backward function takes together, see
        `interpret.absent`.
      logs: the keys that users' backward functions log, with their places.
    """

    program: Program
    inputs: tuple[Var, ...]
    seeds: tuple[Var, ...]
    outputs: tuple[Any, ...]
    backward_outputs: tuple[Any, ...]
    active: Mask
    seeded: Mask
    results: Mask
    push: bool
    forward: tuple[JaxprEqn, ...]
    backward: tuple[JaxprEqn, ...]
    cotangent_groups: CotangentGroups
    logs: dict[Any, str]

    @cached_property
    def backward_ids(self) -> frozenset[int]:
        """The `id`s of the backward part's equations; others in a Schedule are recomputed."""
        return frozenset(map(id, self.backward))

    @cached_property
    def producer(self) -> dict[Var, JaxprEqn]:
        """The forward equation that computes each forward value."""
        return {v: eqn for eqn in self.forward for v in eqn.outvars}

    @cached_property
    def forks(self) -> dict[int, JaxprEqn]:
        """The forks among the forward equations, by their index."""
        return {i: eqn for i, eqn in enumerate(self.forward) if eqn.primitive is fork_p}

    @cached_property
    def named_copy(self) -> dict[Var, Var]:
        """Maps each value that `checkpoint_name` names to its copy, the result of that call."""
        pairs = [(e.invars[0], e.outvars[0]) for e in self.forward if e.primitive is name_p]
        return {x: y for x, y in pairs if isinstance(x, Var) and x in self.producer}

    @cached_property
    def always_recomputed(self) -> frozenset[Var]:
        """Forward values that are never saved: cheap functions of constants, and views.

        The backward part recomputes them. A value that is cheap to recompute from constants alone,
        such as a causal mask, is not worth saving. For a view, the source is saved instead.
        """
        constant: set[Var] = set()
        views: set[Var] = set()
        for eqn in self.forward:
            known = [not isinstance(v, Var) or v in constant for v in eqn.invars]
            of = traits(eqn.primitive)
            loop = of.fusion in ("elementwise", "movement") and of.pure and not of.identity
            if all(known) and loop:
                constant.update(eqn.outvars)
            elif of.view or is_reshape(eqn) or unchanged_operand(eqn, self.producer) is not None:
                views.update(eqn.outvars)
        return frozenset(constant | views)

    @cached_property
    def schedules(self) -> dict[Any, Schedule]:
        """The most recent schedules of this Joint, by policy."""
        return BoundedCache(16)

    @cached_property
    def reduced_joints(self) -> dict[Mask, ReducedJoint]:
        """The Joint for subsets of its seeds, see `interpret.absent`."""
        return {}


@dataclasses.dataclass(frozen=True, eq=False)
class Schedule:
    """Which values a Joint saves for its backward part, and which equations it recomputes.

    Attributes:
      joint: the Joint.
      saved: forward values that are saved for the backward part, tokens of nodes among them.
      offloaded: saved values that wait in another memory; in the body of a scan also inputs whose
        value in each iteration waits there.
      order: the backward part's equations in order, with the forward equations that it recomputes.
      recomputed: `id`s of the forward equations in `order`, except those whose results are all in
        `Joint.always_recomputed`.
      reads: which inputs of the program the backward part reads.
      inner: the Schedules of each node's Joints.
      why: for each saved value, the reason.
      plan_other: schedules another Joint in the same way, for a program that appears after
        planning.
      snapshots: for the body of a loop, how many states the loop stores in the forward pass; steps
        are recomputed from these, and saved values last for one step. None: each iteration saves
        its values, and the part of the state that the backward part reads.
      decided_per_value: whether a policy decided about each value; otherwise a cut decided about
        all values together.
    """

    joint: Joint
    saved: tuple[Var, ...]
    offloaded: dict[Var, Offloadable]
    order: tuple[JaxprEqn, ...]
    recomputed: frozenset[int]
    reads: Mask
    inner: dict[Node, tuple[Schedule, ...]]
    why: dict[Var, str]
    plan_other: Callable[[Joint], Schedule]
    snapshots: int | None = None
    decided_per_value: bool = False
    cache: dict[Any, Any] = dataclasses.field(default_factory=BoundedCache, repr=False)

    @cached_property
    def outputs_only(self) -> Schedule:
        """The same schedule with nothing saved and nothing read, to compute the outputs alone."""
        reads = (False,) * len(self.reads)
        return dataclasses.replace(self, saved=(), offloaded={}, reads=reads, cache=BoundedCache())


# Whether the program that is being analyzed will run operation by operation.
_SINGLY = contextvars.ContextVar("xform_singly", default=False)


def will_be_compiled() -> bool:
    """Whether an operation that is applied here will be compiled together with others."""
    return staging() and not _SINGLY.get()


def analyze(prog: Program, active: Mask, wanted: Mask | None = None, push: bool = False,
            linear: bool = False, singly: bool = False) -> Joint:  # fmt: skip
    """Return the Joint of a program, for its active inputs and wanted outputs.

    The result is cached for each (program, masks), so a layer that is called 96 times is analyzed
    once. With `linear`, the program is linear in the active inputs; it is transposed, and its
    outputs do not matter. With `singly`, the program will run operation by operation, and calls
    that the user compiles stay calls.
    """
    way = path(prog, active, wanted)
    seeded = way.inputs if push else tuple(wanted) if wanted is not None else way.outputs
    ends = ("push", way.inputs) if push else ("pull", active, linear)
    key = (*ends, seeded, wanted, SNAPSHOTS.get(), singly)
    if key not in prog.cache:
        token = _SINGLY.set(singly)
        try:
            joint = _push(prog, active, seeded) if push else _pull(prog, active, seeded, linear)
        finally:
            _SINGLY.reset(token)
        prog.cache[key] = joint
    return prog.cache[key]


def _pull(prog: Program, active: Mask, wanted: Mask, linear: bool) -> Joint:
    """Trace a program with its pullback, and split the trace into a Joint."""
    results: list[bool] = []
    places: dict[Any, str] = {}

    def joint(*args: Value) -> list[Value]:
        ins, cts = args[: len(prog.inputs)], args[len(prog.inputs) :]
        outs, pull = pullback(prog, active, wanted, ins, linear)
        with collect_logs() as logs:
            in_cts = pull(spread(start_p.bind(*cts), wanted))
        places.update(logs.places("a program that is planned, as under jit or a policy"))
        results[:] = [ct is not None for ct in in_cts]
        return [*outs, *gather(in_cts, tuple(results))]

    cts = [cotangent_aval(v.aval) for v, on in zip(prog.outputs, wanted, strict=True) if on]
    traced = _opened(trace(joint, *prog.in_types, *cts))
    return _split(traced, prog, active, wanted, tuple(results), False, places)


def _push(prog: Program, active: Mask, seeded: Mask) -> Joint:
    """Trace a program with its pushforward, and split the trace into a Joint."""
    results: list[bool] = []

    def joint(*args: Value) -> list[Value]:
        ins, dxs = args[: len(prog.inputs)], args[len(prog.inputs) :]
        outs, dys = jvp(prog, ins, spread(dxs, seeded), split=True)
        results[:] = [dy is not None for dy in dys]
        return [*outs, *gather(dys, tuple(results))]

    dxs = [tangent_aval(v.aval) for v, on in zip(prog.inputs, seeded, strict=True) if on]
    traced = _opened(trace(joint, *prog.in_types, *dxs))
    return _split(traced, prog, active, seeded, tuple(results), True, {})


def _opened(traced: Program) -> Program:
    """Inline the calls that a schedule sees through, and simplify the program."""
    prog = inline_bodies(
        resolve_node_references(traced), functools.partial(inlinable_body, staged=not _SINGLY.get())
    )
    simpler = Simplify().rewrite(prog)
    if simpler is prog:
        return prog
    return dataclasses.replace(simpler, equations=live(simpler.equations, simpler.outputs))


def _split(
    traced: Program,
    prog: Program,
    active: Mask,
    seeded: Mask,
    results: Mask,
    push: bool,
    logs: dict[Any, str],
) -> Joint:
    """Separate the two parts: the backward part is everything that depends on a seed.

    It also has the effects of users' backward functions, such as reads of a reference, and each
    join, even if simplification has removed its seeds.
    """
    traced, start, cotangent_groups = remove_markers(traced)
    n, k = len(prog.inputs), len(prog.outputs)
    dependent = set(traced.inputs[n:])
    forward, backward = [], []
    for i, eqn in enumerate(traced.equations):
        late = eqn.primitive is join_p or (i >= start and has_effects(eqn))
        if late or any(isinstance(v, Var) and v in dependent for v in eqn.invars):
            backward.append(eqn)
            dependent.update(eqn.outvars)
        else:
            forward.append(eqn)
    return Joint(
        traced,
        traced.inputs[:n],
        traced.inputs[n:],
        traced.outputs[:k],
        traced.outputs[k:],
        active,
        seeded,
        results,
        push,
        tuple(forward),
        live(backward, traced.outputs[k:]),
        cotangent_groups,
        logs,
    )


def reads_of(eqn: JaxprEqn, inner: dict[Node, tuple[Schedule, ...]]) -> list[Var]:
    """Return what an equation reads under a schedule: a join reads only some inputs of its node."""
    atoms: Sequence[Any] = eqn.invars
    if eqn.primitive is join_p:
        node = eqn.params["node"]
        n = len(node.eqn.invars)
        token, xs, seeds = atoms[0], atoms[1 : 1 + n], atoms[1 + n :]
        schedules = inner[node]
        atoms = [token, *gather(xs, node.reads(schedules)), *seeds]
    return [v for v in atoms if isinstance(v, Var)]


def with_types(eqn: JaxprEqn, joint: Joint, carried: int) -> Joint:
    """Return the Joint of a loop's body; raise WrongCotangent if a carry's cotangent dtype differs.

    The carried cotangents belong to the first `carried` inputs. Elsewhere a custom rule may return
    another float dtype, as in JAX.
    """
    if joint.push:
        return joint
    cts = spread(joint.backward_outputs, joint.results)
    for ct, v in zip(cts[:carried], joint.inputs, strict=False):
        if ct is None:
            continue
        given, wanted = getattr(ct.aval, "dtype", None), getattr(v.aval, "dtype", None)
        if given != wanted and isinstance(wanted, np.dtype):
            raise wrong_dtype(eqn, given, v.aval, "a loop carries the value's own dtype only")
    return joint


def wrong_dtype(eqn: JaxprEqn, given: Any, aval: Any, why: str) -> WrongCotangent:
    """Return the error for a custom rule in a loop or branch that returns another dtype."""
    return WrongCotangent(
        f"pullback of {eqn.primitive.name}",
        f"a custom_vjp in it returned a cotangent of dtype {given} for a value of type "
        f"{aval.str_short()}, and {why}",
        frame(eqn),
        f"let the backward function return ct.astype({aval.dtype})",
    )
