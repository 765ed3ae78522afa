"""The rule of `lax.while_loop` (and of `fori_loop` with a traced trip count).

A *step* is one run of the loop's body. Its *carry* is the state of the loop. Forward mode runs a
loop that carries tangents with the state. In reverse mode the number of steps is unknown, so the
forward pass stores a fixed number of states (`xform.interpret.checkpoints`) and saves nothing else.
The backward pass recomputes the state before each step, and pulls cotangents back over the step. It
uses the *Joint* of one step: its forward and backward pass, traced as one program.

The base classes `Structured` and `Node` describe the methods (`xform.interpret.node`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax import lax

from xform._jax import JaxprEqn, Var, cotangent_aval, jit, match_weak_type
from xform.errors import NotDifferentiable
from xform.interpret import emit
from xform.interpret.absent import present_derivatives
from xform.interpret.activity import active_inside, wanted_through
from xform.interpret.checkpoints import SNAPSHOTS, States, in_lanes, run_and_store, run_backward
from xform.interpret.joint import Joint, Schedule, analyze, check_carried_dtypes
from xform.interpret.jvp import jvp
from xform.interpret.keys import unused_keys
from xform.interpret.lanes import forward_only, while_loop
from xform.interpret.loop_state import needed_inputs, recomputed_equations, values_read
from xform.interpret.node import (
    Node,
    Schedules,
    Structured,
    gather,
    present_mask,
    spread,
    submask,
)
from xform.interpret.repeat import check_repeatable
from xform.passes.dataflow import Forward, results_through
from xform.program.arithmetic import Value, instantiate
from xform.program.flow import Body, BodyFunction, Flow
from xform.program.ir import Atom, Mask, Program, evaluate, program, union
from xform.program.source import frame
from xform.registry.table import declare, flow_of
from xform.registry.traits import Traits
from xform.rules.while_linear import MUST_NOT_REPEAT, WhilePushNode


class _Loop:
    """The condition and the body of a while loop, and the positions of its operands."""

    def __init__(self, eqn: JaxprEqn):
        params = eqn.params
        self.cond: Program = program(params["cond_jaxpr"])
        self.step: Program = program(params["body_jaxpr"])
        self.n_cond, self.n_step = params["cond_nconsts"], params["body_nconsts"]

    def parts(self, values: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """Split values into constants of the condition, constants of the body, and carries."""
        first_carry = self.n_cond + self.n_step
        consts = list(values[self.n_cond : first_carry])
        return list(values[: self.n_cond]), consts, list(values[first_carry:])


class _DependsOnInputs(Forward[bool]):
    """Finds the values that depend in any way on some inputs of a program."""

    follows_control = True

    def constant(self, v: Atom) -> bool:
        return False

    def join(self, a: bool, b: bool) -> bool:
        return a or b

    def control(self, predicate: bool, x: bool) -> bool:
        return predicate or x

    def transfer(self, eqn: JaxprEqn, operands: list[bool], through: list[bool] | None):
        return through or [any(operands)] * len(eqn.outvars)


class While(Structured):
    """The rule of `lax.while_loop`."""

    def flow(self, eqn: JaxprEqn) -> Flow:
        loop, n = _Loop(eqn), len(eqn.invars)
        first_carry, results = loop.n_cond + loop.n_step, range(len(eqn.outvars))
        of_condition = [*range(loop.n_cond), *range(first_carry, n)]
        return Flow(
            (Body(loop.step, range(loop.n_cond, n), results),),
            carried={first_carry + r: r for r in results},
            condition=Body(loop.cond, of_condition, ()),
        )

    def rebuild(self, eqn: JaxprEqn, xs: Sequence[Value], functions: Sequence[BodyFunction],
                each: Any = None) -> tuple[list[Value], Any]:  # fmt: skip
        condition, step = functions
        cond_consts, consts, start = _Loop(eqn).parts(xs)
        ys = lax.while_loop(
            lambda state: condition([*cond_consts, *state], each)[0][0],
            lambda state: step([*consts, *state], each)[0],
            start,
        )
        return ys, None

    def jvp(self, eqn: JaxprEqn, xs: Sequence[Value], dxs: Sequence[Value]):
        loop = _Loop(eqn)
        on = self.active(eqn, present_mask(dxs))
        (cond_consts, consts, carry), (_, dconsts, dcarry) = loop.parts(xs), loop.parts(dxs)
        n = len(carry)

        def cond(state: States) -> Value:
            return evaluate(loop.cond, [*cond_consts, *state[:n]])[0]

        def step(state: States) -> States:
            dxs = [*dconsts, *spread(state[n:], on)]
            ys, dys = jvp(loop.step, [*consts, *state[:n]], dxs)
            return [*ys, *instantiate(dys, eqn.outvars, on)]

        out = while_loop(cond, step, [*carry, *instantiate(dcarry, eqn.outvars, on)])
        return out[:n], spread(out[n:], on)

    def node(self, eqn: JaxprEqn, active: Mask, wanted: Mask, push: bool) -> Node:
        loop, flow = _Loop(eqn), self.flow(eqn)
        if push:
            pairs = zip(self.active(eqn, active), wanted, strict=True)
            return WhilePushNode(eqn, active, tuple(a and b for a, b in pairs))
        step_active = active_inside(flow, eqn, active)[loop.n_cond :]
        carried = wanted_through(flow, eqn, active, wanted)
        joint = check_carried_dtypes(
            eqn, analyze(loop.step, step_active, carried), len(loop.step.inputs)
        )
        return _WhileNode(eqn, loop, joint, wanted, carried)


class _Steps:
    """The forward and the backward loop of a while loop in reverse mode.

    Their compiled functions are cached with the step's Program. So this object holds no equation,
    because an equation has the jaxpr that keeps the Program alive.

    Attributes:
      loop, joint: the loop, and the Joint of one step.
      carried: which carries get a cotangent in some step.
      slots: how many states the forward loop stores.
      next_value: for each carry of a step, the output that becomes its value in the next step.
    """

    def __init__(self, loop: _Loop, joint: Joint, carried: Mask):
        self.loop, self.joint, self.carried = loop, joint, carried
        self.slots = SNAPSHOTS.get()
        self.next_value = dict(zip(joint.inputs[loop.n_step :], joint.outputs, strict=True))

    def needs(self, schedule: Schedule) -> tuple[set[Var], dict[Var, Var]]:
        """Return the inputs of a step from which its backward pass computes all that it reads.

        Also return the carries whose value after the step is read by its backward pass, each with
        the output of the step that is this value. The backward loop already has these values.
        """
        if "needs" not in schedule.cache:
            need = needed_inputs(schedule, self.next_value)
            outputs = {
                v: y
                for v, y in self.next_value.items()
                if v in need and isinstance(y, Var) and y in self.joint.producer
            }
            read = {*schedule.saved, *values_read(self.joint, schedule.saved, outputs.values())}
            read_next = {v: y for v, y in outputs.items() if y in read}
            schedule.cache["needs"] = needed_inputs(schedule, self.next_value, read_next), read_next
        return schedule.cache["needs"]

    def stored(self, schedule: Schedule) -> Mask:
        """Return which inputs of a step are stored: the needed carries that change."""
        need, _ = self.needs(schedule)
        return tuple(v in need and self.next_value.get(v, v) is not v for v in self.joint.inputs)

    def read_next(self, schedule: Schedule) -> Mask:
        """Return which stored carries the backward pass of a step reads also after the step."""
        _, read_next = self.needs(schedule)
        return tuple(v in read_next for v in gather(self.joint.inputs, self.stored(schedule)))

    def has_cotangent(self, given: Mask) -> tuple[Mask, Mask]:
        """Return which constants and carries get a cotangent, if the `given` outputs have one."""
        carry = given
        while True:
            on = present_derivatives(self.joint, tuple(gather(carry, self.carried)))
            before = zip(on[self.loop.n_step :], self.carried, strict=True)
            grown = union(carry, [a and b for a, b in before])
            if grown == carry:
                return on[: self.loop.n_step], carry
            carry = grown

    def compiled(self, schedule: Schedule, part: str) -> Any:
        """Return the loop "forward" or "backward", jitted once: eager calls compile it once."""
        key = part, self.loop.cond
        if key not in schedule.cache:
            method = {"forward": self._forward, "backward": self._backward}[part]

            def run(*args: Any) -> Any:
                return method(schedule, *args)

            run.__name__ = f"while_{part}"
            schedule.cache[key] = jit(run)
        return schedule.cache[key]

    def _forward(self, schedule: Schedule, xs: list[Value]) -> tuple[list[Value], Any]:
        """Run the loop; return the outputs and a token.

        The token has the stored states, and the parts of the last state that `_backward` reads.
        """
        loop = self.loop
        cond_consts, consts, carry = loop.parts(xs)
        stored = self.stored(schedule)[loop.n_step :]
        ys, trail = run_and_store(
            lambda x: evaluate(loop.cond, [*cond_consts, *x])[0],
            lambda x: emit.values(
                schedule,
                self.joint.outputs,
                dict(zip(self.joint.inputs, [*consts, *x], strict=True)),
            ),
            carry,
            stored,
            self.slots if any(stored) else 1,
        )
        return ys, (trail, gather(gather(ys, stored), self.read_next(schedule)))

    def _backward(
        self, schedule: Schedule, token: Any, xs: list[Value], cts: States
    ) -> list[Value]:
        """Return cotangents of constants and carries, from `cts`, those after the last step."""
        joint, n = self.joint, self.loop.n_step
        stored, read_next = self.stored(schedule), self.read_next(schedule)
        initial_inputs = xs[self.loop.n_cond :]
        next_state = gather(joint.outputs, stored[n:])
        outputs_read_next = gather(next_state, read_next)
        consts, carry = self.has_cotangent(submask(self.carried, present_mask(cts)))

        def inputs(x: States) -> list[Value]:
            """Return the inputs of a step, from the stored parts `x` of the state before it."""
            pairs = zip(spread(x, stored), initial_inputs, strict=True)
            return unused_keys([b if a is None else a for a, b in pairs])

        def environment(x: States) -> dict[Var, Value]:
            pairs = zip(joint.inputs, inputs(x), strict=True)
            return {v: x for v, x in pairs if x is not None}

        def step(x: States) -> States:
            """Run a step; return the stored parts of the state after it."""
            with emit.recompute_scope():
                return emit.values(schedule, next_state, environment(x), effects=False)

        def pull(x: States, after: States, cts: States) -> tuple[States, States]:
            """Pull cotangents back over a step; return those of its carries and its constants."""
            known = {**environment(x), **dict(zip(outputs_read_next, after, strict=True))}
            with emit.recompute_scope():
                saved = emit.values_by_variable(schedule, schedule.saved, known)
            seeds = gather(spread(cts, carry), self.carried)
            out = emit.backward(schedule, list(saved.values()), inputs(x), seeds, True)
            full = spread(out, joint.results)
            before = instantiate(full[n:], joint.inputs[n:], carry, cotangent_aval)
            return before, gather(full[:n], consts)

        trail, last = token
        sums = instantiate([None] * n, joint.inputs[:n], consts, cotangent_aval)
        # Under `vmap`, each element of the batch is a lane, with its own number of steps.
        lane_step, lane_pull = in_lanes(trail.lane_steps, step, pull)
        cts = gather(spread(cts, self.carried), carry)
        cts, sums = run_backward(trail, last, read_next, lane_step, lane_pull, cts, sums)
        return [*sums, *cts]


class _WhileNode(Node):
    """The node of a while loop in reverse mode. Its Joint is that of one step."""

    loop = True
    unknown_length = True

    def __init__(self, eqn: JaxprEqn, loop: _Loop, joint: Joint, wanted: Mask, carried: Mask):
        self.body, self.steps = loop, _Steps(loop, joint, carried)
        super().__init__(eqn, [joint], wanted, self._inputs_with_cotangent(wanted), False)
        self.first_carry = loop.n_step
        check_repeatable(
            recomputed_equations(joint, self.steps.next_value),
            "reverse-mode derivative of while_loop",
            "its body",
            "the backward pass runs the body again",
            MUST_NOT_REPEAT,
        )

    def iterations_depend_on(self, inputs: Mask) -> bool:
        flow = flow_of(self.eqn)
        assert flow is not None
        assert flow.condition is not None
        find = _DependsOnInputs()
        carry = results_through(flow, inputs, self.eqn.outvars, find, find.run)
        operands, condition = flow.after(inputs, carry), flow.condition
        return find.run(condition.program, [operands[k] for k in condition.operands])[0]

    def stacked_inputs(self, schedules: Schedules) -> Mask:
        return self.steps.stored(schedules[0])

    def token_values(self, schedule: Schedule) -> tuple[Var, ...]:
        return ()

    def stored_states(self, schedules: Schedules) -> list[int]:
        steps = self.steps
        _, read_next = steps.needs(schedules[0])
        inputs = zip(steps.joint.inputs, self.stacked_inputs(schedules), strict=True)
        return [(steps.slots + 1 + (v in read_next)) * on for v, on in inputs]

    def reads(self, schedules: Schedules) -> Mask:
        need, _ = self.steps.needs(schedules[0])
        of_step = zip(self.steps.joint.inputs, self.stacked_inputs(schedules), strict=True)
        return (*(False,) * self.body.n_cond, *(v in need and not stored for v, stored in of_step))

    def forward(self, schedules: Schedules, xs: Sequence[Value], used: Mask):
        self._check_devices(self.stacked_inputs(schedules))
        ys, token = self.steps.compiled(schedules[0], "forward")(list(xs))
        where = frame(self.eqn)
        outs = zip(ys, self.eqn.outvars, used, strict=True)
        # Under `vmap` the outputs of a loop may lose their weak type.
        typed = (match_weak_type(y, v.aval) if u else None for y, v, u in outs)
        return [None if y is None else forward_only(y, where) for y in typed], token

    def backward(self, schedules: Schedules, token: Any, xs: Sequence[Value],
                 seeds: Sequence[Value], together: bool) -> list[Value]:  # fmt: skip
        _, carry = self.steps.has_cotangent(submask(self.seeded, present_mask(seeds)))
        cts = instantiate(spread(seeds, self.seeded), self.eqn.outvars, carry, cotangent_aval)
        cts = gather(spread(cts, carry), self.steps.carried)
        results = self.steps.compiled(schedules[0], "backward")(token, list(xs), cts)
        where, on = frame(self.eqn), self.dependent_results(present_mask(seeds))
        return spread([forward_only(ct, where) for ct in results], on)

    def dependent_results(self, given: Mask) -> Mask:
        inputs = self._inputs_with_cotangent(submask(self.seeded, given))
        return tuple(gather(inputs, self.results))

    def _inputs_with_cotangent(self, seeded: Mask) -> Mask:
        """Return which inputs get a cotangent, if the `seeded` outputs have one."""
        consts, carry = self.steps.has_cotangent(seeded)
        carry = tuple(a and b for a, b in zip(carry, self.steps.carried, strict=True))
        return (*(False,) * self.body.n_cond, *consts, *carry)

    def _check_devices(self, stored: Mask) -> None:
        """Raise NotDifferentiable if the step count varies over devices and a value does not."""
        axes = self.body.cond.out_avals[0].mat.varying
        n_cond = self.body.n_cond
        triples = zip(self.eqn.invars[n_cond:], stored, self.results[n_cond:], strict=True)
        for v, is_stored, has_cotangent in triples:
            aval: Any = v.aval
            if (is_stored or has_cotangent) and not axes <= aval.mat.varying:
                names = tuple(sorted(map(str, axes - aval.mat.varying)))
                raise NotDifferentiable(
                    "reverse-mode derivative of while_loop in shard_map",
                    f"its number of steps varies along the mesh axes {names}, and an input of type "
                    f"{aval.str_short()} does not",
                    frame(self.eqn),
                    f"before the loop, let it vary: jax.lax.pcast(x, {names}, to='varying')",
                )


_WHILE = declare(While, "while", "structured", (), Traits(foldable=False),
                 supported_params=(
    "cond_jaxpr", "cond_nconsts", "body_jaxpr", "body_nconsts",
))  # fmt: skip
