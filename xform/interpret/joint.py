"""The Joint: the forward and the backward pass of a function as one program, in two parts.

`analyze` traces a program together with its pullback, or for `linearize` with its pushforward. The
cotangents, or for `linearize` the tangents, are inputs of this joint program. They are called its
seeds. Equations that depend on a seed are the backward part. All others are the forward part. The
backward part reads some values of the forward part, and a `Schedule` says which of these are saved
and which are recomputed. `emit` runs both parts under a schedule.

A structured equation, such as a loop, a branch or a call, becomes two equations in the joint
program: a `fork` in the forward part and a `join` in the backward part. Both refer to one `Node`,
which has Joints of the nested programs. The fork's last output, the token, stands for all values
that the join needs from the fork (`interpret.node`).
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
    staging,
    tangent_aval,
)
from xform.errors import WrongCotangent
from xform.interpret.absent import CotangentGroups, ReducedJoint, remove_markers, start_p
from xform.interpret.activity import path
from xform.interpret.ahead import analysis_key
from xform.interpret.checkpoints import SNAPSHOTS
from xform.interpret.jvp import jvp
from xform.interpret.logs import collect_logs
from xform.interpret.node import Node, fork_p, gather, join_p, resolve_node_references, spread
from xform.interpret.pullback import pullback
from xform.passes.cse import Cse
from xform.passes.dce import live
from xform.passes.erased import is_reshape, unchanged_operand
from xform.passes.inline import inlinable_body, inline_bodies
from xform.passes.simplify import Simplify
from xform.program.arithmetic import Value
from xform.program.dimensions import Sample, SampledCache, current_sample
from xform.program.ir import Mask, Program, trace
from xform.program.source import frame
from xform.registry.repeatable import repeatable
from xform.registry.table import traits


@dataclasses.dataclass(frozen=True, eq=False)
class Joint:
    """The forward and the backward part of one program.

    Attributes:
      program: both parts as one program, from `inputs` and `seeds` to `outputs` and
        `backward_outputs`.
      inputs: the inputs of the forward part, which are the inputs of the differentiated program.
      seeds: the inputs of the backward part: cotangents of outputs (for `linearize`: tangents of
        inputs).
      outputs: the outputs of the forward part, which are the outputs of the differentiated program.
      backward_outputs: the outputs of the backward part: cotangents of inputs (for
        `linearize`: tangents of outputs).
      active: which inputs are differentiated.
      seeded: which outputs have a seed (for `linearize`: which inputs).
      results: which inputs have a cotangent in `backward_outputs` (for `linearize`: which outputs
        have a tangent there).
      push: whether the backward part pushes tangents; else it pulls cotangents.
      forward, backward: the equations of the two parts.
      cotangent_groups: which cotangents one call of a user's backward function takes together, see
        `interpret.absent`.
      logs: for each key that a user's backward function logs (`interpret.logs`), a text that says
        where.
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
        """The `id`s of the backward part's equations; others in `Schedule.order` are recomputed."""
        return frozenset(map(id, self.backward))

    @cached_property
    def producer(self) -> dict[Var, JaxprEqn]:
        """The forward equation that computes each forward value."""
        return {v: eqn for eqn in self.forward for v in eqn.outvars}

    @cached_property
    def forks(self) -> dict[int, JaxprEqn]:
        """The forks among the forward equations, by their index in `forward`."""
        return {i: eqn for i, eqn in enumerate(self.forward) if eqn.primitive is fork_p}

    @cached_property
    def named_copy(self) -> dict[Var, Var]:
        """Maps each value that `checkpoint_name` names to its copy, the result of that call."""
        pairs = [(e.invars[0], e.outvars[0]) for e in self.forward if traits(e.primitive).label]
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
            of_constants = all(not isinstance(v, Var) or v in constant for v in eqn.invars)
            facts = traits(eqn.primitive)
            fusible = facts.fusion in ("elementwise", "movement")
            if of_constants and fusible and facts.pure and not facts.identity and repeatable(eqn):
                constant.update(eqn.outvars)
            elif facts.view or is_reshape(eqn) or unchanged_operand(eqn, self.producer) is not None:
                views.update(eqn.outvars)
        return frozenset(constant | views)

    @cached_property
    def schedules(self) -> dict[Any, Schedule]:
        """The most recent schedules of this Joint, by policy."""
        return SampledCache(16)

    @cached_property
    def reduced_joints(self) -> dict[Mask, ReducedJoint]:
        """Return this Joint reduced to the seeds in a mask, see `interpret.absent`."""
        return {}


@dataclasses.dataclass(frozen=True, eq=False)
class Schedule:
    """Which values a Joint saves for its backward part, and which equations it recomputes.

    Attributes:
      joint: the Joint.
      saved: forward values that are saved for the backward part, tokens of forks among them.
      offloaded: saved values that are moved to another memory until the backward part reads them;
        in the body of a scan also inputs whose value in each iteration is moved there.
      order: the equations that the backward part runs, in order: those of `Joint.backward`, and the
        forward equations that it recomputes.
      recomputed: `id`s of the forward equations in `order`, except those whose results are all in
        `Joint.always_recomputed`.
      reads: which inputs of the forward part the backward part reads.
      inner: for each Node, the Schedules of its Joints.
      why: for each saved value, the reason as a text.
      plan_other: a function that returns the Schedule of another Joint under the same policy. It is
        for a program that is traced only after this Joint was planned.
      snapshots: for the body of a loop, how many states the loop stores in the forward pass. The
        backward pass recomputes the `saved` values of one step at a time from these states, and
        frees them after that step. None: the forward pass saves the values of each iteration, and
        the parts of the loop's state that the backward part reads.
      decided_per_value: whether a policy decided about each value alone; otherwise a minimum cut or
        an integer program decided about all values together.
      gradients_first: whether a cotangent waits for the gradients that are complete, between the
        layers of a whole function (`steering.gradients_first`).
      sample: the sizes of symbolic dimensions at which this was decided (`program.dimensions`).
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
    gradients_first: bool = False
    sample: Sample = dataclasses.field(default_factory=current_sample)
    cache: dict[Any, Any] = dataclasses.field(default_factory=SampledCache, repr=False)

    @cached_property
    def outputs_only(self) -> Schedule:
        """Return this schedule with nothing saved and nothing read, for a forward pass alone."""
        reads = (False,) * len(self.reads)
        return dataclasses.replace(self, saved=(), offloaded={}, reads=reads, cache=SampledCache())


# Whether the program that is being analyzed will run outside `jit`, operation by operation.
_SINGLY = contextvars.ContextVar("xform_singly", default=False)


def will_be_compiled() -> bool:
    """Return whether operations that are traced here will be compiled as one program."""
    return staging() and not _SINGLY.get()


def analyze(prog: Program, active: Mask, wanted: Mask | None = None, push: bool = False,
            linear: bool = False, singly: bool = False) -> Joint:  # fmt: skip
    """Return the Joint of a program.

    Cost: one trace. The result is cached on the program for each set of arguments, so a jitted
    layer that is called 96 times is analyzed once.

    Args:
      prog: the program.
      active: which inputs are differentiated.
      wanted: which outputs have a cotangent (for `linearize`: need a tangent); None for all that
        depend on an active input.
      push: whether the backward part pushes tangents, for `linearize`; else it pulls cotangents.
      linear: whether the program is linear in the active inputs. Then the backward part is its
        transpose, and nothing may use the outputs of the forward part.
      singly: whether the Joint will run outside `jit`, operation by operation. Then functions that
        the user jitted stay calls, which are compiled.
    """
    derivative_path = path(prog, active, wanted)
    if push:
        seeded, key_of_mode = derivative_path.inputs, ("push", derivative_path.inputs)
    else:
        seeded = derivative_path.outputs if wanted is None else tuple(wanted)
        key_of_mode = "pull", active, linear
    key = (*key_of_mode, seeded, wanted, SNAPSHOTS.get(), singly, analysis_key())
    if key not in prog.cache:
        token = _SINGLY.set(singly)
        try:
            if push:
                prog.cache[key] = _trace_with_pushforward(prog, active, seeded)
            else:
                prog.cache[key] = _trace_with_pullback(prog, active, seeded, linear)
        finally:
            _SINGLY.reset(token)
    return prog.cache[key]


def _trace_with_pullback(prog: Program, active: Mask, wanted: Mask, linear: bool) -> Joint:
    """Return the Joint whose backward part pulls cotangents."""
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
    traced = _inline_and_simplify(trace(joint, *prog.in_types, *cts))
    return _split(traced, prog, active, wanted, tuple(results), False, places)


def _trace_with_pushforward(prog: Program, active: Mask, seeded: Mask) -> Joint:
    """Return the Joint whose backward part pushes tangents."""
    results: list[bool] = []

    def joint(*args: Value) -> list[Value]:
        ins, dxs = args[: len(prog.inputs)], args[len(prog.inputs) :]
        outs, dys = jvp(prog, ins, spread(dxs, seeded), split=True)
        results[:] = [dy is not None for dy in dys]
        return [*outs, *gather(dys, tuple(results))]

    dxs = [tangent_aval(v.aval) for v, on in zip(prog.inputs, seeded, strict=True) if on]
    traced = _inline_and_simplify(trace(joint, *prog.in_types, *dxs))
    return _split(traced, prog, active, seeded, tuple(results), True, {})


def _inline_and_simplify(traced: Program) -> Program:
    """Inline small calls, so that a schedule decides about the values in them, and simplify."""
    prog = inline_bodies(
        resolve_node_references(traced), functools.partial(inlinable_body, staged=not _SINGLY.get())
    )
    simpler = Cse().rewrite(Simplify().rewrite(prog))
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
    """Split `traced`, the trace of `prog` with its derivative, into the two parts of a Joint.

    The backward part is everything that depends on a seed. It also has the operations of users'
    backward functions that happen at each call, such as reads of a mutable reference, and each
    join, even if simplification has removed its seeds.
    """
    traced, start, cotangent_groups = remove_markers(traced)
    n, k = len(prog.inputs), len(prog.outputs)
    seed_dependent = set(traced.inputs[n:])
    forward, backward = [], []
    for i, eqn in enumerate(traced.equations):
        in_backward = eqn.primitive is join_p or (i >= start and not repeatable(eqn))
        if in_backward or any(isinstance(v, Var) and v in seed_dependent for v in eqn.invars):
            backward.append(eqn)
            seed_dependent.update(eqn.outvars)
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
    """Return the variables that an equation reads, given the Schedules `inner` of each node.

    A join reads its token, its seeds, and only those inputs of its node that these Schedules need.
    """
    atoms: Sequence[Any] = eqn.invars
    if eqn.primitive is join_p:
        node = eqn.params["node"]
        n = len(node.eqn.invars)
        token, xs, seeds = atoms[0], atoms[1 : 1 + n], atoms[1 + n :]
        schedules = inner[node]
        atoms = [token, *gather(xs, node.reads(schedules)), *seeds]
    return [v for v in atoms if isinstance(v, Var)]


def check_carried_dtypes(eqn: JaxprEqn, joint: Joint, carried: int) -> Joint:
    """Return `joint`, the Joint of the body of a loop `eqn`, if the loop can carry its cotangents.

    The backward loop carries the cotangents of the first `carried` inputs: of the carry, and of
    constants, whose cotangents are summed. Raise WrongCotangent if one of these has another dtype
    than its input. For other inputs a `custom_vjp` may return any float dtype, as in JAX.
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
    """Return the error for a `custom_vjp` in a loop or branch that returns another dtype.

    `given` is the dtype of the cotangent, `aval` the type of the value, and `why` says why the loop
    or branch cannot use that dtype.
    """
    return WrongCotangent(
        f"pullback of {eqn.primitive.name}",
        f"a custom_vjp in it returned a cotangent of dtype {given} for a value of type "
        f"{aval.str_short()}, and {why}",
        frame(eqn),
        f"let the backward function return ct.astype({aval.dtype})",
    )
