"""Structured equations in a joint program: `fork` in its forward part, `join` in its backward part.

scan, cond and calls hold programs. Where such an equation carries a derivative, the joint program
holds a pair instead, `fork(inputs) -> outputs, token` and `join(token, inputs, seeds) -> results`.
The pair's Node holds the nested Joints. A token's value is a pytree of residuals, chosen by a
schedule after the trace; both primitives exist only between analysis and emission and never reach
the user.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np

from xform._jax import JaxprEqn, Primitive, ShapedArray, Trace, Tracer, cotangent_aval, tangent_aval
from xform.arithmetic import Value, instantiate
from xform.fingerprint import fingerprint, parameters
from xform.interpret.logs import log_without
from xform.ir import Mask, Program, apply
from xform.ir import gather as gather
from xform.ir import spread as spread
from xform.source import frame
from xform.table import Rule

# `joint.Joint` and `joint.Schedule`, which are made of nodes: a Node only hands them on.
Joint = Any
Schedules = Sequence[Any]
Pull = Callable[[Sequence[Value]], list[Value]]
Pushed = tuple[Sequence[Value], Sequence[Value]]

_TOKEN = ShapedArray((0,), np.dtype("int8"))


class Token(Tracer[Any]):
    """A token where operations run one by one: its value, and the inputs that are still read.

    Its pair holds no other input. Where a fork is staged, its token is a tracer like any other.
    """

    __slots__ = ("inputs", "value")

    def __init__(self, trace: Trace, value: Any, inputs: Sequence[Value]):
        super().__init__(trace, _TOKEN)
        self.value, self.inputs = value, inputs


fork_p, join_p = Primitive("xform_fork"), Primitive("xform_join")
fork_p.multiple_results = join_p.multiple_results = True


class Held:
    """A Node, as the parameter of equations that are being traced.

    JAX keeps each parameter that it has seen, in a cache of types. This one lets go of its Node
    when the trace has ended, and of all that hangs on it.
    """

    def __init__(self, node: Node):
        self.node = node


def released(prog: Program) -> Program:
    """A program as it was traced, with Nodes for parameters in place of what held them."""
    pairs = [eqn for eqn in prog.equations if eqn.primitive in (fork_p, join_p)]
    own = {
        id(eqn): eqn.replace(params={**eqn.params, "node": eqn.params["node"].node})
        for eqn in pairs
    }
    for held in {eqn.params["node"] for eqn in pairs}:
        del held.node
    equations = tuple(own.get(id(eqn), eqn) for eqn in prog.equations)
    return Program(prog.inputs, prog.consts, equations, prog.outputs)


@fork_p.def_abstract_eval
def _(*_: Any, node: Held) -> list[Any]:
    return [*(v.aval for v in node.node.eqn.outvars), _TOKEN]


@join_p.def_abstract_eval
def _(*_: Any, node: Held, given: Mask) -> list[Any]:
    eqn, push, results = node.node.eqn, node.node.push, node.node.results
    kind = tangent_aval if push else cotangent_aval
    moving = gather(eqn.outvars if push else eqn.invars, results)
    return [kind(v.aval) for v in gather(moving, node.node.gives(given))]


def bound(eqn: JaxprEqn) -> JaxprEqn:
    """The equation of the user's program that a fork stands for; any other is itself."""
    return eqn.params["node"].eqn if eqn.primitive is fork_p else eqn


class Node(abc.ABC):
    """One structured equation with its nested Joints.

    Attributes:
      eqn: the equation.
      joints: the Joint of each program in it that carries a derivative.
      seeded: which outputs bring a cotangent (when pushing: which inputs bring a tangent).
      results: which inputs receive a cotangent (when pushing: which outputs receive a tangent).
      push: whether the backward part goes forward (linearize) or backward (vjp).
    """

    trips: int = 1
    device_count: int = 1  # of the devices that each run its programs
    first_carry: int = 0  # in a loop's program
    loop: ClassVar[bool] = False  # running it again costs its whole length
    policy: Any = None
    region: ClassVar[bool] = False  # a remat region: its own policy decides inside

    def __init__(self, eqn: JaxprEqn, joints: Sequence[Joint], seeded: Mask, results: Mask,
                 push: bool):  # fmt: skip
        self.eqn, self.joints, self.push = eqn, tuple(joints), push
        self.seeded, self.results = seeded, results

    def __fingerprint__(self) -> Any:
        """What makes the node the one that it is, see `xform.fingerprint`."""
        joints = [(j.active, j.seeded, fingerprint(j.program)) for j in self.joints]
        eqn = self.eqn.primitive, parameters(self.eqn)
        return eqn, self.seeded, self.results, self.push, self.policy, joints

    def primal(self, xs: Sequence[Value]) -> list[Value]:
        """The outputs, by the equation itself."""
        return apply(self.eqn, xs)

    def outputs(self, schedules: Schedules, xs: Sequence[Value], used: Mask) -> list[Value]:
        """The outputs as the forward part makes them, without a token.

        By the forward rules of custom functions, that is: a derivative of it is a derivative of
        those, whatever a schedule runs again.
        """
        return self.forward([p.bare for p in schedules], xs, used)[0]

    @abc.abstractmethod
    def reads(self, schedules: Schedules) -> Mask:
        """Which inputs the backward part takes from outside, rather than from the token."""

    @abc.abstractmethod
    def forward(
        self, schedules: Schedules, xs: Sequence[Value], used: Mask
    ) -> tuple[list[Value], Any]:
        """Outputs (None where not `used`) and the token's value."""

    @abc.abstractmethod
    def backward(self, schedules: Schedules, token: Any, xs: Sequence[Value],
                 seeds: Sequence[Value], together: bool) -> list[Value]:  # fmt: skip
        """Results of the backward part; `together`: the forward part is in this computation.

        A node with its own `moved` gets None for absent seeds, and returns None for absent results.
        """

    def moved(self, given: Mask) -> Mask | None:
        """Which results depend on the `given` seeds; None: the node takes zeros for the others."""
        return None

    def gives(self, given: Mask) -> Mask:
        """Which results there are, if the `given` seeds are there."""
        moved = None if all(given) else self.moved(given)
        return (True,) * sum(self.results) if moved is None else moved

    def takes(self, given: Mask) -> bool:
        """Whether the node takes the `given` seeds alone."""
        return all(given) or self.moved(given) is not None

    def stacked(self, schedules: Schedules) -> Mask:
        """Which inputs of the nested program the token holds once per trip: a loop's carry."""
        return (False,) * len(schedules[0].reads)

    def copies(self, schedules: Schedules) -> Sequence[int]:
        """How many states of each input of the nested program the token holds."""
        return [self.trips * on for on in self.stacked(schedules)]

    def steered(self, moving: Mask) -> bool:
        """Whether inputs that are `moving` decide how often a loop runs."""
        return False

    def hoisted(self, schedule: Any) -> Mask:
        """Which kept values of a nested schedule the token holds once, not once per trip."""
        return (False,) * len(schedule.kept)

    def keeps(self, schedule: Any) -> Sequence[Any]:
        """The kept values of a nested schedule that the token holds."""
        return schedule.kept


def there(values: Sequence[Value]) -> Mask:
    """Which values are there: None is absent."""
    return tuple([x is not None for x in values])


def within(mask: Mask, on: Sequence[bool]) -> Mask:
    """A mask, of whose True places only those stay that are `on`."""
    return tuple(map(bool, spread(on, mask)))


class Whole(Node):
    """A node that keeps nothing: its backward part has all inputs, and starts from them."""

    def reads(self, schedules: Schedules) -> Mask:
        return (True,) * len(self.eqn.invars)

    def forward(self, schedules: Schedules, xs: Sequence[Value], used: Mask):
        return self.primal(xs), ()


class Structured(Rule):
    """The rule of a primitive that holds programs, or says itself how it is differentiated.

    A subclass has `jvp` for forward mode, and `node`, with a `Node` of its own, for reverse mode
    and `linearize`; or, where its two parts need no schedule, `vjp` and `split` themselves.
    `active` says which outputs depend on the active inputs: without it, every one of a float dtype.

    Args:
      name: the name of the primitive.
      word: "structured".
      known: the parameters that it may have; without, any.
      traits: what else is known, see `xform.traits.Traits`: `call` of a call, for one.

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
        """Outputs and their tangents, in one pass; a tangent may be None."""
        raise NotImplementedError

    def jvp_of(self, eqn: JaxprEqn, xs: Sequence[Value], dxs: Sequence[Value], wanted: Mask):
        """The same, where only `wanted` outputs need a tangent."""
        return self.jvp(eqn, xs, dxs)

    def node(self, eqn: JaxprEqn, active: Mask, wanted: Mask, push: bool) -> Node:
        """The Node of an equation for some active inputs and wanted outputs."""
        raise NotImplementedError

    def vjp(
        self, eqn: JaxprEqn, xs: Sequence[Value], active: Mask, wanted: Mask
    ) -> tuple[list[Value], Pull]:
        """Outputs, and the pullback from cotangents of the wanted outputs."""
        node = self.node(eqn, active, wanted, push=False)
        held = Held(node)
        *ys, token = fork_p.bind(*xs, node=held)
        inputs = () if isinstance(token, Token) else xs

        def pull(cts: Sequence[Value]) -> list[Value]:
            seeds: Sequence[Value] = gather(cts, node.seeded)
            given = there(seeds)
            if not any(given):
                return [None] * len(eqn.invars)
            if not node.takes(given):
                seeds = instantiate(cts, eqn.outvars, node.seeded, cotangent_aval)
                given = there(seeds)
            out = join_p.bind(token, *inputs, *gather(seeds, given), node=held, given=given)
            name, where = eqn.primitive.name, frame(eqn)
            keys = {key for joint in node.joints for key in joint.logs}
            log_without(dict.fromkeys(keys, f"a {name} ({where})"), name, where)
            return spread(spread(out, node.gives(given)), node.results)

        return ys, pull

    def transposed(
        self, eqn: JaxprEqn, xs: Sequence[Value], active: Mask, wanted: Mask
    ) -> tuple[list[Value], Pull]:
        """The same for an equation that is linear in its active inputs; its outputs do not matter.

        The pullback of a linear function is its transpose.
        """
        return self.vjp(eqn, xs, active, wanted)

    def split(self, eqn: JaxprEqn, xs: Sequence[Value], dxs: Sequence[Value], wanted: Mask):
        """Outputs and tangents, with the tangent part apart from the primal part."""
        node = self.node(eqn, tuple(dx is not None for dx in dxs), wanted, push=True)
        held = Held(node)
        *ys, token = fork_p.bind(*xs, node=held)
        full = instantiate(dxs, eqn.invars, node.seeded)
        out = join_p.bind(token, *xs, *full, node=held, given=(True,) * len(full))
        return ys, spread(out, node.results)
