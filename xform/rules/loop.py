"""`lax.scan`: loops whose number of steps is known.

A scan's Joint is that of its body. Which carries are active, and which bring a cotangent, are least
fixpoints, because a carry that starts from a constant may become active in a later iteration. The
forward part is one scan that stacks the values that the schedule saves. The backward part is one
scan in the other direction (in the same direction for a push). Constants, scanned inputs, carries
that never change and saved loop-invariant values are taken from outside and never stacked. If the
schedule stores only some states, both parts are those of `revolve`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from jax import lax

from xform._jax import JaxprEqn, Var, cotangent_aval, has_effects, scan_counts
from xform.interpret import emit
from xform.interpret.absent import present_derivatives
from xform.interpret.activity import path
from xform.interpret.cost import flops
from xform.interpret.joint import Joint, Schedule, analyze, check_carried_dtypes
from xform.interpret.jvp import jvp
from xform.interpret.loop_state import needed_inputs
from xform.interpret.node import Node, Schedules, Structured, gather, present_mask, spread, submask
from xform.passes.dce import live
from xform.program.arithmetic import Value, add, instantiate
from xform.program.equation import scan_options
from xform.program.ir import Atom, Mask, Program, program
from xform.registry.table import declare
from xform.registry.traits import Traits
from xform.rules import revolve


def _either(a: Sequence[bool], b: Sequence[bool]) -> Mask:
    return tuple(x or y for x, y in zip(a, b, strict=True))


class _Body:
    """A scan's body, and the positions of its constants, carries and scanned inputs."""

    def __init__(self, eqn: JaxprEqn):
        self.prog: Program = program(eqn.params["jaxpr"])
        self.n_consts, self.n_carry = scan_counts(eqn.params)

    def parts(self, values: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """Split values into constants, carries and scanned inputs."""
        a, b = self.n_consts, self.n_consts + self.n_carry
        return list(values[:a]), list(values[a:b]), list(values[b:])

    def active(self, active: Mask) -> tuple[Mask, Mask]:
        """Return the inputs and outputs that are active in some iteration."""
        while True:
            outs = path(self.prog, active).outputs
            consts, carry, seq = self.parts(active)
            grown = _either(carry, outs[: self.n_carry])
            if grown == tuple(carry):
                return active, (*grown, *outs[self.n_carry :])
            active = (*consts, *grown, *seq)

    def wanted(self, active: Mask, wanted: Mask) -> Mask:
        """Return the outputs that bring a cotangent in some iteration, of `active` inputs."""
        active, outs = self.active(active)
        while True:
            _, back, _ = self.parts(path(self.prog, active, wanted).inputs)
            grown = (*_either(wanted[: self.n_carry], back), *wanted[self.n_carry :])
            if grown == wanted:
                return tuple(w and o for w, o in zip(wanted, outs, strict=True))
            wanted = grown


class Moving(NamedTuple):
    """Which constants, carries and scanned inputs get a cotangent, and which ys bring one."""

    consts: Mask
    carry: Mask
    seq: Mask
    ys: Mask

    @property
    def inputs(self) -> Mask:
        """Which inputs get a cotangent, in the order of the inputs."""
        return (*self.consts, *self.carry, *self.seq)


class Scan(Structured):
    """The rule of `lax.scan`."""

    def active(self, eqn: JaxprEqn, active: Mask) -> Mask:
        return _Body(eqn).active(active)[1]

    def useful(self, eqn: JaxprEqn, active: Mask, wanted: Mask) -> Mask:
        body = _Body(eqn)
        inside = body.wanted(active, wanted)
        consts, _, seq = body.parts(path(body.prog, body.active(active)[0], inside).inputs)
        inputs = (*consts, *inside[: body.n_carry], *seq)
        return tuple(a and b for a, b in zip(inputs, active, strict=True))

    def jvp_of(self, eqn: JaxprEqn, xs: Sequence[Value], dxs: Sequence[Value], wanted: Mask):
        body = _Body(eqn)
        nk = body.n_carry
        _, outputs = body.active(tuple(dx is not None for dx in dxs))
        stacked = zip(outputs[nk:], wanted[nk:], strict=True)
        outputs = (*outputs[:nk], *(on and want for on, want in stacked))
        (consts, carry, seq), (dconsts, dcarry, dseq) = body.parts(xs), body.parts(dxs)
        _, variables, _ = body.parts(eqn.invars)
        dcarry = spread(instantiate(dcarry, variables, outputs[:nk]), outputs[:nk])

        def step(state: Any, x: Any):
            (carry, dcarry), (seq, dseq) = state, x
            args, tangents = [*consts, *carry, *seq], [*dconsts, *dcarry, *dseq]
            ys, dys = jvp(body.prog, args, tangents, wanted=outputs)
            dys = spread(instantiate(dys, body.prog.outputs, outputs), outputs)
            return (ys[:nk], dys[:nk]), (ys[nk:], dys[nk:])

        state, out = lax.scan(step, (carry, dcarry), (seq, dseq), **scan_options(eqn.params))
        return [*state[0], *out[0]], [*state[1], *out[1]]

    def node(self, eqn: JaxprEqn, active: Mask, wanted: Mask, push: bool) -> Node:
        body = _Body(eqn)
        inside = body.wanted(active, wanted)
        joint = analyze(body.prog, body.active(active)[0], inside, push)
        joint = check_carried_dtypes(eqn, joint, body.n_consts + body.n_carry)
        return _ScanNode(eqn, body, joint, active, wanted, inside, push)


class _ScanNode(Node):
    """A scan that carries a derivative."""

    loop = True

    def __init__(self, eqn: JaxprEqn, body: _Body, joint: Joint, active: Mask, wanted: Mask,
                 inside: Mask, push: bool):  # fmt: skip
        self.body, self.joint = body, joint
        self.iterations, self.options = eqn.params["length"], scan_options(eqn.params)
        self.first_carry = body.n_consts
        nk = body.n_carry
        if push:
            consts, carry, seq = body.parts(joint.seeded)
            self.carried = _either(carry, joint.results[:nk])
            if not self.iterations:  # without iterations, the initial carry is the result
                self.carried = _either(self.carried, body.parts(active)[1])
            seeded = (*consts, *self.carried, *seq)
            results = (*self.carried, *joint.results[nk:])
        else:
            consts, _, seq = body.parts(joint.results)
            self.carried = inside[:nk]
            seeded = wanted
            results = (*consts, *self.carried, *seq)
        super().__init__(eqn, [joint], seeded, results, push)
        if not push:  # a carry may depend on others, but on none of their cotangents
            self.results = submask(results, self.dependent_results((True,) * sum(seeded)))
        consts, carry, _ = body.parts(joint.inputs)
        kept = [v for v, out in zip(carry, joint.outputs[:nk], strict=True) if v is out]
        self.fixed = {*consts, *kept}
        self.invariant = self._invariant()

    def _invariant(self) -> set[Var]:
        """Return the forward values that are the same in every iteration."""
        known = {*self.fixed, *(v for v, _ in self.joint.program.consts)}
        for eqn in self.joint.forward:
            if not has_effects(eqn) and all(v in known for v in eqn.invars if isinstance(v, Var)):
                known.update(eqn.outvars)
        return known

    def _needs(self, schedule: Schedule) -> Mask:
        """Which inputs of the body the backward part needs, in any iteration."""
        if schedule.snapshots is None:
            return schedule.reads
        if "needs" not in schedule.cache:
            _, carry, _ = self.body.parts(self.joint.inputs)
            need = needed_inputs(schedule, dict(zip(carry, self.joint.outputs, strict=False)))
            schedule.cache["needs"] = tuple(v in need for v in self.joint.inputs)
        return schedule.cache["needs"]

    def stacked_inputs(self, schedules: Schedules) -> Mask:
        _, carry, _ = self.body.parts(self.joint.inputs)
        changing = {v for v in carry if v not in self.fixed}
        inputs = zip(self.joint.inputs, self._needs(schedules[0]), strict=True)
        return tuple(on and v in changing for v, on in inputs)

    def stored_states(self, schedules: Schedules) -> list[int]:
        slots = schedules[0].snapshots
        return [
            (self.iterations if slots is None else slots + 1) * on
            for on in self.stacked_inputs(schedules)
        ]

    def token_values(self, schedule: Schedule) -> tuple[Var, ...]:
        return schedule.saved if schedule.snapshots is None else ()

    def reads(self, schedules: Schedules) -> Mask:
        needs = self._needs(schedules[0])
        return tuple(
            a and not b for a, b in zip(needs, self.stacked_inputs(schedules), strict=True)
        )

    def hoisted_values(self, schedule: Schedule) -> Mask:
        """Which saved values are loop-invariant."""
        return tuple(v in self.invariant for v in schedule.saved)

    def dependent_results(self, given: Mask) -> Mask:
        return tuple(gather(self.moving(given).inputs, self.results))

    def moving(self, given: Mask) -> Moving:
        """Return what gets a cotangent in some iteration, if the `given` seeds are present."""
        nk, full = self.body.n_carry, submask(self.seeded, given)
        carry, ys = full[:nk], tuple(gather(full[nk:], self.seeded[nk:]))
        while True:
            on = present_derivatives(self.joint, (*gather(carry, self.carried), *ys))
            consts, before, seq = self.body.parts(on)
            before = [a and b for a, b in zip(before, self.carried, strict=True)]
            grown = _either(carry, before)
            if grown == carry:
                return Moving(tuple(consts), carry, tuple(seq), ys)
            carry = grown

    def as_results(self, cts: Sequence[Value], on: Moving) -> list[Value]:
        """Return the results of the node, from the cotangents of the inputs that get one."""
        return gather(spread(cts, on.inputs), self.results)

    def forward(self, schedules: Schedules, xs: Sequence[Value], used: Mask):
        (schedule,), joint, nk = schedules, self.joint, self.body.n_carry
        if schedule.snapshots is not None:
            return revolve.forward(self, schedule, schedule.snapshots, xs, used)
        on = self.hoisted_values(schedule)
        once = emit.values_by_variable(
            schedule, gather(schedule.saved, on), dict(zip(joint.inputs, xs, strict=True))
        )
        moved = [v for v, o in zip(schedule.saved, on, strict=True) if not o]
        states = gather(joint.inputs, self.stacked_inputs(schedules))
        ys = gather(joint.outputs[nk:], used[nk:])
        carried = self.live_carry(used[:nk], [*ys, *states, *moved], once)
        # A value that is both an output and saved is stacked once, unless it is offloaded.
        keys = [(id(v), False) for v in ys]
        keys += [(id(v), v in schedule.offloaded) for v in (*states, *moved)]
        slots = dict(zip(keys, (*ys, *states, *moved), strict=True))
        carries = gather(joint.outputs[:nk], carried)
        consts, carry, seq = self.body.parts(xs)

        def step(state: list[Value], seq: list[Value]):
            ins = [*consts, *spread(state, carried), *seq]
            env = {v: x for v, x in zip(joint.inputs, ins, strict=True) if x is not None}
            out = emit.values(schedule, [*carries, *slots.values()], {**env, **once})
            pairs = zip(slots.items(), out[len(carries) :], strict=True)
            return out[: len(carries)], [
                emit.transfer(schedule, v, x) if moves else x for ((_, moves), v), x in pairs
            ]

        final, stacks = lax.scan(step, gather(carry, carried), seq, **self.options)
        stack = dict(zip(slots, stacks, strict=True))
        last = spread(final, carried)
        outs = [x if u else None for x, u in zip(last, used[:nk], strict=True)]
        hoisted = [emit.transfer(schedule, v, x) for v, x in once.items()]
        token = hoisted, [stack[k] for k in keys[len(ys) :]]
        return [*outs, *spread([stack[k] for k in keys[: len(ys)]], used[nk:])], token

    def live_carry(self, used: Mask, wanted: Sequence[Atom], once: dict[Var, Value]) -> Mask:
        """Which carries the wanted values need; the others are dropped from the loop."""
        joint, nk = self.joint, self.body.n_carry
        _, carry, _ = self.body.parts(joint.inputs)
        on = tuple(used)
        while True:
            goal = [*gather(joint.outputs[:nk], on), *wanted]
            need = {v for v in goal if isinstance(v, Var)}
            for eqn in live(joint.forward, goal, once):
                need.update(v for v in eqn.invars if isinstance(v, Var))
            grown = _either(on, [v in need for v in carry])
            if grown == on:
                return on
            on = grown

    def backward(self, schedules: Schedules, token: Any, xs: Sequence[Value],
                 seeds: Sequence[Value], together: bool) -> list[Value]:  # fmt: skip
        run = self._push if self.push else self._pull
        (schedule,), body = schedules, self.body
        if schedule.snapshots is not None:
            return revolve.backward(self, schedule, schedule.snapshots, token, xs, seeds)
        once, stack = token
        consts, fixed, seq = body.parts(xs)
        states = self.stacked_inputs(schedules)
        on = self.hoisted_values(schedule)

        def inside(slices: list[Value], seq: list[Value], seeds: list[Value]) -> list[Value]:
            """Run the body's backward part in one iteration; a zero result is None."""
            n = sum(states)
            pairs = zip(gather(schedule.joint.inputs, states), slices[:n], strict=True)
            back = [emit.transfer(schedule, v, x, back=True) for v, x in pairs]
            carry = [
                b if a is None else a
                for a, b in zip(fixed, body.parts(spread(back, states))[1], strict=True)
            ]
            rest, hoisted = iter(slices[n:]), iter(once)
            kept = [next(hoisted) if o else next(rest) for o in on]
            args = [*consts, *carry, *seq]
            return spread(
                emit.backward(schedule, kept, args, seeds, False, whole=True), self.joint.results
            )

        return run(inside, (stack, seq), list(seeds))

    def _pull(self, inside: Any, streams: Any, seeds: list[Value]) -> list[Value]:
        body, on = self.body, self.moving(present_mask(seeds))
        state, sums, ct_ys = self.starts(seeds, on)

        def step(state: Any, x: Any):
            (carry, sums), (stack, xs, ct_ys) = state, x
            full = inside(stack, xs, self.step_seeds(carry, ct_ys, on))
            ct_consts, ct_carry, ct_seq = body.parts(full)
            pairs = zip(sums, gather(ct_consts, on.consts), strict=True)
            sums = [add([s, ct]) for s, ct in pairs]
            return (self.next_cts(ct_carry, on), sums), gather(ct_seq, on.seq)

        options = {**self.options, "reverse": not self.options["reverse"]}
        (carry, sums), out = lax.scan(step, (state, sums), (*streams, ct_ys), **options)
        return self.as_results([*sums, *carry, *out], on)

    def starts(self, seeds: Sequence[Value], on: Moving
               ) -> tuple[list[Value], list[Value], list[Value]]:  # fmt: skip
        """Return cotangents of the last state, zeros for the constants, cotangents of the ys."""
        cts, nk = spread(seeds, self.seeded), self.body.n_carry
        consts = self.body.parts(self.eqn.invars)[0]
        return (
            instantiate(cts[:nk], self.eqn.outvars[:nk], on.carry, cotangent_aval),
            instantiate([None] * len(consts), consts, on.consts, cotangent_aval),
            [ct for ct in cts[nk:] if ct is not None],
        )

    def step_seeds(self, carry: Sequence[Value], ct_ys: Sequence[Value], on: Moving) -> list[Value]:
        """Return the seeds of the body's Joint in one iteration; None if absent."""
        return [*gather(spread(carry, on.carry), self.carried), *spread(ct_ys, on.ys)]

    def next_cts(self, cts: Sequence[Value], on: Moving) -> list[Value]:
        """Return the cotangents that an iteration passes on to the one before it."""
        _, carry, _ = self.body.parts(self.body.prog.inputs)
        return instantiate(cts, carry, on.carry, cotangent_aval)

    def _push(self, inside: Any, streams: Any, seeds: list[Value]) -> list[Value]:
        body, nk = self.body, self.body.n_carry
        dconsts, dcarry, dseq = body.parts(spread(seeds, self.seeded))
        takes = body.parts(self.joint.seeded)[1]
        gives = self.joint.results[nk:]

        def step(state: list[Value], x: Any):
            stack, xs, dxs = x
            dcarry = gather(spread(state, self.carried), takes)
            const_tangents = [dx for dx in dconsts if dx is not None]
            full = inside(stack, xs, [*const_tangents, *dcarry, *dxs])
            new = instantiate(full[:nk], body.prog.outputs[:nk], self.carried)
            return new, gather(full[nk:], gives)

        start = [dx for dx in dcarry if dx is not None]
        seq_tangents = [dx for dx in dseq if dx is not None]
        carry, out = lax.scan(step, start, (*streams, seq_tangents), **self.options)
        return [*carry, *out]


def _flops(eqn: JaxprEqn) -> int:
    """Return the FLOPs of all iterations."""
    return eqn.params["length"] * flops(program(eqn.params["jaxpr"]))


declare(Scan, "scan", "structured", (), Traits(foldable=False, flops=_flops), known=(
    "jaxpr", "length", "reverse", "unroll", "num_consts", "num_carry", "ft_in", "ft_out",
    "_split_transpose",
))  # fmt: skip
