"""Rewrite a program: run one of its regions in a loop over slices."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from xform._jax import JaxprEqn, Var, has_effects
from xform.program.arithmetic import Value
from xform.program.equation import bind, read, write
from xform.program.ir import Program, environment, retrace
from xform.program.source import name_stack, source
from xform.slices.region import Region

# Runs a region from the values of its sliced inputs and of its full inputs.
RunRegion = Callable[[Region, Sequence[Value], Sequence[Value]], list[Value]]


def with_loop(region: Region, run: RunRegion) -> Program:
    """Return the program of a region; `run` computes the region's outputs.

    Remat regions that the loop does not touch stay as they were marked. The loop takes the place of
    the region's last equation. Equations before that place which read
    an output of the region follow the loop. Side effects keep their order.
    """
    region = region.in_closed_program()
    prog, last = region.program, max(region.members)

    def evaluate(*inputs: Value) -> list[Value]:
        env = environment(prog, inputs)
        outer = name_stack()
        waiting = _Waiting(region)

        def run_equation(eqn: JaxprEqn) -> None:
            write(env, eqn.outvars, bind(eqn, [read(env, v) for v in eqn.invars], outer))

        for i, eqn in enumerate(prog.equations):
            if i in region.members:
                if i < last:
                    continue
                sliced = [env[v] for v, _ in region.sliced]
                with source(region.source, outer):
                    outputs = run(region, sliced, [env[v] for v in region.full])
                env.update(zip((y for y, _, _ in region.outputs), outputs, strict=True))
                for late in waiting.equations:
                    run_equation(late)
            elif i > last or not waiting.takes(eqn):
                run_equation(eqn)
        return [read(env, v) for v in prog.outputs]

    return retrace(prog, evaluate)


class _Waiting:
    """The equations that wait for the loop, in order."""

    def __init__(self, region: Region):
        self.equations: list[JaxprEqn] = []
        self._late = {y for y, _, _ in region.outputs}
        self._effects = False

    def takes(self, eqn: JaxprEqn) -> bool:
        """Let an equation wait if it reads a value that is not there yet; return whether it waits.

        After an equation with side effects has to wait, all others with side effects wait too.
        """
        effects = has_effects(eqn)
        late = any(isinstance(v, Var) and v in self._late for v in eqn.invars)
        if not late and not (effects and self._effects):
            return False
        self.equations.append(eqn)
        self._late.update(eqn.outvars)
        self._effects |= effects
        return True
