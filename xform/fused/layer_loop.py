"""Run a backward loop over layers together with the update of the layers.

The `scan` of the backward pass stacks the gradients of its layers. The loop here carries the stacks
of parameters and optimizer state instead. Each iteration computes the gradient of one layer, and
overwrites that layer of the carried stacks. So no stack of gradients exists, and XLA updates the
donated arguments in place.

XLA overwrites a layer of a stack in place only if nothing reads the old layer afterwards. XLA also
computes a value twice if two results need it. For example, the new parameter of Adam needs the new
moments, and these need the old moments. So the results of a layer are written one after the other:
the moments first, and the parameter from the moments that are read back. Lion's parameter needs the
old moment, so it is written before the moment.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from xform._jax import JaxprEqn, Var, scan_counts
from xform.fused.layer_axis import slice_equation
from xform.fused.layers import LayerTarget, LeafUpdate, Sliced
from xform.program.arrays import zeros
from xform.program.equation import context, scan_like, scan_options
from xform.program.ir import Atom, evaluate, program, read
from xform.program.source import name_stack, source
from xform.steering.barrier import barrier

Read = Callable[[Atom], Any]


@dataclasses.dataclass(frozen=True, eq=False)
class BackwardLoop:
    """A backward scan, and the updates that run in it.

    Attributes:
      scan: the equation of the scan.
      updates: the updates of leaves.
      first: values to compute before the loop starts, because their equations read stacks that the
        loop overwrites. Values that the loop itself depends on are not listed.
      dropped: the stacked outputs of the scan that nothing else reads.
      carried: for each stack that the scan runs over and that the loop overwrites, the input that
        holds it, and the sharding constraints between them.
    """

    scan: JaxprEqn
    updates: tuple[LeafUpdate, ...]
    first: tuple[Var, ...]
    dropped: frozenset[Var]
    carried: dict[Var, tuple[Var, tuple[JaxprEqn, ...]]]

    @property
    def reads(self) -> list[Atom]:
        """The values that the loop reads."""
        of_updates = [v for u in self.updates for v in (*u.stacks, *u.before)]
        of_scan = [v for v in self.scan.invars if not isinstance(v, Var) or v not in self.carried]
        return [*of_scan, *of_updates, *self.first]

    @property
    def makes(self) -> list[Var]:
        """The values that the loop computes: outputs of the scan, new stacks, sums."""
        targets = [t.new for u in self.updates for t in u.targets]
        sums = [v for u in self.updates for e in u.sums for v in e.outvars]
        kept = [v for v in self.scan.outvars if v not in self.dropped]
        return [*kept, *targets, *sums]

    def run(self, value_of: Read) -> dict[Var, Any]:
        """Run the loop; return the values that it makes. `value_of` returns the values it reads."""
        with source(self.scan, name_stack()), context(self.scan):
            return self._run(value_of)

    def _run(self, value_of: Read) -> dict[Var, Any]:
        scan, (n_consts, n_carry) = self.scan, scan_counts(self.scan.params)
        body, options = program(scan.params["jaxpr"]), scan_options(scan.params)
        length, reverse = options["length"], options["reverse"]
        first_scanned = n_consts + n_carry
        targets = [t for u in self.updates for t in u.targets]
        sums = [v for u in self.updates for e in u.sums for v in e.outvars]
        overwritten = {t.old: value_of(t.old) for t in targets}
        stacks = {v: value_of(v) for u in self.updates for v in u.stacks if v not in overwritten}
        before = {v: value_of(v) for u in self.updates for v in u.before}
        values = [value_of(v) for v in scan.invars[:first_scanned]]
        consts, carry = values[:n_consts], values[n_consts:]
        own = [self.carried.get(v) if isinstance(v, Var) else None
               for v in scan.invars[first_scanned:]]  # fmt: skip
        scanned = zip(scan.invars[first_scanned:], own, strict=True)
        xs = [value_of(v) for v, origin in scanned if origin is None]
        kept = [v not in self.dropped for v in scan.outvars[n_carry:]]
        writes = [(u, write) for u in self.updates for write in writes_of(u)]
        outer = name_stack()

        def step(state: Any, slices: Any) -> Any:
            carry, count, old_stacks, totals = state
            olds = dict(zip(overwritten, old_stacks, strict=True))
            layer = length - 1 - count if reverse else count
            remaining = iter(slices)
            inputs = [
                next(remaining) if origin is None else _layer(olds[origin[0]], layer, origin[1])
                for origin in own
            ]
            outs = evaluate(body, [*consts, *carry, *inputs])
            ys = outs[n_carry:]
            gradients = {
                v: jnp.expand_dims(y, 0) for v, y in zip(scan.outvars[n_carry:], ys, strict=True)
            }
            update = _LayerUpdate(before | gradients, stacks | olds, outer)
            # The index waits until nothing reads the old layer any more. Otherwise XLA could not
            # overwrite the layer in place, and would copy the stacks.
            (at,) = barrier([layer], outs)
            added = [x for u in self.updates for x in update.sums(u, at)]
            (at,) = barrier([at], added)
            for u, write in writes:
                at = update.write(u, write, at)
            totals = [total + x for total, x in zip(totals, added, strict=True)]
            state = outs[:n_carry], count + 1, [update.stacks[t.old] for t in targets], totals
            return state, [y for y, k in zip(ys, kept, strict=True) if k]

        zero_sums = [zeros(v.aval) for v in sums]
        count, *_ = barrier([jnp.int32(0)], [value_of(v) for v in self.first])
        start = carry, count, [*overwritten.values()], zero_sums
        (carry, _, news, totals), ys = scan_like(options, step, start, xs)
        stacked = [v for v, k in zip(scan.outvars[n_carry:], kept, strict=True) if k]
        results = dict(zip(scan.outvars[:n_carry], carry, strict=True))
        results |= zip(stacked, ys, strict=True)
        results |= {t.new: new for t, new in zip(targets, news, strict=True)}
        return results | dict(zip(sums, totals, strict=True))


def _layer(stack: Any, layer: Any, constraints: Sequence[JaxprEqn]) -> Any:
    """Return one layer of a stack, with the sharding constraints on the stack."""
    x = lax.dynamic_slice_in_dim(stack, layer, 1)
    for eqn in constraints:
        (x,) = slice_equation(eqn, [x], 0, name_stack())
    return jnp.squeeze(x, 0)


class _LayerUpdate:
    """The update of one layer: it overwrites the layer in each stack, one stack after the other.

    Attributes:
      stacks: the stacks by the variables of their old values.
    """

    def __init__(self, known: dict[Var, Any], stacks: dict[Var, Any], outer: Any):
        self.stacks = {**stacks}
        self._known, self._outer = known, outer
        self._written: dict[Var, LayerTarget] = {}

    def sums(self, update: LeafUpdate, at: Any) -> list[Any]:
        """Return what the layer `at` contributes to the sums over all layers."""
        env = self._run(update, sums_of(update), at)
        return [env[v] for e in update.sums for v in e.outvars]

    def write(self, update: LeafUpdate, write: Write, at: Any) -> Any:
        """Overwrite the layer `at` of stacks; return the same index, for the next write."""
        env = self._run(update, write.equations, at)
        for target in write.targets:
            stack, new = self.stacks[target.old], read(env, target.new)
            stack = lax.dynamic_update_slice_in_dim(stack, new, at, target.axis)
            self.stacks[target.old], self._written[target.new] = stack, target
        return barrier([at], [self.stacks[target.old] for target in write.targets])[0]

    def _run(self, update: LeafUpdate, equations: Sequence[Sliced], at: Any) -> dict[Var, Any]:
        """Run equations on the layer `at`; return all values of that layer."""
        env = {**self._known}
        made = {v for eqn, _ in equations for v in eqn.outvars}
        for v in dict.fromkeys(
            v for eqn, _ in equations for v in eqn.invars if isinstance(v, Var) and v not in made
        ):
            if v in self._written:  # Read back, so that XLA computes it only once
                target = self._written[v]
                env[v] = lax.dynamic_slice_in_dim(self.stacks[target.old], at, 1, target.axis)
            elif v in update.stacks:
                env[v] = lax.dynamic_slice_in_dim(self.stacks[v], at, 1, update.stacks[v])
        for eqn, axis in equations:
            ys = slice_equation(eqn, [read(env, v) for v in eqn.invars], axis, self._outer)
            env.update(zip(eqn.outvars, ys, strict=True))
        return env


@dataclasses.dataclass(frozen=True, eq=False)
class Write:
    """Targets, and the equations that compute them from old layers and earlier targets."""

    targets: tuple[LayerTarget, ...]
    equations: tuple[Sliced, ...]


def writes_of(update: LeafUpdate) -> list[Write]:
    """Return the writes of a leaf, ordered so that nothing reads a layer after it is overwritten.

    If there is no such order, the remaining targets are computed together before one is written.
    XLA then copies stacks.
    """
    remaining, written = list(update.targets), set[Var]()
    writes: list[Write] = []
    while remaining:
        free = next((t for t in remaining if _is_free(update, t, remaining, written)), None)
        targets = tuple(remaining) if free is None else (free,)
        remaining = [t for t in remaining if t not in targets]
        writes.append(Write(targets, _needed(update, [t.new for t in targets], written)))
        written.update(t.new for t in targets)
    return writes


def sums_of(update: LeafUpdate) -> tuple[Sliced, ...]:
    """Return the equations that compute what a layer contributes to sums over all layers."""
    return _needed(update, [v for e in update.sums for v in e.outvars], set())


def _is_free(
    update: LeafUpdate, target: LayerTarget, remaining: Sequence[LayerTarget], written: set[Var]
) -> bool:
    """Return whether no other remaining target reads the old layer of this target afterwards."""
    others = [t.new for t in remaining if t is not target]
    equations = _needed(update, others, written | {target.new})
    return all(target.old not in eqn.invars for eqn, _ in equations)


def _needed(update: LeafUpdate, wanted: Sequence[Var], known: set[Var]) -> tuple[Sliced, ...]:
    """Return the equations of a layer that compute `wanted` values from `known` ones, in order."""
    needed = {*wanted}
    found: list[Sliced] = []
    for eqn, axis in reversed(update.equations):
        if any(v in needed and v not in known for v in eqn.outvars):
            found.append((eqn, axis))
            needed.update(v for v in eqn.invars if isinstance(v, Var) and v not in known)
    return tuple(reversed(found))
