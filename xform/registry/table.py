"""The registry of rules: the derivative and the traits of each primitive.

`RULES` maps a Primitive to its `Rule`. A rule belongs to the Primitive object, not to its name: a
user's primitive "sin" is not JAX's. xform's own rules are declared by the name of a primitive of
JAX. The object is looked up when the rule is declared. If JAX loads the primitive later (kernels,
sparse arrays), it is looked up on first use. `xform.registry.words` has the functions that declare
rules.

To *push* is to compute output tangents from input tangents (forward mode). To *pull* is to compute
input cotangents from output cotangents (reverse mode). A Mask has one bool for each input, or for
each output.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from xform._jax import JaxprEqn, Primitive, callee, primitive_named
from xform.errors import MissingRule, NotDifferentiable, UnsupportedParam, WrongRule
from xform.program.arithmetic import Value, differentiable
from xform.program.flow import Body, BodyFunction, Flow
from xform.program.ir import Mask, Program, clear_program_cache, program
from xform.program.source import frame
from xform.registry.dependence import Elementwise
from xform.registry.ends import Ends
from xform.registry.traits import PLAIN, UNKNOWN, Traits

Formula = Callable[..., Any]
R = TypeVar("R", bound="Rule")
RULES: dict[Primitive, Rule] = {}
# By name: rules of primitives that JAX has not loaded yet, or that only other versions of JAX have.
PENDING_RULES: dict[str, Rule] = {}


@dataclasses.dataclass(frozen=True, eq=False)
class Rule:
    """The rule of one primitive: its derivative and its traits.

    Attributes:
      name: name of the primitive.
      word: the form of the derivative, such as "linear"; see `xform.registry.words`.
      formulas: functions that compute the derivative. `word` decides what they take and return.
      used: for each formula, the names of the primitive's parameters that it takes.
      supported_params: names of the parameters that the rule supports. None: it supports all.
      traits: properties besides the derivative.
      own: whether it is one of xform's own rules, which a user may not replace.
      calls_user_function: whether the rule calls a user's backward function.
      takes_python_numbers: whether the rule gets Python numbers, not converted to arrays.
    """

    name: str
    word: str
    formulas: tuple[Formula, ...] = ()
    used: dict[Formula, tuple[str, ...]] = dataclasses.field(default_factory=dict, repr=False)
    supported_params: frozenset[str] | None = None
    traits: Traits = PLAIN
    own: bool = False
    calls_user_function: ClassVar[bool] = False
    takes_python_numbers: ClassVar[bool] = False

    def active(self, eqn: JaxprEqn, active: Mask) -> Mask:
        """Return which outputs have a derivative with respect to the `active` inputs."""
        if self.word == "constant" or True not in active:
            return (False,) * len(eqn.outvars)
        return tuple([differentiable(v.aval) for v in eqn.outvars])

    def useful(self, eqn: JaxprEqn, active: Mask, wanted: Mask) -> Mask:
        """Return which active inputs the wanted outputs may depend on."""
        return active

    def linear_groups(self, eqn: JaxprEqn) -> Sequence[Sequence[int]]:
        """Groups of operands. The results are linear in the operands of one group, together."""
        if self.traits.identity:
            return (range(len(eqn.invars)),)
        return (self.traits.linear_in,) if self.traits.linear_in else ()

    def flow(self, eqn: JaxprEqn) -> Flow | None:
        """How values pass through the programs that the equation runs; None if it runs none.

        The default serves calls (the trait `call`). For any other primitive it returns None.
        """
        jaxpr = callee(eqn.params, self.traits.call) if self.traits.call else None
        body = None if jaxpr is None else program(jaxpr)
        counts = len(eqn.invars), len(eqn.outvars)
        if body is None or (len(body.inputs), len(body.outputs)) != counts:
            return None
        return Flow((Body(body, *map(range, counts)),))

    def rebuild(self, eqn: JaxprEqn, xs: Sequence[Value], functions: Sequence[BodyFunction],
                each: Any = None) -> tuple[list[Value], Any]:  # fmt: skip
        """Run an equation with functions in place of the programs that it runs.

        A rule whose `flow` is a loop or a branch must define it. A value that the new equation does
        not have is None: an operand that no function reads, or a result that is not used. For an
        unused result, the outputs of the functions are None too, and so is the operand with the
        initial value of a carry.

        Args:
          eqn: the equation.
          xs: the operands.
          functions: one for each of `flow.programs`. It takes the inputs of the program and `each`,
            and returns the outputs of the program and a pytree.
          each: a pytree of further inputs of the functions. A loop of known length scans it: each
            iteration gets its slice. A loop with a condition passes it to each iteration.

        Returns:
          The results, and the pytree of the function that ran; for a loop of known length, its
          stack. A function in a loop with a condition returns None for it.
        """
        raise NotImplementedError

    def inlined(self, eqn: JaxprEqn, staged: bool) -> Program | None:
        """Return the program whose equations replace a call; None: the call stays.

        `staged`: whether the call is part of a traced computation, rather than run eagerly.
        """
        return None

    def push(self, eqn: JaxprEqn, xs: Sequence[Value], ys: Sequence[Value], dxs: Sequence[Value]
             ) -> Sequence[Value]:  # fmt: skip
        """Compute the output tangents from inputs `xs`, outputs `ys` and input tangents `dxs`.

        A tangent may be None, a symbolic zero.
        """
        raise NotImplementedError

    def pull(self, eqn: JaxprEqn, xs: Sequence[Value], ys: Sequence[Value], cts: Sequence[Value],
             active: Mask) -> Sequence[Value]:  # fmt: skip
        """Compute the input cotangents from inputs `xs`, outputs `ys` and output cotangents `cts`.

        A cotangent may be None, a symbolic zero. Inputs that are not `active` get None.
        """
        raise NotImplementedError

    def check(self, eqn: JaxprEqn) -> None:
        """Raise an error if the equation has a parameter that this rule does not support."""
        if self.supported_params is None or eqn.params.keys() <= self.supported_params:
            return
        for name, value in eqn.params.items():
            neutral = value is None or value is False or (isinstance(value, tuple) and not value)
            if name not in self.supported_params and not neutral:
                raise UnsupportedParam(
                    f"derivative of {eqn.primitive.name}",
                    f"its rule does not support the parameter {name}={value!r}",
                    frame(eqn),
                    "wrap the call in jax.custom_jvp or jax.custom_vjp"
                    if self.own  # `add_rule` does not replace it
                    else "declare a rule with xform.extend that takes it as a keyword-only "
                    "argument",
                )

    def call(self, formula: Formula, eqn: JaxprEqn, *args: Any) -> Any:
        """Call a formula with `args` and the parameters of the equation that it takes.

        An error of the formula gets the source line of the equation.
        """
        used = self.used[formula]
        params = {k: eqn.params[k] for k in used if k in eqn.params} if used else {}
        try:
            return formula(*args, **params)
        except (NotDifferentiable, UnsupportedParam) as error:
            if error.where:
                raise
            raise error.at(frame(eqn)) from None


def declare(kind: type[R], primitive: Primitive | str, word: str,
            formulas: Sequence[Formula], traits: Traits = PLAIN,
            supported_params: Iterable[str] | None = (), **fields: Any) -> R:  # fmt: skip
    """Make a rule of class `kind` from `formulas`, and add it to the registry.

    A formula takes a parameter of the primitive as a keyword-only argument of the same name. The
    rule supports these parameters and those in `supported_params`; None: all parameters. `fields`
    are further fields of the class.
    """
    used = {f: _keyword_only_names(f) for f in formulas}
    name = primitive if isinstance(primitive, str) else primitive.name
    names = None
    if supported_params is not None:
        names = frozenset(supported_params).union(*used.values())
    return add_rule(primitive, kind(name, word, tuple(formulas), used, names, traits, **fields))


def _keyword_only_names(f: Formula) -> tuple[str, ...]:
    params = inspect.signature(f).parameters.values()
    return tuple(p.name for p in params if p.kind is p.KEYWORD_ONLY)


def add_rule(primitive: Primitive | str, rule: R) -> R:
    """Add the rule of a primitive, or replace a user's earlier rule for it.

    The earlier rule is replaced without an error, so that a notebook cell can run twice.

    Args:
      primitive: the Primitive, or the name of one of JAX's own primitives.
      rule: an instance of a subclass of `Rule`, usually of `xform.extend.Structured`, whose
        docstring has an example.

    Returns:
      The rule.

    Raises:
      WrongRule: the primitive has one of xform's own rules, or JAX has no primitive of that
        name.
    """
    if isinstance(primitive, str):
        # xform sets the fallback after it has declared its own rules. Later rules are users' rules.
        own = _fallback is None
        jax_primitive, rule = primitive_named(primitive), dataclasses.replace(rule, own=own)
        if jax_primitive is None:
            if _fallback is not None:
                raise WrongRule(
                    f"declaration of a rule for {primitive!r}",
                    "JAX has no primitive of that name, or has not loaded it yet",
                    "",
                    "pass the Primitive object",
                )
            PENDING_RULES[primitive] = rule
            return rule
        primitive = jax_primitive
    previous = rule_of(primitive)
    if previous is not None:
        if previous.own:
            raise WrongRule(
                f"declaration of a rule for {primitive.name}",
                "xform has a rule for that primitive",
                "",
                "bind a primitive of your own, or wrap the call in jax.custom_jvp or "
                "jax.custom_vjp",
            )
        clear_program_cache()
    RULES[primitive] = rule
    return rule


_fallback: Callable[[Primitive], Rule | None] | None = None


def set_fallback(find_rule: Callable[[Primitive], Rule | None]) -> None:
    """Set the function that finds a rule for a primitive that has none in the registry.

    xform calls this after it has declared all of its own rules. From then on `add_rule` refuses
    names that JAX does not have.
    """
    global _fallback
    _fallback = find_rule


def rule_of(primitive: Primitive) -> Rule | None:
    """Return the rule of a primitive, from the registry or the fallback; None if it has no rule."""
    rule = RULES.get(primitive)
    if (
        rule is None
        and primitive.name in PENDING_RULES
        and primitive_named(primitive.name) is primitive
    ):
        rule = RULES[primitive] = PENDING_RULES.pop(primitive.name)
    return _fallback(primitive) if rule is None and _fallback is not None else rule


def rules_by_name() -> dict[str, Rule]:
    """All rules, by the name of the primitive, for listings.

    Rules of primitives that JAX has not loaded yet are included. If several primitives share a
    name, xform's own rule is returned.
    """
    rules = sorted((*PENDING_RULES.values(), *RULES.values()), key=lambda rule: rule.own)
    return {rule.name: rule for rule in rules}


def linear_groups(eqn: JaxprEqn) -> Sequence[Sequence[int]]:
    """Groups of operands. The results are linear in the operands of one group, together."""
    rule = rule_of(eqn.primitive)
    return () if rule is None else rule.linear_groups(eqn)


def traits(primitive: Primitive) -> Traits:
    """Return the traits of a primitive; `UNKNOWN` if it has no rule."""
    rule = rule_of(primitive)
    return UNKNOWN if rule is None else rule.traits


def label(primitive: Primitive, params: Mapping[str, Any]) -> str | None:
    """Return the name that an operation such as `checkpoint_name` gives to its operand, or None."""
    name = traits(primitive).label
    return str(params[name]) if name else None


def ends(eqn: JaxprEqn) -> list[Ends]:
    """Return for each operand of an equation how each of its axes ends.

    All axes count as mixed if the rule does not state it.

    >>> from xform.registry.table import ends
    >>> (product,) = jax.make_jaxpr(jax.lax.dot)(jnp.ones((2, 3)), jnp.ones((3, 4))).eqns
    >>> ends(product)  # axes 0 and 1 of the result; 2 is summed
    [(0, 2), (2, 1)]
    """
    return traits(eqn.primitive).axis_ends(eqn)


def keeps_order(eqn: JaxprEqn) -> bool:
    """Return whether the result has the elements of operand 0 in the same row-major order."""
    reshapes = traits(eqn.primitive).reshapes
    return reshapes if isinstance(reshapes, bool) else reshapes(eqn)


def returns_operands(eqn: JaxprEqn) -> bool:
    """Return whether each of several results is the operand at its position, as for a barrier."""
    known = traits(eqn.primitive)
    return eqn.primitive.multiple_results and isinstance(known.dependence, Elementwise)


def flow_of(eqn: JaxprEqn) -> Flow | None:
    """How values pass through the programs that an equation runs; None if it runs none."""
    rule = rule_of(eqn.primitive)
    return None if rule is None else rule.flow(eqn)


def lookup(eqn: JaxprEqn) -> Rule:
    """Return the rule of an equation's primitive, which must support the equation's parameters.

    Raises:
      MissingRule: the primitive has no rule.
      UnsupportedParam: the rule does not support a parameter of the equation.
    """
    rule = rule_of(eqn.primitive)
    if rule is None:
        raise MissingRule(
            f"derivative of {eqn.primitive.name}",
            f"xform has no rule for the primitive {eqn.primitive.name!r}",
            frame(eqn),
            "declare one with xform.extend (pointwise, linear, bilinear, composite), wrap the call "
            "in jax.custom_vjp, or cut it off with jax.lax.stop_gradient",
        )
    rule.check(eqn)
    return rule
