"""The rule of `lax.scan`, a loop whose number of iterations is known.

The *Joint* of the body is its forward and backward pass, traced as one program. A *schedule* says
which values of the forward pass are saved. The scan becomes two scans. The first runs the forward
pass of each iteration and stacks the saved values; these stacks are the *token*. The second runs
the backward passes from the token and the *seeds* (the cotangents of the outputs, or for
`linearize` the tangents of the inputs). To pull cotangents, the second scan runs in the direction
opposite to the first; to push tangents, it runs in the same direction.

Constants, scanned inputs, carries that never change and loop-invariant values are not stacked. Nor
are carries that the loop only moves between devices: the second scan moves them back
(`moved_carry`). If the schedule stores only some states of the loop, both scans are those of
`revolve`.

The base classes `Structured` and `Node` describe the methods (`xform.interpret.node`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from xform._jax import JaxprEqn, Var, cotangent_aval, scan_counts, scan_p
from xform.interpret import emit
from xform.interpret.absent import present_derivatives
from xform.interpret.activity import active_inside, wanted_through
from xform.interpret.joint import Joint, Schedule, analyze, check_carried_dtypes
from xform.interpret.jvp import jvp
from xform.interpret.loop_state import needed_inputs
from xform.interpret.node import Node, Schedules, Structured, gather, present_mask, spread, submask
from xform.passes.dce import live
from xform.passes.sum_in_loops import SumInLoops
from xform.program.arithmetic import Value, add, instantiate
from xform.program.dimensions import number
from xform.program.equation import scan_like, scan_options
from xform.program.flow import Body, BodyFunction, Flow
from xform.program.ir import Atom, Mask, program, union
from xform.registry.repeatable import repeatable
from xform.registry.table import declare
from xform.registry.traits import Traits
from xform.rules import revolve
from xform.rules.moved_carry import move_back, moved_carries
from xform.steering.own_layout import own_layout
from xform.steering.settings import steering


class _ScanBody:
    """A scan's body, and the positions of its constants, carries and scanned inputs."""

    def __init__(self, eqn: JaxprEqn):
        self.prog = program(eqn.params["jaxpr"])
        self.n_consts, self.n_carry = scan_counts(eqn.params)

    def parts(self, values: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """Split values into constants, carries and scanned inputs."""
        first_scanned = self.n_consts + self.n_carry
        carry = list(values[self.n_consts : first_scanned])
        return list(values[: self.n_consts]), carry, list(values[first_scanned:])


class HasCotangent(NamedTuple):
    """Which constants, carries and scanned inputs get a cotangent, and which ys have one.

    The ys are the stacked outputs of the scan.
    """

    consts: Mask
    carry: Mask
    scanned: Mask
    ys: Mask

    @property
    def inputs(self) -> Mask:
        """Which inputs get a cotangent, in the order of the inputs."""
        return (*self.consts, *self.carry, *self.scanned)


class Scan(Structured):
    """The rule of `lax.scan`."""

    def flow(self, eqn: JaxprEqn) -> Flow:
        n_consts, n_carry = scan_counts(eqn.params)
        first_scanned, n, m = n_consts + n_carry, len(eqn.invars), len(eqn.outvars)
        return Flow(
            (Body(program(eqn.params["jaxpr"]), range(n), range(m)),),
            carried={n_consts + r: r for r in range(n_carry)},
            scanned=frozenset(range(first_scanned, n)),
            stacked=frozenset(range(n_carry, m)),
            length=eqn.params["length"],
            reverse=eqn.params["reverse"],
        )

    def rebuild(self, eqn: JaxprEqn, xs: Sequence[Value], functions: Sequence[BodyFunction],
                each: Any = None) -> tuple[list[Value], Any]:  # fmt: skip
        (function,), (consts, start, scanned) = functions, _ScanBody(eqn).parts(xs)
        n = len(start)

        def step(carry: list[Value], x: Any) -> Any:
            slices, each = x
            ys, more = function([*consts, *carry, *slices], each)
            return ys[:n], (ys[n:], more)

        carry, (ys, more) = scan_like(eqn.params, step, start, (scanned, each))
        return [*carry, *ys], more

    def jvp_of(self, eqn: JaxprEqn, xs: Sequence[Value], dxs: Sequence[Value], wanted: Mask):
        body = _ScanBody(eqn)
        n_carry = body.n_carry
        outputs = self.active(eqn, tuple(dx is not None for dx in dxs))
        stacked = zip(outputs[n_carry:], wanted[n_carry:], strict=True)
        outputs = (*outputs[:n_carry], *(on and want for on, want in stacked))
        (consts, carry, scanned), (dconsts, dcarry, dscanned) = body.parts(xs), body.parts(dxs)
        _, variables, _ = body.parts(eqn.invars)
        dcarry = spread(instantiate(dcarry, variables, outputs[:n_carry]), outputs[:n_carry])

        def step(state: Any, x: Any):
            (carry, dcarry), (slices, dslices) = state, x
            args, tangents = [*consts, *carry, *slices], [*dconsts, *dcarry, *dslices]
            ys, dys = jvp(body.prog, args, tangents, wanted=outputs)
            dys = spread(instantiate(dys, body.prog.outputs, outputs), outputs)
            return (ys[:n_carry], dys[:n_carry]), (ys[n_carry:], dys[n_carry:])

        state, out = scan_like(eqn.params, step, (carry, dcarry), (scanned, dscanned))
        return [*state[0], *out[0]], [*state[1], *out[1]]

    def node(self, eqn: JaxprEqn, active: Mask, wanted: Mask, push: bool) -> Node:
        body = _ScanBody(eqn)
        flow = self.flow(eqn)
        body_wanted = wanted_through(flow, eqn, active, wanted)
        joint = analyze(body.prog, active_inside(flow, eqn, active), body_wanted, push)
        joint = check_carried_dtypes(eqn, joint, body.n_consts + body.n_carry)
        return _ScanNode(eqn, body, joint, active, wanted, body_wanted, push)


class _ScanNode(Node):
    """The node of a scan. Its forward and its backward part are a scan each.

    Attributes:
      body, joint: the body, and its Joint.
      carried: which carries have a tangent or cotangent that the second scan carries.
      unchanging: the inputs of the body that have the same value in every iteration.
      invariant: the forward values that are the same in every iteration.
      moved: the carries that an iteration only moves to other devices, with the equations that do.
    """

    loop = True

    def __init__(self, eqn: JaxprEqn, body: _ScanBody, joint: Joint, active: Mask, wanted: Mask,
                 body_wanted: Mask, push: bool):  # fmt: skip
        self.body, self.joint = body, joint
        self.iterations, self.options = number(eqn.params["length"]), scan_options(eqn.params)
        self.first_carry = body.n_consts
        n_carry = body.n_carry
        if push:
            consts, carry, scanned = body.parts(joint.seeded)
            self.carried = union(carry, joint.results[:n_carry])
            if not self.iterations:  # without iterations, the initial carry is the result
                self.carried = union(self.carried, body.parts(active)[1])
            seeded = (*consts, *self.carried, *scanned)
            results = (*self.carried, *joint.results[n_carry:])
        else:
            consts, _, scanned = body.parts(joint.results)
            self.carried = body_wanted[:n_carry]
            seeded = wanted
            results = (*consts, *self.carried, *scanned)
        super().__init__(eqn, [joint], seeded, results, push)
        if not push:  # a carry may get no cotangent, although other carries depend on it
            self.results = submask(results, self.dependent_results((True,) * sum(seeded)))
        consts, carry, _ = body.parts(joint.inputs)
        returned = [v for v, out in zip(carry, joint.outputs[:n_carry], strict=True) if v is out]
        self.unchanging = {*consts, *returned}
        self.invariant = self._invariant_values()
        pairs = zip(carry, joint.outputs[:n_carry], strict=True)
        self.moved = {} if push else moved_carries(pairs, joint.producer)

    def _invariant_values(self) -> set[Var]:
        values = {*self.unchanging, *(v for v, _ in self.joint.program.consts)}
        for eqn in self.joint.forward:
            if repeatable(eqn) and all(v in values for v in eqn.invars if isinstance(v, Var)):
                values.update(eqn.outvars)
        return values

    def _needs(self, schedule: Schedule) -> Mask:
        """Return which inputs of the body the backward pass reads, or recomputes values from."""
        if schedule.snapshots is None:
            return schedule.reads
        if "needs" not in schedule.cache:
            _, carry, _ = self.body.parts(self.joint.inputs)
            need = needed_inputs(schedule, dict(zip(carry, self.joint.outputs, strict=False)))
            schedule.cache["needs"] = tuple(v in need for v in self.joint.inputs)
        return schedule.cache["needs"]

    def stacked_inputs(self, schedules: Schedules) -> Mask:
        _, carry, _ = self.body.parts(self.joint.inputs)
        moved = self.moved if schedules[0].snapshots is None else {}
        changing = {v for v in carry if v not in self.unchanging and v not in moved}
        inputs = zip(self.joint.inputs, self._needs(schedules[0]), strict=True)
        return tuple(on and v in changing for v, on in inputs)

    def stored_states(self, schedules: Schedules) -> list[int]:
        slots = schedules[0].snapshots
        states = self.iterations if slots is None else slots + 1
        pairs = zip(self.stacked_inputs(schedules), self.moved_back(schedules[0]), strict=True)
        return [states * stacked + moved for stacked, moved in pairs]

    def token_values(self, schedule: Schedule) -> tuple[Var, ...]:
        return schedule.saved if schedule.snapshots is None else ()

    def reads(self, schedules: Schedules) -> Mask:
        in_token = union(self.stacked_inputs(schedules), self.moved_back(schedules[0]))
        return tuple(a and not b for a, b in zip(self._needs(schedules[0]), in_token, strict=True))

    def hoisted_values(self, schedule: Schedule) -> Mask:
        """Return which saved values are loop-invariant, or last values that are moved back."""
        once = self.invariant | self._moved_saves(schedule).keys()
        return tuple(v in once for v in schedule.saved)

    def moved_back(self, schedule: Schedule) -> Mask:
        if schedule.snapshots is not None or not self.moved:
            return (False,) * len(self.joint.inputs)
        read_after = self._moved_saves(schedule).values()
        inputs = zip(self.joint.inputs, self._needs(schedule), strict=True)
        return tuple(v in self.moved and (on or v in read_after) for v, on in inputs)

    def moved_outputs(self) -> Mask:
        after = {eqn.outvars[0] for eqn in self.moved.values()}
        return tuple(isinstance(v, Var) and v in after for v in self.joint.outputs)

    def _moved_saves(self, schedule: Schedule) -> dict[Var, Var]:
        """Return the saved values that are a moved carry in the next iteration, with that carry."""
        if schedule.snapshots is not None or not self.moved:
            return {}
        after = {eqn.outvars[0]: v for v, eqn in self.moved.items()}
        saved = set(schedule.saved) - schedule.offloaded.keys()
        return {v: carry for v, carry in after.items() if v in saved}

    def dependent_results(self, given: Mask) -> Mask:
        return tuple(gather(self.has_cotangent(given).inputs, self.results))

    def has_cotangent(self, given: Mask) -> HasCotangent:
        """Return what gets a cotangent in some iteration, if the `given` seeds are present."""
        n_carry, full = self.body.n_carry, submask(self.seeded, given)
        carry, ys = full[:n_carry], tuple(gather(full[n_carry:], self.seeded[n_carry:]))
        while True:
            on = present_derivatives(self.joint, (*gather(carry, self.carried), *ys))
            consts, before, scanned = self.body.parts(on)
            before = [a and b for a, b in zip(before, self.carried, strict=True)]
            grown = union(carry, before)
            if grown == carry:
                return HasCotangent(tuple(consts), carry, tuple(scanned), ys)
            carry = grown

    def as_results(self, cts: Sequence[Value], on: HasCotangent) -> list[Value]:
        """Return the results of the node, from the cotangents of the inputs that get one."""
        return gather(spread(cts, on.inputs), self.results)

    def forward(self, schedules: Schedules, xs: Sequence[Value], used: Mask):
        (schedule,), joint, n_carry = schedules, self.joint, self.body.n_carry
        if schedule.snapshots is not None:
            return revolve.forward(self, schedule, schedule.snapshots, xs, used)
        is_hoisted = self.hoisted_values(schedule)
        moved_saves = self._moved_saves(schedule)
        _, moved, _ = self.body.parts(self.moved_back(schedule))
        invariant = [v for v in gather(schedule.saved, is_hoisted) if v not in moved_saves]
        hoisted = emit.values_by_variable(
            schedule, invariant, dict(zip(joint.inputs, xs, strict=True))
        )
        stacked = [v for v, on in zip(schedule.saved, is_hoisted, strict=True) if not on]
        states = gather(joint.inputs, self.stacked_inputs(schedules))
        ys = gather(joint.outputs[n_carry:], used[n_carry:])
        needed = union(used[:n_carry], moved)
        carried = self.live_carry(needed, [*ys, *states, *stacked], hoisted)
        # A value that is both an output and saved is stacked once, unless it is offloaded.
        keys = [(id(v), False) for v in ys]
        keys += [(id(v), v in schedule.offloaded) for v in (*states, *stacked)]
        by_key = dict(zip(keys, (*ys, *states, *stacked), strict=True))
        carries = gather(joint.outputs[:n_carry], carried)
        consts, carry, scanned = self.body.parts(xs)

        def step(state: list[Value], slices: list[Value]):
            ins = [*consts, *spread(state, carried), *map(own_layout, slices)]
            env = {v: x for v, x in zip(joint.inputs, ins, strict=True) if x is not None}
            out = emit.values(schedule, [*carries, *by_key.values()], {**env, **hoisted})
            pairs = zip(by_key.items(), out[len(carries) :], strict=True)
            return out[: len(carries)], [
                emit.transfer(schedule, v, x) if offload else own_layout(x)
                for ((_, offload), v), x in pairs
            ]

        final, stacks = scan_like(self.options, step, gather(carry, carried), scanned)
        stack = dict(zip(by_key, stacks, strict=True))
        last = spread(final, carried)
        outs = [x if u else None for x, u in zip(last, used[:n_carry], strict=True)]
        saved_once = [emit.transfer(schedule, v, x) for v, x in hoisted.items()]
        token = saved_once, [stack[k] for k in keys[len(ys) :]], gather(last, moved)
        return [*outs, *spread([stack[k] for k in keys[: len(ys)]], used[n_carry:])], token

    def live_carry(self, used: Mask, wanted: Sequence[Atom], known: dict[Var, Value]) -> Mask:
        """Return which carries are used, or needed for the wanted values. Others are dropped."""
        joint, n_carry = self.joint, self.body.n_carry
        _, carry, _ = self.body.parts(joint.inputs)
        on = tuple(used)
        while True:
            goal = [*gather(joint.outputs[:n_carry], on), *wanted]
            need = {v for v in goal if isinstance(v, Var)}
            for eqn in live(joint.forward, goal, known):
                need.update(v for v in eqn.invars if isinstance(v, Var))
            grown = union(on, [v in need for v in carry])
            if grown == on:
                return on
            on = grown

    def backward(self, schedules: Schedules, token: Any, xs: Sequence[Value],
                 seeds: Sequence[Value], together: bool) -> list[Value]:  # fmt: skip
        run = self._push if self.push else self._pull
        (schedule,), body = schedules, self.body
        if schedule.snapshots is not None:
            return revolve.backward(self, schedule, schedule.snapshots, token, xs, seeds)
        saved_once, stacks, last = token
        consts, initial_carry, scanned = body.parts(xs)
        states, moved = self.stacked_inputs(schedules), self.moved_back(schedule)
        is_hoisted, moved_saves = self.hoisted_values(schedule), self._moved_saves(schedule)
        moved_carries = gather(self.joint.inputs, moved)

        def body_backward(slices: list[Value], scanned: list[Value], seeds: list[Value],
                          after: list[Value]) -> tuple[list[Value], list[Value]]:  # fmt: skip
            """Run the body's backward pass in one iteration; a zero result is None.

            `slices` are the parts of the stacks for this iteration. `after` are the moved carries
            after this iteration. They are also returned as they were before it.
            """
            n = sum(states)
            slices, scanned = list(map(own_layout, slices)), list(map(own_layout, scanned))
            pairs = zip(gather(schedule.joint.inputs, states), slices[:n], strict=True)
            stored = [emit.transfer(schedule, v, x, back=True) for v, x in pairs]
            pairs = zip(moved_carries, after, strict=True)
            before = [move_back(self.moved[v], x) for v, x in pairs]
            of_iteration = zip(spread(stored, states), spread(before, moved), strict=True)
            parts = body.parts([b if a is None else a for a, b in of_iteration])[1]
            carry = [b if a is None else a for a, b in zip(initial_carry, parts, strict=True)]
            own, once = iter(slices[n:]), iter(saved_once)
            next_carry = dict(zip(moved_carries, after, strict=True))
            saved = [
                next_carry[moved_saves[v]] if v in moved_saves else next(once) if on else next(own)
                for v, on in zip(schedule.saved, is_hoisted, strict=True)
            ]
            args = [*consts, *carry, *scanned]
            results = emit.backward(schedule, saved, args, seeds, False, whole=True)
            return spread(results, self.joint.results), before

        return run(body_backward, (stacks, scanned), list(seeds), last)

    def _pull(self, body_backward: Any, inputs: Any, seeds: list[Value], last: list[Value]
              ) -> list[Value]:  # fmt: skip
        """Run the backward scan for cotangents.

        `inputs` are the stacks and the scanned inputs. `last` are the moved carries at the end.
        """
        body, on = self.body, self.has_cotangent(present_mask(seeds))
        state, sums, ct_ys = self.initial_cts(seeds, on)

        def step(state: Any, x: Any):
            (carry, sums, after), (slices, xs, ct_ys) = state, x
            full, before = body_backward(slices, xs, self.step_seeds(carry, ct_ys, on), after)
            ct_consts, ct_carry, ct_scanned = body.parts(full)
            pairs = zip(sums, gather(ct_consts, on.consts), strict=True)
            sums = [add([s, ct]) for s, ct in pairs]
            ct_slices = list(map(own_layout, gather(ct_scanned, on.scanned)))
            return (self.carried_cts(ct_carry, on), sums, before), ct_slices

        inner_loops = any(eqn.primitive is scan_p for eqn in body.prog.equations)
        if sums and inner_loops and steering().sums_in_loops:
            step = SumInLoops()(step)
        options = {**self.options, "reverse": not self.options["reverse"]}
        (carry, sums, _), out = scan_like(options, step, (state, sums, last), (*inputs, ct_ys))
        return self.as_results([*sums, *carry, *out], on)

    def initial_cts(self, seeds: Sequence[Value], on: HasCotangent
                    ) -> tuple[list[Value], list[Value], list[Value]]:  # fmt: skip
        """Return cotangents of the last state, zeros for the constants, cotangents of the ys."""
        cts, n_carry = spread(seeds, self.seeded), self.body.n_carry
        consts = self.body.parts(self.eqn.invars)[0]
        return (
            instantiate(cts[:n_carry], self.eqn.outvars[:n_carry], on.carry, cotangent_aval),
            instantiate([None] * len(consts), consts, on.consts, cotangent_aval),
            [ct for ct in cts[n_carry:] if ct is not None],
        )

    def step_seeds(
        self, carry: Sequence[Value], ct_ys: Sequence[Value], on: HasCotangent
    ) -> list[Value]:
        """Return the seeds of the body's Joint in one iteration; None if absent."""
        return [*gather(spread(carry, on.carry), self.carried), *spread(ct_ys, on.ys)]

    def carried_cts(self, cts: Sequence[Value], on: HasCotangent) -> list[Value]:
        """Return the cotangents that an iteration passes on to the one before it."""
        _, carry, _ = self.body.parts(self.body.prog.inputs)
        return instantiate(cts, carry, on.carry, cotangent_aval)

    def _push(self, body_backward: Any, inputs: Any, seeds: list[Value], _: list[Value]
              ) -> list[Value]:  # fmt: skip
        """Run the backward scan for tangents. `inputs` are the stacks and the scanned inputs."""
        body, n_carry = self.body, self.body.n_carry
        present = lambda dxs: [dx for dx in dxs if dx is not None]
        dconsts, dcarry, dscanned = map(present, body.parts(spread(seeds, self.seeded)))
        seeded_carry = body.parts(self.joint.seeded)[1]

        def step(dcarry: list[Value], x: Any):
            slices, xs, dxs = x
            body_dcarry = gather(spread(dcarry, self.carried), seeded_carry)
            full, _ = body_backward(slices, xs, [*dconsts, *body_dcarry, *dxs], [])
            new = instantiate(full[:n_carry], body.prog.outputs[:n_carry], self.carried)
            return new, gather(full[n_carry:], self.joint.results[n_carry:])

        carry, out = scan_like(self.options, step, dcarry, (*inputs, dscanned))
        return [*carry, *out]


declare(Scan, "scan", "structured", (), Traits(foldable=False), supported_params=(
    "jaxpr", "length", "reverse", "unroll", "num_consts", "num_carry", "ft_in", "ft_out",
    "_split_transpose",
))  # fmt: skip
