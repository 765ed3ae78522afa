"""Simulate the memory that a compiled program takes: the live bytes at each step.

This is xform's only model of peak memory. It needs no compiler. It has these stages:

1. The program becomes a list of the operations that XLA sees before fusion (`flat.py`; `parts.py`
   for a planned derivative).
2. Some values are fused into their readers and never written to memory (`fusion.py`).
3. XLA:CPU runs operations breadth first (`breadth_first.py`). Other backends try a few orders and
   use the one with the lowest peak (`orders.py`).
4. Each value gets a buffer, from the step that computes it to its last reader (`timeline.py`). The
   bytes of the buffers are added up. Values in a TPU's on-chip memory are not counted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from xform.interpret.joint import Schedule
from xform.interpret.node import gather
from xform.planner.simulate.flat import flatten
from xform.planner.simulate.parts import flatten_schedule
from xform.planner.simulate.profiles import Profile, backend_profile
from xform.planner.simulate.steps import FlatProgram
from xform.planner.simulate.timeline import Timeline
from xform.program.ir import Atom, Mask, Program, seldom_collected


@dataclasses.dataclass(frozen=True)
class Liveness:
    """Live bytes on each device, over the steps of a program.

    Attributes:
      argument_bytes: bytes of the inputs.
      output_bytes: bytes of the outputs, with the table of pointers if there are several.
      live: for each step, the temporary bytes while it runs, its results included.
      saved: for each step, the part of `live` that was computed in the forward part and is still
        read in the backward part. The backward part begins at the first step that depends on a
        cotangent.
      temp_bytes: bytes of the heap of temporary values: the largest of `live`, plus gaps.
    """

    argument_bytes: int
    output_bytes: int
    live: tuple[int, ...]
    saved: tuple[int, ...]
    temp_bytes: int

    @property
    def total_bytes(self) -> int:
        """Arguments, outputs and temporary memory: the total that a `MemoryReport` states."""
        return self.argument_bytes + self.output_bytes + self.temp_bytes


def simulate(
    prog: Program,
    backend: str,
    n_cotangents: int = 0,
    overwrites_argument: Mask = (),
    keeps_regions: bool = False,
) -> Liveness:
    """Return the simulated Liveness of a program on one device.

    Args:
      prog: the program.
      backend: "cpu", "gpu" or "tpu".
      n_cotangents: how many of the last inputs are cotangents. The steps that depend on them are
        the backward part.
      overwrites_argument: for each output, whether it overwrites a donated argument. Such an output
        is not counted. By default no output does.
      keeps_regions: whether a compiler option keeps this backend from merging what JAX's remat
        regions recompute with the forward pass.

    Cost: near linear in equations; each loop body is simulated once.
    """
    profile = backend_profile(backend)
    if keeps_regions:
        profile = dataclasses.replace(profile, keeps_regions=True)
    flat = flatten(prog, profile, n_cotangents)
    return _simulate_flat(
        flat, prog.inputs, prog.outputs, profile, n_cotangents, overwrites_argument
    )


def liveness(schedule: Schedule, backend: str) -> Liveness:
    """Return the simulated Liveness of a planned derivative on one device.

    A Schedule is a plan for a forward and a backward part: the saved values and the recomputed
    operations. Both parts are simulated as one program. The result is cached on the Schedule. Only
    the loops and calls in the program are traced, once each.
    """
    key = "liveness", backend
    if key not in schedule.cache:
        profile, joint = backend_profile(backend), schedule.joint
        inputs, outputs = (*joint.inputs, *joint.seeds), joint.program.outputs
        with seldom_collected():
            flat = flatten_schedule(schedule, profile)
            n_cotangents = len(joint.seeds)
            schedule.cache[key] = _simulate_flat(flat, inputs, outputs, profile, n_cotangents)
    return schedule.cache[key]


def _simulate_flat(
    flat: FlatProgram,
    inputs: Sequence[Atom],
    outputs: Sequence[Atom],
    profile: Profile,
    n_cotangents: int,
    overwrites_argument: Mask = (),
) -> Liveness:
    """Return the Liveness of a flat program.

    `inputs` and `outputs` are the variables of its inputs and outputs, for their types. The other
    arguments are those of `simulate`.
    """
    overwrites = overwrites_argument or (False,) * len(outputs)
    timeline = Timeline(flat, profile, frozenset(flat.outputs), {})
    timeline.reuse_output_buffers(frozenset(gather(flat.outputs, overwrites)))
    timeline.assign_buffers()
    cotangents = flat.inputs[len(flat.inputs) - n_cotangents :]
    size = lambda atoms: sum(profile.bytes(v.aval) for v in atoms)
    new_outputs = gather(outputs, [not x for x in overwrites])
    return Liveness(
        size(inputs),
        size(new_outputs) + profile.table_bytes(len(outputs)),
        tuple(timeline.live_bytes()),
        tuple(timeline.live_bytes_across(timeline.first_backward_step(cotangents))),
        timeline.heap_bytes(),
    )
