"""The rule of `shard_map`: a program that every device of a mesh runs on its own shard.

The *Joint* of the body is its forward and backward pass, traced as one program, with the types and
axis names that the body has inside the `shard_map`. A *schedule* says which values are saved. The
`shard_map` becomes two, over the same axes: one for each pass. The first `shard_map` also returns
the saved values; these are the *token*. The second one gets the token and the *seeds* (the
cotangents of the outputs, or for `linearize` the tangents of the inputs). A saved value leaves the
first one with a new leading axis, along which the devices' shards are concatenated. So each shard
stays on its device. A saved value that is an output is not returned twice. Inputs that the backward
pass reads are passed to the second again.

A value is *replicated* along an axis of the mesh if all devices along it have the same value;
otherwise it *varies*. Under `check_vma=True` the body's types say along which axes a value varies,
and the body's own transpose sums a cotangent where it must (`rules.collective`). Under
`check_vma=False` the types do not say so, and xform does the same as JAX. It divides the cotangent
of an output by the number of devices along the axes that the output's spec does not mention. It
sums the cotangent of an input over the axes that the input's spec does not mention. The base
classes `Structured` and `Node` describe the methods (`xform.interpret.node`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec

from xform._jax import JaxprEqn, cotangent_aval, jit, named_axes, staging, tangent_aval
from xform.errors import NotDifferentiable
from xform.interpret import emit
from xform.interpret.absent import reduced_joint
from xform.interpret.concrete import WatchedTracer
from xform.interpret.cost import flops
from xform.interpret.joint import Joint, Schedule, analyze, will_be_compiled
from xform.interpret.jvp import jvp
from xform.interpret.node import Node, Schedules, Structured, gather, present_mask, spread
from xform.program.arithmetic import Value, constant_like, instantiate, reshard_tangent
from xform.program.fingerprint import fingerprint
from xform.program.flow import Body, Flow
from xform.program.ir import Atom, Mask, Program, context, evaluate, program, trace
from xform.program.source import frame
from xform.registry.table import declare
from xform.registry.traits import Traits
from xform.storage.bounded_cache import BoundedCache


class Devices:
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
        """The number of devices that the body is mapped over."""
        return math.prod(self.mesh.shape[a] for a in self.axes)

    @functools.cached_property
    def distinct(self) -> tuple[Any, ...]:
        """The mesh axes that a spec or the body names, along which the devices' values may differ.

        Along the other axes all devices compute the same values, so cotangents are neither summed
        nor divided along them. `vmap` with `spmd_axis_name` may place its examples along such an
        axis; a sum along it would mix the examples.
        """
        specs = (*self.in_specs, *self.out_specs)
        named = named_axes(self.jaxpr).union(*(set().union(*_all_axes(spec)) for spec in specs))
        return tuple(a for a in self.mesh.axis_names if a in self.axes and a in named)

    def map(self, f: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """Return `f` mapped over the devices. Outside `jit` it is compiled, once for each program.

        But it is not compiled if an argument is being differentiated eagerly, unless JAX requires
        `jit`. JAX requires it for a `shard_map` over only some of the mesh's axes that has
        `check_vma=False` or partial sums.
        """
        mapped = jax.shard_map(
            f,
            mesh=self.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=self.axes,
            check_vma=self.checked,
        )
        over_some_axes = self.axes != frozenset(self.mesh.axis_names)
        partial_sums = any(s.unreduced or s.reduced for s in (*self.in_specs, *self.out_specs))
        needs_jit = over_some_axes and (partial_sums or not self.checked)

        def run(*args: Any) -> Any:
            watched = any(isinstance(x, WatchedTracer) for x in jax.tree.leaves(args))
            return (mapped if watched and not needs_jit else _compiled(mapped))(*args)

        return mapped if staging() else run

    def call_inside(self, f: Callable[[], Any]) -> Any:
        """Call `f` where the axis names of the body are defined, and return its value."""
        values: list[Any] = []

        def run() -> tuple[()]:
            values.append(f())
            return ()

        jax.eval_shape(self.map(run, (), ()))
        return values[0]

    def analyze(self, active: Mask, wanted: Mask, push: bool) -> Joint:
        """Return the Joint of the body."""
        singly = not will_be_compiled()
        return self.call_inside(lambda: analyze(self.body, active, wanted, push, singly=singly))

    def residual_spec(self, aval: Any) -> PartitionSpec:
        """Return the spec of a saved value: the axes it varies on shard its leading axis."""
        varying = aval.mat.varying if self.checked else self.distinct
        axes = tuple(a for a in self.mesh.axis_names if a in self.axes and a in varying)
        sums = {"unreduced": aval.mat.unreduced, "reduced": aval.mat.reduced}
        return PartitionSpec(*([axes] if axes else []), **(sums if self.checked else {}))

    def replicated_axes(self, spec: PartitionSpec) -> tuple[Any, ...]:
        """Return the axes over which the cotangent of a value with this spec is replicated.

        They are the axes that the spec does not mention, with one exception. In JAX's terms a value
        may be *reduced* along an axis: each device has a full copy. Its cotangent is then
        *unreduced*: each device has its own term of a sum, so the cotangent is not replicated.
        """
        mentioned = _mentioned_axes(spec) | spec.reduced
        return tuple(a for a in self.distinct if a not in mentioned)

    def output_ct(self, ct: Value, v: Atom, spec: PartitionSpec) -> Value:
        """Return the cotangent of one device's output, from the cotangent of the whole output.

        `v` is the output of the body, and `spec` its spec.
        """
        if self.checked:
            return _sum_to_varying_axes(ct, v)
        copies = [a for a in self.replicated_axes(spec) if a not in spec.unreduced]
        return self._divide(ct, copies)

    def input_ct(self, ct: Value, v: Atom, spec: PartitionSpec) -> Value:
        """Return the cotangent of the whole input, from that of one device's input.

        `v` is the input of the body, and `spec` its spec.
        """
        if self.checked:
            return _sum_to_varying_axes(ct, v)
        summed = lax.psum(ct, self.replicated_axes(spec))
        return self._divide(summed, spec.unreduced)

    def _divide(self, ct: Value, axes: Iterable[Any]) -> Value:
        """Divide by the number of devices along the axes."""
        n = math.prod(self.mesh.shape[a] for a in axes)
        return ct if n == 1 else lax.div(ct, constant_like(ct, n))


# The compiled programs that ran most recently outside `jit`.
_COMPILED = BoundedCache[str, Callable[..., Any]]()


def _compiled(f: Callable[..., Any]) -> Callable[..., Any]:
    """Return `f` under `jit`, cached by its program, because each transform makes a new function.

    Outside `jit`, JAX would compile each operation of a `shard_map` at each call.
    """
    jitted = jit(f)

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


def _mentioned_axes(spec: PartitionSpec) -> set[Any]:
    """Return the mesh axes over which a spec shards axes of an array."""
    names: set[Any] = set()
    for entry in spec.partitions:
        names.update(entry if isinstance(entry, tuple) else (entry,))
    return names - {None}


def _all_axes(spec: PartitionSpec) -> tuple[Any, ...]:
    """Return the mentioned, unreduced and reduced axes of a spec."""
    return _mentioned_axes(spec), spec.unreduced, spec.reduced


def _sum_to_varying_axes(ct: Value, v: Atom) -> Value:
    """Return `ct`, summed over the axes along which it varies and its primal `v` does not.

    There are such axes if the spec of an output mentions more axes than the value varies over: JAX
    may omit the `pvary` that converts the value from replicated to varying.
    """
    aval: Any = v.aval
    return lax.psum(ct, tuple(sorted(jax.typeof(ct).mat.varying - aval.mat.varying, key=str)))


class ShardMap(Structured):
    """The rule of `jax.shard_map`."""

    def flow(self, eqn: JaxprEqn) -> Flow:
        operands, results = range(len(eqn.invars)), range(len(eqn.outvars))
        return Flow((Body(program(eqn.params["jaxpr"]), operands, results),), is_local=True)

    def active(self, eqn: JaxprEqn, active: Mask) -> Mask:
        specs = (*eqn.params["in_specs"], *eqn.params["out_specs"])
        if any(active) and not all(isinstance(spec, PartitionSpec) for spec in specs):
            raise NotDifferentiable(
                "derivative of a shard_map",
                "a value of a type of jax.experimental.hijax enters or leaves it",
                frame(eqn),
                "make the value from arrays inside the mapped function, and return arrays",
            )
        return super().active(eqn, active)

    def jvp(self, eqn: JaxprEqn, xs: Sequence[Value], dxs: Sequence[Value]):
        devices = Devices(eqn)
        active = tuple(dx is not None for dx in dxs)
        active_out = self.active(eqn, active)

        def run(xs: list[Value], dxs: list[Value]):
            ys, dys = jvp(devices.body, xs, spread(dxs, active))
            return ys, instantiate(dys, devices.body.outputs, active_out)

        in_specs = list(devices.in_specs), gather(devices.in_specs, active)
        out_specs = list(devices.out_specs), gather(devices.out_specs, active_out)
        pairs = zip(dxs, eqn.invars, strict=True)
        resharded = [reshard_tangent(dx, v.aval) for dx, v in pairs if dx is not None]
        ys, dys = devices.map(run, in_specs, out_specs)(list(xs), resharded)
        return ys, spread(dys, active_out)

    def node(self, eqn: JaxprEqn, active: Mask, wanted: Mask, push: bool) -> Node:
        devices = Devices(eqn)
        return _ShardNode(eqn, devices, devices.analyze(active, wanted, push), push)


class _ShardNode(Node):
    """The node of a `shard_map`. Its forward and its backward part are a `shard_map` each."""

    def __init__(self, eqn: JaxprEqn, devices: Devices, joint: Joint, push: bool):
        super().__init__(eqn, [joint], joint.seeded, joint.results, push)
        self.devices, self.device_count = devices, devices.count

    def reads(self, schedules: Schedules) -> Mask:
        return schedules[0].reads

    def dependent_results(self, given: Mask) -> Mask:
        (joint,) = self.joints
        if given in joint.reduced_joints:
            return joint.reduced_joints[given].present_results
        return self.devices.call_inside(lambda: reduced_joint(joint, given).present_results)

    def forward(self, schedules: Schedules, xs: Sequence[Value], used: Mask):
        devices, n = self.devices, sum(used)
        forward_prog, tree = self._forward_program(schedules[0], used)
        out_specs = gather(devices.out_specs, used)
        saved_specs = [devices.residual_spec(aval) for aval in forward_prog.out_avals[n:]]
        equal_outputs = [
            self._equal_output(v, spec, forward_prog.outputs[:n], out_specs)
            for v, spec in zip(forward_prog.outputs[n:], saved_specs, strict=True)
        ]
        has_new_axis = tuple(i is None for i in equal_outputs)

        def run(*xs: Value) -> list[Value]:
            out = evaluate(forward_prog, xs)
            return [*out[:n], *(lax.expand_dims(x, (0,)) for x in gather(out[n:], has_new_axis))]

        all_specs = [*out_specs, *gather(saved_specs, has_new_axis)]
        with context(self.eqn):
            out = devices.map(run, tuple(devices.in_specs), all_specs)(*xs)
        residuals = iter(out[n:])
        leaves = [next(residuals) if i is None else out[i] for i in equal_outputs]
        pairs = zip(equal_outputs, saved_specs, strict=True)
        specs = tuple(spec if i is None else out_specs[i] for i, spec in pairs)
        return spread(out[:n], used), _ShardToken(leaves, (specs, has_new_axis, tree))

    def _forward_program(self, schedule: Schedule, used: Mask) -> tuple[Program, Any]:
        """Return the forward pass of the body, and the tree of the saved values.

        The program returns the used outputs, then the leaves of the saved values.
        """
        key = ("shard_map", used)
        if key not in schedule.cache:
            trees: list[Any] = []

            def flat(*xs: Value) -> list[Value]:
                outs, saved = emit.forward(schedule, xs, used)
                leaves, tree = jax.tree.flatten(saved)
                trees.append(tree)
                return [*gather(outs, used), *leaves]

            types = self.devices.body.in_avals
            with context(self.eqn):
                prog = self.devices.call_inside(lambda: trace(flat, *types))
            schedule.cache[key] = prog, trees[0]
        return schedule.cache[key]

    def _equal_output(self, v: Atom, spec: PartitionSpec, outputs: Sequence[Atom],
                      out_specs: Sequence[PartitionSpec]) -> int | None:  # fmt: skip
        """Return the index of the output that equals a saved value on all devices, or None."""
        for i, (y, out_spec) in enumerate(zip(outputs, out_specs, strict=True)):
            if v is y and _all_axes(spec) == _all_axes(out_spec):
                return i
        return None

    def backward(self, schedules: Schedules, token: Any, xs: Sequence[Value],
                 seeds: Sequence[Value], together: bool) -> list[Value]:  # fmt: skip
        (schedule,), devices, reads = schedules, self.devices, self.reads(schedules)
        # For each input and output: the variable in the body, the variable of the equation, the
        # spec.
        ins = list(zip(devices.body.inputs, self.eqn.invars, devices.in_specs, strict=True))
        outs = list(zip(devices.body.outputs, self.eqn.outvars, devices.out_specs, strict=True))
        given = present_mask(seeds)
        present = self.present_results(given)
        seed_ends = gather(gather(ins if self.push else outs, self.seeded), given)
        result_ends = gather(gather(outs if self.push else ins, self.results), present)
        specs, has_new_axis, tree = token.static

        def run(leaves: list[Value], xs: list[Value], seeds: list[Value]) -> list[Value]:
            pairs = zip(leaves, has_new_axis, strict=True)
            saved = jax.tree.unflatten(tree, [lax.squeeze(x, (0,)) if on else x for x, on in pairs])
            if not self.push:
                seeds = [devices.output_ct(ct, v, spec)
                           for ct, (v, _, spec) in zip(seeds, seed_ends, strict=True)]  # fmt: skip
            # On each device the body is a whole function, not a remat region. So each recompute
            # waits for the cotangent that needs it.
            full = spread(xs, reads), spread(seeds, given)
            results = gather(emit.backward(schedule, saved, *full, together, whole=True), present)
            if self.push:
                return results
            return [devices.input_ct(ct, v, spec)
                    for ct, (v, _, spec) in zip(results, result_ends, strict=True)]  # fmt: skip

        # The cotangent of an unreduced value is reduced, and vice versa: `to_ct_spec` says so.
        kind = tangent_aval if self.push else cotangent_aval
        spec_of = lambda spec: spec if self.push else spec.to_ct_spec()
        seed_specs, result_specs = (
            [spec_of(spec) for *_, spec in ends] for ends in (seed_ends, result_ends)
        )
        in_specs = list(specs), gather(devices.in_specs, reads), seed_specs
        with context(self.eqn):
            pairs = zip(gather(seeds, given), seed_ends, strict=True)
            resharded = [reshard_tangent(x, v.aval, kind) for x, (_, v, _) in pairs]
            mapped = devices.map(run, in_specs, result_specs)
            return spread(mapped(token.leaves, gather(xs, reads), resharded), present)


@jax.tree_util.register_pytree_node_class
class _ShardToken:
    """The saved values of a `shard_map`, as a list of leaves.

    `static` has the specs of the leaves, which leaves have a new leading axis (the others are
    outputs), and the tree of the saved values.
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
    return Devices(eqn).count * flops(program(eqn.params["jaxpr"]))


# A `shard_map` counts as a collective, because its body may contain collectives.
declare(ShardMap, "shard_map", "structured", (),
        Traits(foldable=False, collective=True, flops=_flops), supported_params=(
    "jaxpr", "mesh", "in_specs", "out_specs", "check_vma", "newly_manual_axes", "debug_info",
))  # fmt: skip
