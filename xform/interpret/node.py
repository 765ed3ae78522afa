"""Loops, branches and calls in a Joint: `fork` in the forward part, `join` in the backward part.

A Joint (`interpret.joint`) is the forward and the backward pass of a function as one program of two
parts. A seed is an input of its backward part, and a result is an output of it. To pull cotangents
back, as for `vjp`, the seeds are cotangents of the function's outputs, and the results are
cotangents of its inputs. To push tangents, as for `linearize`, they are tangents of the inputs and
of the outputs.

Loops, branches and calls are structured equations: they contain programs. If such an equation
carries a derivative, the Joint has two equations in its place: `fork(inputs) -> outputs, token` and
`join(token, inputs, seeds) -> results`. Both have the same Node as a parameter, which holds a
nested Joint for each program. The value of the token is a pytree of residuals. Which values these
are is decided after the trace, by a Schedule of each nested Joint. When both parts run, the Node's
methods replace the two equations, so the user's program contains neither.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from xform._jax import (
    JaxprEqn,
    Primitive,
    ShapedArray,
    Trace,
    Tracer,
    Var,
    cotangent_aval,
    tangent_aval,
)
from xform.interpret.activity import active_through, useful_through
from xform.interpret.logs import log_without
from xform.program.arithmetic import Value, instantiate
from xform.program.dimensions import SampledCache
from xform.program.fingerprint import fingerprint, parameters_text
from xform.program.flow import Flow
from xform.program.ir import Mask, Program, apply
from xform.program.ir import gather as gather
from xform.program.ir import spread as spread
from xform.program.source import frame
from xform.registry.table import Rule

# `joint.Joint` and sequences of `joint.Schedule`. That module imports this one, so this one cannot
# import their types.
Joint = Any
Schedules = Sequence[Any]
Pull = Callable[[Sequence[Value]], list[Value]]
ValuesAndTangents = tuple[Sequence[Value], Sequence[Value]]

_TOKEN = ShapedArray((0,), np.dtype("int8"))


class EagerToken(Tracer[Any]):
    """The token of a fork outside `jit`, where operations run one by one.

    `value` are the residuals. `inputs` are the inputs of the fork, with None for each that the join
    does not read. If a fork is traced into a program, its token is an ordinary tracer instead.
    """

    __slots__ = ("inputs", "value")

    def __init__(self, trace: Trace, value: Any, inputs: Sequence[Value]):
        super().__init__(trace, _TOKEN)
        self.value, self.inputs = value, inputs


fork_p, join_p = Primitive("xform_fork"), Primitive("xform_join")
fork_p.multiple_results = join_p.multiple_results = True


class NodeReference:
    """A reference to a Node: the parameter of fork and join equations during a trace.

    JAX caches the types of an operation's outputs by its parameters, and so keeps the parameters
    alive. When the trace has ended, this reference drops its Node, so the Node can be freed.
    """

    def __init__(self, node: Node):
        self.node = node


def resolve_node_references(prog: Program) -> Program:
    """Return a traced program with Nodes in place of references, which drop their Nodes."""
    forks_and_joins = [eqn for eqn in prog.equations if eqn.primitive in (fork_p, join_p)]
    resolved = {
        id(eqn): eqn.replace(params={**eqn.params, "node": eqn.params["node"].node})
        for eqn in forks_and_joins
    }
    for reference in {eqn.params["node"] for eqn in forks_and_joins}:
        del reference.node
    equations = tuple(resolved.get(id(eqn), eqn) for eqn in prog.equations)
    return Program(prog.inputs, prog.consts, equations, prog.outputs)


@fork_p.def_abstract_eval
def _(*_: Any, node: NodeReference) -> list[Any]:
    return [*(v.aval for v in node.node.eqn.outvars), _TOKEN]


@join_p.def_abstract_eval
def _(*_: Any, node: NodeReference, given: Mask) -> list[Any]:
    eqn, push, results = node.node.eqn, node.node.push, node.node.results
    result_type = tangent_aval if push else cotangent_aval
    differentiated = gather(eqn.outvars if push else eqn.invars, results)
    present = gather(differentiated, node.node.present_results(given))
    return [result_type(v.aval) for v in present]


def user_equation(eqn: JaxprEqn) -> JaxprEqn:
    """Return the user's equation that a fork stands for, and any other equation as it is."""
    return eqn.params["node"].eqn if eqn.primitive is fork_p else eqn


class Node(abc.ABC):
    """The derivative of one structured equation: of a loop, a branch or a call.

    Subclasses say how its forward and its backward part run. The methods use these words:

    - A *Joint* is the forward and the backward pass of a nested program, such as a loop's body.
    - A *Schedule* says what the forward pass of a Joint saves. `schedules` has one for each Joint.
    - A *seed* is an input of the backward part: a cotangent of an output of the equation, or with
      `push` a tangent of an input. A *result* is an output of the backward part.
    - A mask `given` says which seeds are present: an absent seed is None, because no derivative
      arrives.
    - The *token* is the pytree of residuals that the forward part hands to the backward part.

    `xs` are the values of the equation's inputs.

    Attributes:
      eqn: the equation.
      joints: the Joint of each of its programs that carries a derivative.
      seeded: which outputs have a cotangent (for `linearize`: which inputs have a tangent).
      results: which inputs get a cotangent (for `linearize`: which outputs get a tangent).
      push: whether the backward part pushes tangents (`linearize`) or pulls cotangents (`vjp`).
      cache: traces of its two parts. They refer to the equation, and so to its programs. They are
        not cached on one of these programs, because they would keep it alive.
    """

    iterations: int = 1
    device_count: int = 1  # how many devices run its programs
    first_carry: int = 0  # the index of the first carry among the inputs of a loop's body
    loop: ClassVar[bool] = False  # whether it is a loop, so a recompute runs all its iterations
    unknown_length: ClassVar[bool] = False  # whether it is a loop that ends by a condition
    policy: Any = None  # the policy of a remat region
    region: ClassVar[bool] = False  # whether it is a remat region: its own policy decides inside
    moved: Mapping[Var, JaxprEqn] = {}  # parts of a loop's carry, with the equations that move them

    def __init__(self, eqn: JaxprEqn, joints: Sequence[Joint], seeded: Mask, results: Mask,
                 push: bool):  # fmt: skip
        self.eqn, self.joints, self.push = eqn, tuple(joints), push
        self.seeded, self.results = seeded, results
        self.cache = SampledCache()

    def __fingerprint__(self) -> Any:
        """Return what identifies the node, see `xform.program.fingerprint`."""
        joints = [(j.active, j.seeded, fingerprint(j.program)) for j in self.joints]
        eqn = self.eqn.primitive, parameters_text(self.eqn, rules=False)  # the Joints have them
        return eqn, self.seeded, self.results, self.push, self.policy, joints

    def primal(self, xs: Sequence[Value]) -> list[Value]:
        """Run the equation itself; return the outputs."""
        return apply(self.eqn, xs)

    def outputs(self, schedules: Schedules, xs: Sequence[Value], used: Mask) -> list[Value]:
        """Compute the outputs by the forward part, without residuals; None where not `used`.

        The equation itself would compute the same outputs. But in the forward part, custom
        functions run their forward rules. So a second derivative differentiates these rules, as in
        JAX.
        """
        return self.forward([s.outputs_only for s in schedules], xs, used)[0]

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
        """Run the backward part; return the results.

        `token` is the token's value. `xs` has None for inputs that `reads` does not select.
        `together` says that the forward part is in the same XLA program, so XLA may merge a
        recompute with it. A node that defines `dependent_results` gets None for absent seeds, and
        returns None for results that depend on absent seeds alone.
        """

    def dependent_results(self, given: Mask) -> Mask | None:
        """Return which results depend on a `given` seed; None if absent seeds must become zeros."""
        return None

    def present_results(self, given: Mask) -> Mask:
        """Return which results exist if only the `given` seeds are present."""
        results = None if all(given) else self.dependent_results(given)
        return (True,) * sum(self.results) if results is None else results

    def accepts(self, given: Mask) -> bool:
        """Return whether the backward part can run with the `given` seeds alone, without zeros."""
        return all(given) or self.dependent_results(given) is not None

    def stacked_inputs(self, schedules: Schedules) -> Mask:
        """Return which inputs of the nested program the token holds for each iteration.

        These are the parts of a loop's carry that the backward part reads.
        """
        return (False,) * len(schedules[0].reads)

    def stored_states(self, schedules: Schedules) -> Sequence[int]:
        """Return how many states of each input of the nested program the token holds."""
        return [self.iterations * on for on in self.stacked_inputs(schedules)]

    def iterations_depend_on(self, inputs: Mask) -> bool:
        """Return whether the number of iterations of a loop depends on one of these inputs."""
        return False

    def hoisted_values(self, schedule: Any) -> Mask:
        """Return which saved values of a nested schedule the token holds only once for a loop."""
        return (False,) * len(schedule.saved)

    def moved_back(self, schedule: Any) -> Mask:
        """Return which inputs of a loop's body the backward part moves back between devices.

        They are parts of the carry. The token holds only their last values.
        """
        return (False,) * len(schedule.reads)

    def moved_outputs(self) -> Mask:
        """Return which outputs of a loop's body are the next values of the `moved_back` inputs."""
        return (False,) * len(self.joints[0].outputs)

    def token_values(self, schedule: Any) -> Sequence[Any]:
        """Return the saved values of a nested schedule that the token holds."""
        return schedule.saved


def present_mask(values: Sequence[Value]) -> Mask:
    """Return which values are present, that is, not None."""
    return tuple([x is not None for x in values])


def submask(mask: Mask, on: Sequence[bool]) -> Mask:
    """Return `mask` with its True entries replaced by the entries of `on`, in order.

    `on` has one entry for each True entry of `mask`.
    """
    return tuple(map(bool, spread(on, mask)))


class NodeWithoutResiduals(Node):
    """A node that saves nothing: its backward part recomputes everything from the inputs."""

    def reads(self, schedules: Schedules) -> Mask:
        return (True,) * len(self.eqn.invars)

    def forward(self, schedules: Schedules, xs: Sequence[Value], used: Mask):
        return self.primal(xs), ()


class Structured(Rule):
    """The rule of a primitive that contains programs, or that defines its own derivatives.

    A subclass has `jvp` for forward mode. For reverse mode and `linearize` it has `node`, which
    returns an instance of its own subclass of `Node`. A primitive for which the planner has nothing
    to decide has `vjp` and `split` instead. If the primitive runs programs, `flow` says how values
    pass through them. `active` returns which outputs depend on the active inputs (the inputs that
    are differentiated). By default the programs decide. Without programs, or if the trait `calls`
    is "custom", these are all float outputs.

    Args:
      name: the name of the primitive.
      word: the kind of rule, always "structured" here; `xform rules` prints it.
      supported_params: names of the parameters that the primitive may have; None: any.
      traits: other facts about the primitive, see `xform.extend.Traits`, such as `call` for a call.

    xform sets the other fields. In the arguments of the methods, `eqn` is the equation, `xs` are
    its inputs and `dxs` their tangents. A mask is a tuple of bools: `active` says which inputs are
    differentiated, and `wanted` which outputs need a derivative.

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

    def active(self, eqn: JaxprEqn, active: Mask) -> Mask:
        flow = self.derivative_flow(eqn)
        if flow is None:
            return super().active(eqn, active)
        return active_through(flow, active, eqn.outvars)

    def useful(self, eqn: JaxprEqn, active: Mask, wanted: Mask) -> Mask:
        flow = self.derivative_flow(eqn)
        if flow is None:
            return active
        useful = useful_through(flow, eqn, active, wanted)
        return tuple(a and b for a, b in zip(useful, active, strict=True))

    def derivative_flow(self, eqn: JaxprEqn) -> Flow | None:
        """Return the flow of an equation; None if its derivative is not that of its programs."""
        return None if self.traits.calls == "custom" else self.flow(eqn)

    def jvp(self, eqn: JaxprEqn, xs: Sequence[Value], dxs: Sequence[Value]):
        """Return the outputs and their tangents, in one pass; a tangent that is zero may be None.

        `xs` are the inputs and `dxs` their tangents, None for zero.
        """
        raise NotImplementedError

    def jvp_of(self, eqn: JaxprEqn, xs: Sequence[Value], dxs: Sequence[Value], wanted: Mask):
        """Return the outputs and their tangents; only `wanted` outputs need a tangent."""
        return self.jvp(eqn, xs, dxs)

    def node(self, eqn: JaxprEqn, active: Mask, wanted: Mask, push: bool) -> Node:
        """Return the Node of an equation for some active inputs and wanted outputs.

        `push` says whether the Node pushes tangents (`linearize`) or pulls cotangents (`vjp`).
        """
        raise NotImplementedError

    def vjp(
        self, eqn: JaxprEqn, xs: Sequence[Value], active: Mask, wanted: Mask
    ) -> tuple[list[Value], Pull]:
        """Return the outputs, and the pullback.

        The pullback takes one cotangent for each output, None except for `wanted` outputs, and
        returns one for each input, None except for `active` inputs. None is a symbolic zero.
        """
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
        """Return outputs and pullback of an equation that is linear in its active inputs.

        The arguments are those of `vjp`. The pullback of a linear function is its transpose. The
        returned outputs are not used.
        """
        return self.vjp(eqn, xs, active, wanted)

    def split(self, eqn: JaxprEqn, xs: Sequence[Value], dxs: Sequence[Value], wanted: Mask):
        """Return outputs and tangents, computed by different equations: a fork and a join.

        Because no equation computes both an output and a tangent, `linearize` can keep the
        equations of the tangents for later.
        """
        node = self.node(eqn, tuple(dx is not None for dx in dxs), wanted, push=True)
        reference = NodeReference(node)
        *ys, token = fork_p.bind(*xs, node=reference)
        full = instantiate(dxs, eqn.invars, node.seeded)
        out = join_p.bind(token, *xs, *full, node=reference, given=(True,) * len(full))
        return ys, spread(out, node.results)
