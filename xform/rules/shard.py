"""`shard_map`: a program that every device of a mesh runs on its own shard.

The body has a Joint, which is analyzed in the scope of the body's types and axis names. Both parts
are `shard_map`s over the same axes. A saved value leaves the forward part and enters the backward
part with a new leading axis, along which the devices' shards are concatenated. So it stays on its
device. Inputs that the backward part reads, and saved values that are outputs, are taken from
outside.

Cotangents. Under `check_vma=True` the body's types say what is replicated, and the body's own
transpose sums a cotangent where it must (`rules.collective`). Under `check_vma=False` the types do
not say so, and the convention is that of JAX. The cotangent of an output is divided equally over
the axes that its spec does not mention. The cotangent of an input is summed over the axes that its
spec does not mention.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec

from xform._jax import JaxprEqn, axes_of, cotangent_aval, staging, tangent_aval
from xform.errors import NotDifferentiable
from xform.interpret import emit
from xform.interpret.absent import reduced_joint
from xform.interpret.activity import path
from xform.interpret.concrete import WatchedTracer
from xform.interpret.cost import flops
from xform.interpret.joint import Joint, Schedule, analyze, will_be_compiled
from xform.interpret.jvp import jvp
from xform.interpret.node import Node, Schedules, Structured, gather, present_mask, spread
from xform.program.arithmetic import Value, constant_like, instantiate, reshard_tangent
from xform.program.fingerprint import fingerprint
from xform.program.ir import Atom, Mask, Program, evaluate, program, trace
from xform.program.source import frame
from xform.registry.table import declare
from xform.registry.traits import Traits
from xform.storage.bounded_cache import BoundedCache


class _Devices:
    """The mesh, the axes and the body of a `shard_map`."""

    def __init__(self, eqn: JaxprEqn):
        params = eqn.params
        self.jaxpr = params["jaxpr"]
        self.body = program(self.jaxpr)
        self.in_specs, self.out_specs = params["in_specs"], params["out_specs"]
        self.mesh, self.axes = params["mesh"], params["newly_manual_axes"]
        self.checked: bool = params["check_vma"]

    @property
    def count(self) -> int:
        """Over how many devices the body is mapped."""
        return math.prod(self.mesh.shape[a] for a in self.axes)

    @functools.cached_property
    def distinct(self) -> tuple[Any, ...]:
        """The axes along which devices may hold different values, by the specs and the body.

        Along the other axes all devices do the same, so nothing is summed or divided there. A
        `vmap` with `spmd_axis_name` may use such an axis for its lanes.
        """
        specs = (*self.in_specs, *self.out_specs)
        named = axes_of(self.jaxpr).union(*(set().union(*_layout(spec)) for spec in specs))
        return tuple(a for a in self.mesh.axis_names if a in self.axes and a in named)

    def map(self, f: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """Return `f` mapped over the devices. Outside `jit` it is compiled, once for each program.

        If a transform watches its arguments, it is not compiled, unless JAX can run it only under
        `jit`: over some axes of a mesh without types that say what varies, or with partial sums.
        """
        mapped = jax.shard_map(
            f,
            mesh=self.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=self.axes,
            check_vma=self.checked,
        )
        partly = self.axes != frozenset(self.mesh.axis_names)
        sums = any(s.unreduced or s.reduced for s in (*self.in_specs, *self.out_specs))
        only = partly and (sums or not self.checked)

        def run(*args: Any) -> Any:
            seen = any(isinstance(x, WatchedTracer) for x in jax.tree.leaves(args))
            return (mapped if seen and not only else _compiled(mapped))(*args)

        return mapped if staging() else run

    def inside(self, f: Callable[[], Any]) -> Any:
        """Call `f` in the scope of the axis names and types of the body, and return its value."""
        values: list[Any] = []

        def run() -> tuple[()]:
            values.append(f())
            return ()

        jax.eval_shape(self.map(run, (), ()))
        return values[0]

    def analyze(self, active: Mask, wanted: Mask, push: bool) -> Joint:
        singly = not will_be_compiled()
        return self.inside(lambda: analyze(self.body, active, wanted, push, singly=singly))

    def residual_spec(self, aval: Any) -> PartitionSpec:
        """Return the spec of a saved value: its leading axis is sharded where the value varies."""
        varying = aval.mat.varying if self.checked else self.distinct
        axes = tuple(a for a in self.mesh.axis_names if a in self.axes and a in varying)
        sums = {"unreduced": aval.mat.unreduced, "reduced": aval.mat.reduced}
        return PartitionSpec(*([axes] if axes else []), **(sums if self.checked else {}))

    def unmentioned(self, spec: PartitionSpec) -> tuple[Any, ...]:
        """Return the axes over which a value with this spec is replicated.

        The cotangent of a reduced value is unreduced: each device has its own part.
        """
        mentioned = _mentioned(spec) | spec.reduced
        return tuple(a for a in self.distinct if a not in mentioned)

    def share(self, ct: Value, v: Atom, spec: PartitionSpec) -> Value:
        """Return the cotangent of one device's output, from the cotangent of the whole output."""
        if self.checked:
            return _vary_as(ct, v)
        copies = [a for a in self.unmentioned(spec) if a not in spec.unreduced]
        return self._divide(ct, copies)

    def total(self, ct: Value, v: Atom, spec: PartitionSpec) -> Value:
        """Return the cotangent of the whole input, from the cotangents on each device."""
        if self.checked:
            return _vary_as(ct, v)
        summed = lax.psum(ct, self.unmentioned(spec))
        return self._divide(summed, spec.unreduced)

    def _divide(self, ct: Value, axes: Iterable[Any]) -> Value:
        n = math.prod(self.mesh.shape[a] for a in axes)
        return ct if n == 1 else lax.div(ct, constant_like(ct, n))


# The compiled programs that ran most recently outside `jit`.
_COMPILED = BoundedCache[str, Callable[..., Any]]()


def _compiled(f: Callable[..., Any]) -> Callable[..., Any]:
    """Return `f` under `jit`, cached by its program, because each transform makes a new function.

    Outside `jit`, JAX would compile each operation of a `shard_map` at each call.
    """
    jitted = jax.jit(f)

    def run(*args: Any) -> Any:
        traced = jitted.trace(*args)
        prog = program(traced.jaxpr)
        if prog.consts:  # constants may belong to another trace
            return jitted(*args)
        key = f"{fingerprint(prog)} {jax.tree.structure(args)} {traced.out_tree}"
        if key not in _COMPILED:
            _COMPILED[key] = jitted
        return _COMPILED[key](*args)

    return run


def _mentioned(spec: PartitionSpec) -> set[Any]:
    """Return the axes in a spec."""
    names: set[Any] = set()
    for entry in spec.partitions:
        names.update(entry if isinstance(entry, tuple) else (entry,))
    return names - {None}


def _layout(spec: PartitionSpec) -> tuple[Any, ...]:
    """Return the mentioned, unreduced and reduced axes of a spec."""
    return _mentioned(spec), spec.unreduced, spec.reduced


def _vary_as(ct: Value, v: Atom) -> Value:
    """Return `ct`, summed over the axes along which it varies and its primal does not.

    JAX may omit the step from replicated to varying at an output whose spec mentions more axes than
    the value varies over.
    """
    aval: Any = v.aval
    return lax.psum(ct, tuple(sorted(jax.typeof(ct).mat.varying - aval.mat.varying, key=str)))


class ShardMap(Structured):
    """The rule of `jax.shard_map`, over all or some axes of a mesh."""

    def active(self, eqn: JaxprEqn, active: Mask) -> Mask:
        specs = (*eqn.params["in_specs"], *eqn.params["out_specs"])
        if any(active) and not all(isinstance(spec, PartitionSpec) for spec in specs):
            raise NotDifferentiable(
                "derivative of a shard_map",
                "a value of a type of jax.experimental.hijax enters or leaves it",
                frame(eqn),
                "make the value from arrays inside the mapped function, and return arrays",
            )
        return path(program(eqn.params["jaxpr"]), active).outputs

    def useful(self, eqn: JaxprEqn, active: Mask, wanted: Mask) -> Mask:
        return path(program(eqn.params["jaxpr"]), active, wanted).inputs

    def jvp(self, eqn: JaxprEqn, xs: Sequence[Value], dxs: Sequence[Value]):
        devices = _Devices(eqn)
        active = tuple(dx is not None for dx in dxs)
        active_out = self.active(eqn, active)

        def run(xs: list[Value], dxs: list[Value]):
            ys, dys = jvp(devices.body, xs, spread(dxs, active))
            return ys, instantiate(dys, devices.body.outputs, active_out)

        ins = [list(devices.in_specs), gather(devices.in_specs, active)]
        outs = [list(devices.out_specs), gather(devices.out_specs, active_out)]
        pairs = zip(dxs, eqn.invars, strict=True)
        placed = [reshard_tangent(dx, v.aval) for dx, v in pairs if dx is not None]
        ys, dys = devices.map(run, tuple(ins), tuple(outs))(list(xs), placed)
        return ys, spread(dys, active_out)

    def node(self, eqn: JaxprEqn, active: Mask, wanted: Mask, push: bool) -> Node:
        devices = _Devices(eqn)
        return _ShardNode(eqn, devices, devices.analyze(active, wanted, push), push)


class _ShardNode(Node):
    """A `shard_map` that carries a derivative."""

    def __init__(self, eqn: JaxprEqn, devices: _Devices, joint: Joint, push: bool):
        super().__init__(eqn, [joint], joint.seeded, joint.results, push)
        self.devices, self.device_count = devices, devices.count

    def reads(self, schedules: Schedules) -> Mask:
        return schedules[0].reads

    def dependent_results(self, given: Mask) -> Mask:
        (joint,) = self.joints
        if given in joint.reduced_joints:
            return joint.reduced_joints[given].present_results
        return self.devices.inside(lambda: reduced_joint(joint, given).present_results)

    def forward(self, schedules: Schedules, xs: Sequence[Value], used: Mask):
        devices, n = self.devices, sum(used)
        first, tree = self._first(schedules[0], used)
        out_specs = gather(devices.out_specs, used)
        specs = [devices.residual_spec(a) for a in first.out_avals[n:]]
        as_output = [
            self._as_output(v, spec, first.outputs[:n], out_specs)
            for v, spec in zip(first.outputs[n:], specs, strict=True)
        ]
        new = tuple(i is None for i in as_output)

        def run(*xs: Value) -> list[Value]:
            out = evaluate(first, xs)
            return [*out[:n], *(lax.expand_dims(x, (0,)) for x in gather(out[n:], new))]

        with self.eqn.ctx.manager:
            out = devices.map(run, tuple(devices.in_specs), [*out_specs, *gather(specs, new)])(*xs)
        residuals = iter(out[n:])
        leaves = [next(residuals) if i is None else out[i] for i in as_output]
        held = [
            spec if i is None else out_specs[i] for i, spec in zip(as_output, specs, strict=True)
        ]
        return spread(out[:n], used), _Shards(leaves, (tuple(held), new, tree))

    def _first(self, schedule: Schedule, used: Mask) -> tuple[Program, Any]:
        """Return the forward part as a program: the used outputs, then the saved leaves."""
        key = ("shard_map", used)
        if key not in schedule.cache:
            trees: list[Any] = []

            def flat(*xs: Value) -> list[Value]:
                outs, kept = emit.forward(schedule, xs, used)
                leaves, tree = jax.tree.flatten(kept)
                trees.append(tree)
                return [*gather(outs, used), *leaves]

            types = self.devices.body.in_avals
            with self.eqn.ctx.manager:
                schedule.cache[key] = self.devices.inside(lambda: trace(flat, *types)), trees[0]
        return schedule.cache[key]

    def _as_output(self, v: Atom, spec: PartitionSpec, outputs: Sequence[Atom],
                   out_specs: Sequence[PartitionSpec]) -> int | None:  # fmt: skip
        """Return the index of the output that equals a saved value on all devices, or None."""
        for i, (y, out_spec) in enumerate(zip(outputs, out_specs, strict=True)):
            if v is y and _layout(spec) == _layout(out_spec):
                return i
        return None

    def backward(self, schedules: Schedules, token: Any, xs: Sequence[Value],
                 seeds: Sequence[Value], together: bool) -> list[Value]:  # fmt: skip
        (schedule,), devices, reads = schedules, self.devices, self.reads(schedules)
        ins = list(zip(devices.body.inputs, self.eqn.invars, devices.in_specs, strict=True))
        outs = list(zip(devices.body.outputs, self.eqn.outvars, devices.out_specs, strict=True))
        given = present_mask(seeds)
        present = self.present_results(given)
        takes = gather(gather(ins if self.push else outs, self.seeded), given)
        result_specs = gather(gather(outs if self.push else ins, self.results), present)
        specs, new, tree = token.static

        def run(leaves: list[Value], xs: list[Value], seeds: list[Value]) -> list[Value]:
            pairs = zip(leaves, new, strict=True)
            kept = jax.tree.unflatten(tree, [lax.squeeze(x, (0,)) if o else x for x, o in pairs])
            if not self.push:
                seeds = [devices.share(ct, v, spec)
                           for ct, (v, _, spec) in zip(seeds, takes, strict=True)]  # fmt: skip
            # For its device the body is a whole function: each recompute waits for its cotangent.
            full = spread(xs, reads), spread(seeds, given)
            results = gather(emit.backward(schedule, kept, *full, together, whole=True), present)
            if self.push:
                return results
            return [
                devices.total(ct, v, s) for ct, (v, _, s) in zip(results, result_specs, strict=True)
            ]

        # The cotangent of a partial sum is a copy on each device, and vice versa.
        kind = tangent_aval if self.push else cotangent_aval
        turned = [
            [s if self.push else s.to_ct_spec() for *_, s in vs] for vs in (takes, result_specs)
        ]
        in_specs = list(specs), gather(devices.in_specs, reads), turned[0]
        with self.eqn.ctx.manager:
            pairs = zip(gather(seeds, given), takes, strict=True)
            placed = [reshard_tangent(x, v.aval, kind) for x, (_, v, _) in pairs]
            mapped = devices.map(run, in_specs, turned[1])
            return spread(mapped(token.leaves, gather(xs, reads), placed), present)


@jax.tree_util.register_pytree_node_class
class _Shards:
    """The token of a `shard_map`: each saved leaf, with the spec of its sharding.

    `static` has these specs, which leaves have a new leading axis (the others are outputs), and the
    tree of the saved values.
    """

    def __init__(self, leaves: list[Value], static: Any):
        self.leaves, self.static = leaves, static

    def tree_flatten(self):
        return self.leaves, self.static

    @classmethod
    def tree_unflatten(cls, static: Any, leaves: Any):
        return cls(list(leaves), static)


def _flops(eqn: JaxprEqn) -> int:
    """Return the FLOPs over all devices."""
    return _Devices(eqn).count * flops(program(eqn.params["jaxpr"]))


# The program of all devices may contain collectives, and is a whole function for each device.
declare(ShardMap, "shard_map", "structured", (),
        Traits(foldable=False, collective=True, flops=_flops), known=(
    "jaxpr", "mesh", "in_specs", "out_specs", "check_vma", "newly_manual_axes", "debug_info",
))  # fmt: skip
