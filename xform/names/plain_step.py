"""`PlainStep`: a program that runs under plain JAX, as a function of its checkpoint policy.

It is traced, simulated and compiled under one policy after another. JAX's own differentiation, in
the user's function, decides what each policy saves.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from xform._jax import JaxprEqn, jit
from xform.errors import WrongArgument
from xform.interpret.cost import aval_bytes, equation_flops, flops
from xform.introspection.callables import definition_site, function_name
from xform.introspection.modules import is_array_or_type
from xform.memory.compilation import compile_for, trace_for
from xform.memory.lowering import is_jitted
from xform.memory.targets import Target
from xform.names.name_set import NamedValue, NameSet, WeighedNames
from xform.passes.structured import is_remat_region, nested_programs
from xform.planner.costs.link import HostLink, link_of
from xform.planner.costs.unfused import unfused_flops
from xform.planner.device import current_device
from xform.planner.measure import Known
from xform.planner.simulate.liveness import simulate
from xform.planner.simulate.profiles import backend_profile
from xform.policies import TAG
from xform.program.fingerprint import fingerprint, text_of
from xform.program.ir import Program, program
from xform.program.source import frame
from xform.registry.table import label, traits
from xform.storage.bounded_cache import BoundedCache
from xform.transforms.outside import overwritten

# The XLA pass that undoes `jax.checkpoint` in unrolled code on a CPU, and the option that turns
# passes off.
_UNDOING_PASS, _DISABLED = "cse_barrier_expander", "xla_disable_hlo_passes"
KEEPS_REGIONS = {_DISABLED: _UNDOING_PASS}
# A backward pass takes about two times the FLOPs of the forward pass.
_STEP_TO_FORWARD = 3


class _RecordingPolicy:
    """A policy that saves everything, and records which primitives JAX asks it about."""

    def __init__(self) -> None:
        self.asked, self.names = False, dict[str, None]()

    def __call__(self, prim: Any, *_: Any, **params: Any) -> bool:
        self.asked = True
        name = label(prim, params)
        if name is not None and not name.startswith(TAG):
            self.names[name] = None
        return True


@dataclasses.dataclass
class _Known:
    """What this process knows about one program: costs and compiled bytes by the saved names."""

    weighed: dict[NameSet, WeighedNames] = dataclasses.field(default_factory=dict)
    compiled: Known = dataclasses.field(default_factory=dict)


# For each live function: by its program, the types of its arguments, target and compiler options.
_KNOWN: weakref.WeakKeyDictionary[Any, BoundedCache[Any, _Known]] = weakref.WeakKeyDictionary()


class PlainStep:
    """A function under plain JAX, whose parameter `policy` takes a checkpoint policy.

    Args:
      f: the function. It takes its derivatives with JAX's transforms.
      args: its arguments, as arrays or types.
      target: the target to compile for.
      options: the options of `jax.jit`, for a function that is not jitted yet.

    Attributes:
      name: the name of the function.
      values: its named values in remat regions, in the order of the program.
      everything: its costs if its remat regions save everything.
    """

    def __init__(
        self,
        f: Callable[..., Any],
        args: Sequence[Any],
        target: Target,
        options: Mapping[str, Any],
    ):
        self.name, self._f, self._args = function_name(f), f, args
        self._target, self._options = target, dict(options)
        recorder = _RecordingPolicy()
        recorded, _ = self._trace(recorder)
        self._check(recorder, recorded)
        found = _named_values(recorded)
        self.values = tuple(
            NamedValue(n, sum(size for size, _ in found[n]), found[n][0][1])
            for n in recorder.names
            if n in found
        )
        everything = self._trace(jax.checkpoint_policies.everything_saveable)
        self._everything = everything[0]
        self.everything = self._weighed(NameSet(), *everything)
        program_key = (
            fingerprint(self._everything),
            text_of(list(map(_type, jax.tree.leaves(args)))),
        )
        key = *program_key, target.name, str(options)
        known = _KNOWN.setdefault(f, BoundedCache(4))
        self._known = known[key] = known.get(key, _Known())

    def compiled_bytes(self, weighed: WeighedNames) -> float:
        """Compile the program under the policy of some names; return its bytes on each device.

        They are infinite if the compiler refuses the program without telling its size.
        """
        f, keywords = self._under(weighed.names.policy())
        total = compile_for(f, self._args, keywords, self._target).total_bytes
        return math.inf if total is None else total

    @property
    def known_bytes(self) -> Known:
        """The compiled bytes that this process knows, by the saved names."""
        return self._known.compiled

    def weigh(self, names: NameSet) -> WeighedNames:
        """Trace the program under the policy of some names, and simulate its peak."""
        if names not in self._known.weighed:
            self._known.weighed[names] = self._weighed(names, *self._trace(names.policy()))
        return self._known.weighed[names]

    def may_offload(self, names: NameSet) -> bool:
        """Return whether the link to the host carries the offloaded values in time.

        They must be copied within the time of the forward pass, as under budgets.
        """
        if not names.offloaded:
            return True
        if self.link is None:
            return False
        forward = flops(self._everything) / _STEP_TO_FORWARD / self.link.flops_per_second
        return self.link.seconds(self._offloaded_bytes(names)) <= forward

    @functools.cached_property
    def link(self) -> HostLink | None:
        """The link between the target and its host; None if values cannot be offloaded."""
        with self._target.planned_for():
            return link_of(current_device())

    @property
    def is_undone(self) -> bool:
        """Whether the compiler may undo `jax.checkpoint` in unrolled layers."""
        return not (self._has_option or backend_profile(self._target.backend).keeps_regions)

    @property
    def _has_option(self) -> bool:
        """Whether a compiler option keeps XLA from undoing `jax.checkpoint` on a CPU."""
        options = self._options.get("compiler_options") or {}
        return _UNDOING_PASS in str(options.get(_DISABLED, ""))

    def _offloaded_bytes(self, names: NameSet) -> int:
        return sum(v.bytes for v in self.values if v.name in names.offloaded)

    def _weighed(self, names: NameSet, prog: Program, outputs_in_donated: Any) -> WeighedNames:
        simulated = simulate(
            prog,
            self._target.backend,
            overwrites_argument=outputs_in_donated,
            keeps_regions=self._has_option,
        )
        recomputed = unfused_flops(prog) - unfused_flops(self._everything)
        return WeighedNames(
            names, max(recomputed, 0), self._offloaded_bytes(names), simulated.total_bytes
        )

    def _trace(self, policy: Any) -> tuple[Program, Any]:
        """Return the program under a policy, and which outputs overwrite a donated argument."""
        f, keywords = self._under(policy)
        trace = trace_for(f, self._args, keywords, self._target)
        prog = program(trace.jaxpr)
        return prog, overwritten(trace, prog)

    def _under(self, policy: Any) -> tuple[Any, dict[str, Any]]:
        """Return the function to compile under a policy, and its keyword arguments."""
        if is_jitted(self._f):
            return self._f, {"policy": policy}
        run = functools.wraps(self._f)(functools.partial(self._f, policy=policy))
        return (jit(run, **self._options) if self._options else run), {}

    def _check(self, recorder: _RecordingPolicy, prog: Program) -> None:
        """Raise WrongArgument if the program has no remat region, or no named value in one."""
        if recorder.names:
            return
        request = f"plan_names of {self.name}"
        if recorder.asked:
            raise WrongArgument(
                request,
                "no value in its remat regions has a name, so there is nothing to choose from",
                definition_site(self._f),
                "in the function under jax.checkpoint, name the values that are worth saving, such "
                "as results of matrix products: h = jax.ad_checkpoint.checkpoint_name(x @ w, 'h')",
            )
        others = any(is_remat_region(e) or _is_differentiated(e) for e in _nested(prog))
        raise WrongArgument(
            request,
            "its remat regions do not get this policy"
            if others
            else "it has no remat region (jax.checkpoint) that is differentiated by JAX",
            definition_site(self._f),
            "mark each layer and pass the policy on: jax.checkpoint(layer, policy=policy), and "
            "differentiate with jax.grad. If a library marks the layers: "
            "jax.grad(xform.passes.RegionPolicy(policy)(loss))",
        )


def _type(x: Any) -> Any:
    """Return the type and the sharding of an array; any other argument itself."""
    if is_array_or_type(x):
        return x.shape, str(x.dtype), getattr(x, "sharding", None)
    return x


def _is_differentiated(eqn: JaxprEqn) -> bool:
    """Return whether an equation is a remat region that JAX has differentiated."""
    return traits(eqn.primitive).calls == "region" and eqn.params["differentiated"]


def _nested(prog: Program) -> Iterator[JaxprEqn]:
    """Yield the equations of a program and of all programs inside."""
    for eqn in prog.equations:
        yield eqn
        for inner in nested_programs(eqn):
            yield from _nested(inner)


def _named_values(prog: Program, trips: int = 1) -> dict[str, list[tuple[int, str]]]:
    """Return the bytes and the user's line of each named value, by name.

    `trips` is how often the program runs. The bytes are those of all runs together.
    """
    found: dict[str, list[tuple[int, str]]] = {}
    for eqn in prog.equations:
        if (name := label(eqn.primitive, eqn.params)) is not None:
            size = trips * aval_bytes(eqn.outvars[0].aval)
            found.setdefault(name, []).append((size, frame(eqn)))
        inner = nested_programs(eqn)
        total = sum(map(flops, inner))
        runs = trips * max(1, equation_flops(eqn) // total if total else 1)
        for each in inner:
            for name, rows in _named_values(each, runs).items():
                found.setdefault(name, []).extend(rows)
    return found
