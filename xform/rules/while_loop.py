"""`lax.while_loop` (and `fori_loop` with a traced trip count).

Forward mode carries tangents with the state. Reverse mode stores some states in the forward pass
(`checkpoints`), and differentiates each step when the backward pass reaches it; it saves nothing
else. Which carries are active, bring a cotangent, or must be stored are least fixpoints.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from xform._jax import JaxprEqn, Var, cotangent_aval, weak_as
from xform.errors import NotDifferentiable
from xform.interpret import emit
from xform.interpret.absent import present_derivatives
from xform.interpret.activity import path
from xform.interpret.checkpoints import SNAPSHOTS, States, in_lanes, run_backward, sweep
from xform.interpret.cost import flops
from xform.interpret.joint import Joint, Schedule, analyze, check_carried_dtypes
from xform.interpret.jvp import jvp
from xform.interpret.lanes import forward_only, while_loop
from xform.interpret.loop_state import needed_inputs, values_read
from xform.interpret.node import (
    Node,
    NodeWithoutResiduals,
    Schedules,
    Structured,
    gather,
    present_mask,
    spread,
    submask,
    user_equation,
)
from xform.passes.dce import live
from xform.program.arithmetic import Value, instantiate
from xform.program.ir import Mask, Program, evaluate, program
from xform.program.source import frame
from xform.registry.table import declare
from xform.registry.traits import Traits

# Effects that a recomputed step may repeat. Only prints of an inner loop are in fact repeated.
_REPEATABLE = frozenset(("NamedAxisEffect", "DebugEffect", "OrderedDebugEffect"))


def _either(a: Sequence[bool], b: Sequence[bool]) -> Mask:
    return tuple(x or y for x, y in zip(a, b, strict=True))


class _Loop:
    """The programs of a `while`, and its operands."""

    def __init__(self, eqn: JaxprEqn):
        params = eqn.params
        self.cond: Program = program(params["cond_jaxpr"])
        self.step: Program = program(params["body_jaxpr"])
        self.n_cond, self.n_step = params["cond_nconsts"], params["body_nconsts"]

    def parts(self, values: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """Split values into constants of the condition, constants of the body, and carries."""
        a, b = self.n_cond, self.n_cond + self.n_step
        return list(values[:a]), list(values[a:b]), list(values[b:])

    def active(self, active: Mask) -> Mask:
        """Return the carries that are active after some step."""
        _, consts, carry = self.parts(active)
        while True:
            grown = _either(carry, path(self.step, (*consts, *carry)).outputs)
            if grown == tuple(carry):
                return grown
            carry = grown

    def wanted(self, inside: Mask, wanted: Mask) -> Mask:
        """Return the carries that bring a cotangent after some step; `inside` are active inputs."""
        while True:
            before = path(self.step, inside, wanted).inputs[self.n_step :]
            grown = _either(wanted, before)
            if grown == wanted:
                return tuple(a and b for a, b in zip(inside[self.n_step :], grown, strict=True))
            wanted = grown

    def iterations_depend_on(self, moving: Sequence[bool]) -> bool:
        """Whether the number of steps depends on an input that is `moving`."""
        cond_consts, consts, carry = self.parts(moving)
        while True:
            grown = _either(carry, _reached(self.step, [*consts, *carry]))
            if list(grown) == carry:
                return _reached(self.cond, [*cond_consts, *carry])[0]
            carry = list(grown)


def _reached(prog: Program, inputs: Sequence[bool]) -> Mask:
    """Return which outputs of a program depend in any way on some of its inputs."""
    reached = set(gather(prog.inputs, inputs))
    for eqn in prog.equations:
        if any(isinstance(v, Var) and v in reached for v in eqn.invars):
            reached.update(eqn.outvars)
    return tuple(isinstance(v, Var) and v in reached for v in prog.outputs)


class While(Structured):
    """The rule of `lax.while_loop`."""

    def active(self, eqn: JaxprEqn, active: Mask) -> Mask:
        return _Loop(eqn).active(active)

    def useful(self, eqn: JaxprEqn, active: Mask, wanted: Mask) -> Mask:
        loop = _Loop(eqn)
        inside = (*loop.parts(active)[1], *loop.active(active))
        carry = loop.wanted(inside, wanted)
        consts = path(loop.step, inside, carry).inputs[: loop.n_step]
        inputs = (*(False,) * loop.n_cond, *consts, *carry)
        return tuple(a and b for a, b in zip(inputs, active, strict=True))

    def jvp(self, eqn: JaxprEqn, xs: Sequence[Value], dxs: Sequence[Value]):
        loop = _Loop(eqn)
        on = loop.active(tuple(dx is not None for dx in dxs))
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
        loop = _Loop(eqn)
        carry = loop.active(active)
        if push:
            results = tuple(a and b for a, b in zip(carry, wanted, strict=True))
            return _WhilePushNode(eqn, [], active, results, push)
        inside = (*loop.parts(active)[1], *carry)
        cts = loop.wanted(inside, wanted)
        joint = check_carried_dtypes(eqn, analyze(loop.step, inside, cts), len(loop.step.inputs))
        return _WhileNode(eqn, loop, joint, wanted, cts)


class _WhilePushNode(NodeWithoutResiduals):
    """A pushed while loop: the backward part runs the loop again, with tangents."""

    loop = True

    def backward(self, schedules: Schedules, token: Any, xs: Sequence[Value],
                 seeds: Sequence[Value], together: bool) -> list[Value]:  # fmt: skip
        _, dys = _WHILE.jvp(self.eqn, xs, spread(seeds, self.seeded))
        return gather(dys, self.results)


class _Steps:
    """A while loop in reverse mode: the Joint of one step, and which carries get cotangents.

    Its compiled functions are cached with the step's Program. So it holds no equation, because an
    equation has the jaxpr that keeps the Program alive.
    """

    def __init__(self, loop: _Loop, joint: Joint, cts: Mask):
        self.loop, self.joint, self.cts = loop, joint, cts
        self.slots = SNAPSHOTS.get()
        self.carried = dict(zip(joint.inputs[loop.n_step :], joint.outputs, strict=True))

    def needs(self, schedule: Schedule) -> tuple[set[Var], dict[Var, Var]]:
        """Return the inputs of a step from which its backward part computes all that it reads.

        Also return the outputs that the pullback of a step reads, by the carries that they become.
        They are the state after the step, which is available.
        """
        if "needs" not in schedule.cache:
            need = needed_inputs(schedule, self.carried)
            outputs = {
                v: y
                for v, y in self.carried.items()
                if v in need and isinstance(y, Var) and y in self.joint.producer
            }
            read = {*schedule.saved, *values_read(self.joint, schedule.saved, outputs.values())}
            ahead = {v: y for v, y in outputs.items() if y in read}
            schedule.cache["needs"] = needed_inputs(schedule, self.carried, ahead), ahead
        return schedule.cache["needs"]

    def stored(self, schedule: Schedule) -> Mask:
        """Which inputs of a step are stored: the needed carries that change."""
        need, _ = self.needs(schedule)
        return tuple(v in need and self.carried.get(v, v) is not v for v in self.joint.inputs)

    def ahead(self, schedule: Schedule) -> Mask:
        """Which of the stored carries are also read after a step."""
        _, ahead = self.needs(schedule)
        return tuple(v in ahead for v in gather(self.joint.inputs, self.stored(schedule)))

    def moving(self, given: Mask) -> tuple[Mask, Mask]:
        """Which constants and carries get a cotangent, if the `given` carries bring one."""
        carry = given
        while True:
            on = present_derivatives(self.joint, tuple(gather(carry, self.cts)))
            before = zip(on[self.loop.n_step :], self.cts, strict=True)
            grown = _either(carry, [a and b for a, b in before])
            if grown == carry:
                return on[: self.loop.n_step], carry
            carry = grown

    def compiled(self, schedule: Schedule, part: str) -> Any:
        """Return one part as a jitted function, made once, so that eager calls compile it once."""
        key = part, self.loop.cond
        if key not in schedule.cache:
            method = {"sweep": self._sweep, "back": self._back}[part]

            def run(*args: Any) -> Any:
                return method(schedule, *args)

            run.__name__ = f"while_{part}"
            schedule.cache[key] = jax.jit(run)
        return schedule.cache[key]

    def _sweep(self, schedule: Schedule, xs: list[Value]) -> tuple[list[Value], Any]:
        loop = self.loop
        cond_consts, consts, carry = loop.parts(xs)
        stored = self.stored(schedule)[loop.n_step :]
        ys, trail = sweep(
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
        return ys, (trail, gather(gather(ys, stored), self.ahead(schedule)))

    def _back(self, schedule: Schedule, token: Any, xs: list[Value], cts: States) -> list[Value]:
        joint, n = self.joint, self.loop.n_step
        stored, ahead = self.stored(schedule), self.ahead(schedule)
        outside = xs[self.loop.n_cond :]
        moving = gather(joint.outputs, stored[n:])
        outputs = gather(moving, ahead)
        consts, carry = self.moving(submask(self.cts, present_mask(cts)))

        def inputs(x: States) -> list[Value]:
            pairs = zip(spread(x, stored), outside, strict=True)
            return [b if a is None else a for a, b in pairs]

        def known(x: States) -> dict[Var, Value]:
            pairs = zip(joint.inputs, inputs(x), strict=True)
            return {v: x for v, x in pairs if x is not None}

        def step(x: States) -> States:
            with emit.recompute_scope():
                return emit.values(schedule, moving, known(x), effects=False)

        def pull(x: States, after: States, cts: States) -> tuple[States, States]:
            with emit.recompute_scope():
                kept = emit.values_by_variable(
                    schedule, schedule.saved, {**known(x), **dict(zip(outputs, after, strict=True))}
                )
            seeds = gather(spread(cts, carry), self.cts)
            out = emit.backward(schedule, list(kept.values()), inputs(x), seeds, True)
            full = spread(out, joint.results)
            before = instantiate(full[n:], joint.inputs[n:], carry, cotangent_aval)
            return before, gather(full[:n], consts)

        trail, last = token
        sums = instantiate([None] * n, joint.inputs[:n], consts, cotangent_aval)
        lanes = in_lanes(trail.lane_steps, step, pull)
        cts, sums = run_backward(
            trail, last, ahead, *lanes, gather(spread(cts, self.cts), carry), sums
        )
        return [*sums, *cts]


class _WhileNode(Node):
    """The node of a while loop in reverse mode. Its Joint is that of one step."""

    loop = True

    def __init__(self, eqn: JaxprEqn, loop: _Loop, joint: Joint, wanted: Mask, cts: Mask):
        self.body, self.steps = loop, _Steps(loop, joint, cts)
        super().__init__(eqn, [joint], wanted, self._moving(wanted), False)
        self.first_carry = loop.n_step
        self._check_effects()

    def iterations_depend_on(self, inputs: Mask) -> bool:
        return self.body.iterations_depend_on(inputs)

    def stacked_inputs(self, schedules: Schedules) -> Mask:
        return self.steps.stored(schedules[0])

    def token_values(self, schedule: Schedule) -> tuple[Var, ...]:
        return ()

    def stored_states(self, schedules: Schedules) -> list[int]:
        steps = self.steps
        _, ahead = steps.needs(schedules[0])
        inputs = zip(steps.joint.inputs, self.stacked_inputs(schedules), strict=True)
        return [(steps.slots + 1 + (v in ahead)) * on for v, on in inputs]

    def reads(self, schedules: Schedules) -> Mask:
        need, _ = self.steps.needs(schedules[0])
        inside = zip(self.steps.joint.inputs, self.stacked_inputs(schedules), strict=True)
        return (*(False,) * self.body.n_cond, *(v in need and not s for v, s in inside))

    def forward(self, schedules: Schedules, xs: Sequence[Value], used: Mask):
        self._check_devices(self.stacked_inputs(schedules))
        ys, token = self.steps.compiled(schedules[0], "sweep")(list(xs))
        where = frame(self.eqn)
        outs = zip(ys, self.eqn.outvars, used, strict=True)
        # Under `vmap` the outputs of a loop may lose their weak type.
        return [forward_only(weak_as(y, v.aval), where) if u else None for y, v, u in outs], token

    def backward(self, schedules: Schedules, token: Any, xs: Sequence[Value],
                 seeds: Sequence[Value], together: bool) -> list[Value]:  # fmt: skip
        _, carry = self.steps.moving(submask(self.seeded, present_mask(seeds)))
        cts = instantiate(spread(seeds, self.seeded), self.eqn.outvars, carry, cotangent_aval)
        cts = gather(spread(cts, carry), self.steps.cts)
        results = self.steps.compiled(schedules[0], "back")(token, list(xs), cts)
        where = frame(self.eqn)
        return spread(
            [forward_only(ct, where) for ct in results], self.dependent_results(present_mask(seeds))
        )

    def dependent_results(self, given: Mask) -> Mask:
        return tuple(gather(self._moving(submask(self.seeded, given)), self.results))

    def _moving(self, seeded: Mask) -> Mask:
        """Which inputs get a cotangent, if the `seeded` outputs bring one."""
        consts, carry = self.steps.moving(seeded)
        carry = tuple(a and b for a, b in zip(carry, self.steps.cts, strict=True))
        return (*(False,) * self.body.n_cond, *consts, *carry)

    def _check_effects(self) -> None:
        """Raise NotDifferentiable if a recompute would repeat an effect that may not repeat."""
        joint = self.steps.joint
        for eqn in live(joint.forward, joint.outputs, effects=False):
            kinds = {type(e).__name__ for e in user_equation(eqn).effects}
            if kinds - _REPEATABLE:
                raise NotDifferentiable(
                    "reverse-mode derivative of while_loop",
                    f"its body has effects ({', '.join(sorted(kinds))}), and the backward pass "
                    "runs the body again",
                    frame(eqn),
                    "move the operation with the effect out of the loop, or use lax.scan",
                )

    def _check_devices(self, stored: Mask) -> None:
        """Raise NotDifferentiable if the step count varies over devices and a value does not."""
        axes = self.body.cond.out_avals[0].mat.varying
        inside = self.eqn.invars[self.body.n_cond :]
        for v, a, b in zip(inside, stored, self.results[self.body.n_cond :], strict=True):
            aval: Any = v.aval
            if (a or b) and not axes <= aval.mat.varying:
                names = tuple(sorted(map(str, axes - aval.mat.varying)))
                raise NotDifferentiable(
                    "reverse-mode derivative of while_loop in shard_map",
                    f"its number of steps varies along the mesh axes {names}, and an input of type "
                    f"{aval.str_short()} does not",
                    frame(self.eqn),
                    f"before the loop, let it vary: jax.lax.pcast(x, {names}, to='varying')",
                )


def _flops(eqn: JaxprEqn) -> int:
    """Return the FLOPs of one iteration: the trip count is unknown."""
    return sum(flops(program(eqn.params[k])) for k in ("cond_jaxpr", "body_jaxpr"))


_WHILE = declare(While, "while", "structured", (), Traits(foldable=False, flops=_flops), known=(
    "cond_jaxpr", "cond_nconsts", "body_jaxpr", "body_nconsts",
))  # fmt: skip
