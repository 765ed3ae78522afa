"""Structured equations in a joint program: `fork` in the forward part, `join` in the backward part.

scan, cond and calls contain programs. If such an equation carries a derivative, the joint program
has a pair in its place: `fork(inputs) -> outputs, token` and `join(token, inputs, seeds) ->
results`. The pair's Node has the nested Joints. The value of a token is a pytree of residuals,
which a schedule chooses after the trace. Both primitives exist only between analysis and emission,
and never reach the user.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np

from xform._jax import JaxprEqn, Primitive, ShapedArray, Trace, Tracer, cotangent_aval, tangent_aval
from xform.interpret.logs import log_without
from xform.program.arithmetic import Value, instantiate
from xform.program.fingerprint import fingerprint, parameters_text
from xform.program.ir import Mask, Program, apply
from xform.program.ir import gather as gather
from xform.program.ir import spread as spread
from xform.program.source import frame
from xform.registry.table import Rule
from xform.storage.bounded_cache import BoundedCache

# `joint.Joint` and `joint.Schedule`, which contain nodes: a Node only passes them on.
Joint = Any
Schedules = Sequence[Any]
Pull = Callable[[Sequence[Value]], list[Value]]
ValuesAndTangents = tuple[Sequence[Value], Sequence[Value]]

_TOKEN = ShapedArray((0,), np.dtype("int8"))


class EagerToken(Tracer[Any]):
    """The token of a fork if operations run one by one.

    It holds the residuals and the inputs that the join reads, and no other input. If a fork
    is staged, its token is an ordinary tracer.
    """

    __slots__ = ("inputs", "value")

    def __init__(self, trace: Trace, value: Any, inputs: Sequence[Value]):
        super().__init__(trace, _TOKEN)
        self.value, self.inputs = value, inputs


fork_p, join_p = Primitive("xform_fork"), Primitive("xform_join")
fork_p.multiple_results = join_p.multiple_results = True


class NodeReference:
    """A reference to a Node, as a parameter of equations during a trace.

    JAX keeps each parameter that it has seen in a cache of types. This reference drops its Node
    when the trace has ended, so that the cache does not keep the Node alive.
    """

    def __init__(self, node: Node):
        self.node = node


def resolve_node_references(prog: Program) -> Program:
    """Return a traced program that has Nodes as parameters; the references drop theirs."""
    pairs = [eqn for eqn in prog.equations if eqn.primitive in (fork_p, join_p)]
    own = {
        id(eqn): eqn.replace(params={**eqn.params, "node": eqn.params["node"].node})
        for eqn in pairs
    }
    for reference in {eqn.params["node"] for eqn in pairs}:
        del reference.node
    equations = tuple(own.get(id(eqn), eqn) for eqn in prog.equations)
    return Program(prog.inputs, prog.consts, equations, prog.outputs)


@fork_p.def_abstract_eval
def _(*_: Any, node: NodeReference) -> list[Any]:
    return [*(v.aval for v in node.node.eqn.outvars), _TOKEN]


@join_p.def_abstract_eval
def _(*_: Any, node: NodeReference, given: Mask) -> list[Any]:
    eqn, push, results = node.node.eqn, node.node.push, node.node.results
    kind = tangent_aval if push else cotangent_aval
    moving = gather(eqn.outvars if push else eqn.invars, results)
    return [kind(v.aval) for v in gather(moving, node.node.present_results(given))]


def user_equation(eqn: JaxprEqn) -> JaxprEqn:
    """Return the user's equation that a fork stands for, and any other equation as it is."""
    return eqn.params["node"].eqn if eqn.primitive is fork_p else eqn


class Node(abc.ABC):
    """One structured equation with its nested Joints.

    Attributes:
      eqn: the equation.
      joints: the Joint of each of its programs that carries a derivative.
      seeded: which outputs bring a cotangent (with `push`: which inputs bring a tangent).
      results: which inputs receive a cotangent (with `push`: which outputs receive a tangent).
      push: whether the backward part pushes tangents (`linearize`) or pulls cotangents (`vjp`).
      cache: traces of its two parts. They refer to the equation, and so to its programs: in a cache
        of one of these programs they would keep it alive.
    """

    iterations: int = 1
    device_count: int = 1  # how many devices each run its programs
    first_carry: int = 0  # the index of the first carry among the inputs of a loop's body
    loop: ClassVar[bool] = False  # whether to recompute it costs all of its iterations
    policy: Any = None
    region: ClassVar[bool] = False  # whether it is a remat region: its own policy decides inside

    def __init__(self, eqn: JaxprEqn, joints: Sequence[Joint], seeded: Mask, results: Mask,
                 push: bool):  # fmt: skip
        self.eqn, self.joints, self.push = eqn, tuple(joints), push
        self.seeded, self.results = seeded, results
        self.cache: BoundedCache[Any, Any] = BoundedCache()

    def __fingerprint__(self) -> Any:
        """Return what identifies the node, see `xform.program.fingerprint`."""
        joints = [(j.active, j.seeded, fingerprint(j.program)) for j in self.joints]
        eqn = self.eqn.primitive, parameters_text(self.eqn)
        return eqn, self.seeded, self.results, self.push, self.policy, joints

    def primal(self, xs: Sequence[Value]) -> list[Value]:
        """Run the equation itself; return the outputs."""
        return apply(self.eqn, xs)

    def outputs(self, schedules: Schedules, xs: Sequence[Value], used: Mask) -> list[Value]:
        """Compute the outputs by the forward part, without a token.

        So custom functions run their forward rules, and a derivative of the outputs is a derivative
        of these rules, whatever a schedule recomputes.
        """
        return self.forward([p.outputs_only for p in schedules], xs, used)[0]

    @abc.abstractmethod
    def reads(self, schedules: Schedules) -> Mask:
        """Return which inputs the backward part reads from outside, not from the token."""

    @abc.abstractmethod
    def forward(
        self, schedules: Schedules, xs: Sequence[Value], used: Mask
    ) -> tuple[list[Value], Any]:
        """Run the forward part; return outputs (None where not `used`) and the token's value."""

    @abc.abstractmethod
    def backward(self, schedules: Schedules, token: Any, xs: Sequence[Value],
                 seeds: Sequence[Value], together: bool) -> list[Value]:  # fmt: skip
        """Run the backward part. `together`: the forward part is in the same computation.

        A node that defines `dependent_results` gets None for absent seeds, and returns None for
        absent results.
        """

    def dependent_results(self, given: Mask) -> Mask | None:
        """Which results depend on the `given` seeds; None if absent seeds must become zeros."""
        return None

    def present_results(self, given: Mask) -> Mask:
        """Which results exist if only the `given` seeds are present."""
        results = None if all(given) else self.dependent_results(given)
        return (True,) * sum(self.results) if results is None else results

    def accepts(self, given: Mask) -> bool:
        """Whether the node can run with the `given` seeds alone."""
        return all(given) or self.dependent_results(given) is not None

    def stacked_inputs(self, schedules: Schedules) -> Mask:
        """Which inputs of the nested program the token holds for each iteration: a loop's carry."""
        return (False,) * len(schedules[0].reads)

    def stored_states(self, schedules: Schedules) -> Sequence[int]:
        """Return how many states of each input of the nested program the token holds."""
        return [self.iterations * on for on in self.stacked_inputs(schedules)]

    def iterations_depend_on(self, moving: Mask) -> bool:
        """Whether the number of iterations of a loop depends on the `moving` inputs."""
        return False

    def hoisted_values(self, schedule: Any) -> Mask:
        """Which saved values of a nested schedule the token holds once, not for each iteration."""
        return (False,) * len(schedule.saved)

    def token_values(self, schedule: Any) -> Sequence[Any]:
        """Return the saved values of a nested schedule that the token holds."""
        return schedule.saved


def present_mask(values: Sequence[Value]) -> Mask:
    """Return which values are present, that is, not None."""
    return tuple([x is not None for x in values])


def submask(mask: Mask, on: Sequence[bool]) -> Mask:
    """Return `mask` with its True entries replaced by the entries of `on`, in order."""
    return tuple(map(bool, spread(on, mask)))


class NodeWithoutResiduals(Node):
    """A node that saves nothing: its backward part reads all inputs and starts from them."""

    def reads(self, schedules: Schedules) -> Mask:
        return (True,) * len(self.eqn.invars)

    def forward(self, schedules: Schedules, xs: Sequence[Value], used: Mask):
        return self.primal(xs), ()


class Structured(Rule):
    """The rule of a primitive that contains programs, or that defines its own derivatives.

    A subclass has `jvp` for forward mode. For reverse mode and `linearize` it has `node`, which
    returns its own `Node`. If its two parts need no schedule, it has `vjp` and `split` instead.
    `active` says which outputs depend on the active inputs; the default is all float outputs.

    Args:
      name: the name of the primitive.
      word: "structured".
      known: the names of its possible parameters; any, if not given.
      traits: other facts about the primitive, see `xform.traits.Traits`, such as `call` for a call.

    >>> from jax.extend.core import Primitive
    >>> class Twice(xform.extend.Structured):
    ...     def jvp(self, eqn, xs, dxs):
    ...         return [2 * xs[0]], [2 * dxs[0]]
    ...
    ...     def vjp(self, eqn, xs, active, wanted):
    ...         return [2 * xs[0]], lambda cts: [2 * cts[0]]
    >>> twice_p = Primitive("twice")
    >>> _, _ = twice_p.def_impl(lambda x: 2 * x), twice_p.def_abstract_eval(lambda x: x)
    >>> _ = xform.extend.add_rule(twice_p, Twice("twice", "structured"))
    >>> float(xform.jvp(twice_p.bind, (1.0,), (3.0,))[1]), float(xform.grad(twice_p.bind)(1.0))
    (6.0, 2.0)
    """

    def jvp(self, eqn: JaxprEqn, xs: Sequence[Value], dxs: Sequence[Value]):
        """Return outputs and their tangents, in one pass; a tangent may be None."""
        raise NotImplementedError

    def jvp_of(self, eqn: JaxprEqn, xs: Sequence[Value], dxs: Sequence[Value], wanted: Mask):
        """Do the same as `jvp`, if only `wanted` outputs need a tangent."""
        return self.jvp(eqn, xs, dxs)

    def node(self, eqn: JaxprEqn, active: Mask, wanted: Mask, push: bool) -> Node:
        """Return the Node of an equation for some active inputs and wanted outputs."""
        raise NotImplementedError

    def vjp(
        self, eqn: JaxprEqn, xs: Sequence[Value], active: Mask, wanted: Mask
    ) -> tuple[list[Value], Pull]:
        """Return the outputs, and the pullback from cotangents of the wanted outputs."""
        node = self.node(eqn, active, wanted, push=False)
        reference = NodeReference(node)
        *ys, token = fork_p.bind(*xs, node=reference)
        inputs = () if isinstance(token, EagerToken) else xs

        def pull(cts: Sequence[Value]) -> list[Value]:
            seeds: Sequence[Value] = gather(cts, node.seeded)
            given = present_mask(seeds)
            if not any(given):
                return [None] * len(eqn.invars)
            if not node.accepts(given):
                seeds = instantiate(cts, eqn.outvars, node.seeded, cotangent_aval)
                given = present_mask(seeds)
            out = join_p.bind(token, *inputs, *gather(seeds, given), node=reference, given=given)
            name, where = eqn.primitive.name, frame(eqn)
            keys = {key for joint in node.joints for key in joint.logs}
            log_without(dict.fromkeys(keys, f"a {name} ({where})"), name, where)
            return spread(spread(out, node.present_results(given)), node.results)

        return ys, pull

    def transposed(
        self, eqn: JaxprEqn, xs: Sequence[Value], active: Mask, wanted: Mask
    ) -> tuple[list[Value], Pull]:
        """Do the same as `vjp` for an equation that is linear in its active inputs.

        The pullback of a linear function is its transpose. The outputs do not matter.
        """
        return self.vjp(eqn, xs, active, wanted)

    def split(self, eqn: JaxprEqn, xs: Sequence[Value], dxs: Sequence[Value], wanted: Mask):
        """Return outputs and tangents, with the tangent part separate from the primal part."""
        node = self.node(eqn, tuple(dx is not None for dx in dxs), wanted, push=True)
        reference = NodeReference(node)
        *ys, token = fork_p.bind(*xs, node=reference)
        full = instantiate(dxs, eqn.invars, node.seeded)
        out = join_p.bind(token, *xs, *full, node=reference, given=(True,) * len(full))
        return ys, spread(out, node.results)
