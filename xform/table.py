"""The registry: what is known of each primitive, its derivative and its traits, in one place.

A rule is that of a Primitive object, not of a name: a user's own "sin" is not JAX's. The library's
own rules name JAX's primitives, and find the object when they load, or, where JAX loads it later
(kernels, sparse arrays), when it is first met. `xform.words` has the words to declare one.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, TypeVar

from xform._jax import JaxprEqn, Primitive, named
from xform.arithmetic import Value, differentiable
from xform.errors import MissingRule, UnsupportedParam, WrongRule
from xform.ir import Mask, Program, forget
from xform.source import frame
from xform.traits import PLAIN, UNKNOWN, Traits

Formula = Callable[..., Any]
R = TypeVar("R", bound="Rule")
RULES: dict[Primitive, Rule] = {}
# Rules of primitives that JAX has not loaded yet, by name, and of those that other versions have.
LATER: dict[str, Rule] = {}


@dataclasses.dataclass(frozen=True, eq=False)
class Rule:
    """What xform knows of one primitive.

    Attributes:
      name: what its equations are called.
      word: how its derivative is declared.
      formulas: the derivative.
      used: for each formula, the parameters that it takes.
      known: the parameters that the rule knows; None: any, which none of them may change.
      traits: what else is known.
      own: whether it is one of the library's own rules.
    """

    name: str
    word: str
    formulas: tuple[Formula, ...] = ()
    used: dict[Formula, tuple[str, ...]] = dataclasses.field(default_factory=dict, repr=False)
    known: frozenset[str] | None = None
    traits: Traits = PLAIN
    own: bool = False
    users: ClassVar[bool] = False  # it calls a user's backward function
    numbers: ClassVar[bool] = False  # it takes Python's numbers as they are

    def active(self, eqn: JaxprEqn, active: Mask) -> Mask:
        """Which outputs depend differentiably on the active inputs."""
        if self.word == "constant" or True not in active:
            return (False,) * len(eqn.outvars)
        return tuple([differentiable(v.aval) for v in eqn.outvars])

    def useful(self, eqn: JaxprEqn, active: Mask, wanted: Mask) -> Mask:
        """Which of the active inputs the wanted outputs may depend on."""
        return active

    def inlined(self, eqn: JaxprEqn, staged: bool) -> Program | None:
        """The program that stands for a call of no weight of its own.

        `staged`: whether the call is part of another computation, rather than run by itself.
        """
        return None

    def push(self, eqn: JaxprEqn, xs: Sequence[Value], ys: Sequence[Value], dxs: Sequence[Value]
             ) -> Sequence[Value]:  # fmt: skip
        """Tangents of the outputs, from the inputs, the outputs and the inputs' tangents."""
        raise NotImplementedError

    def pull(self, eqn: JaxprEqn, xs: Sequence[Value], ys: Sequence[Value], cts: Sequence[Value],
             active: Mask) -> Sequence[Value]:  # fmt: skip
        """Cotangents of the active inputs, from the inputs, the outputs and their cotangents."""
        raise NotImplementedError

    def check(self, eqn: JaxprEqn) -> None:
        """Refuse a parameter that this rule does not know."""
        if self.known is None or eqn.params.keys() <= self.known:
            return
        for name, value in eqn.params.items():
            neutral = value is None or value is False or (isinstance(value, tuple) and not value)
            if name not in self.known and not neutral:
                raise UnsupportedParam(
                    f"derivative of {eqn.primitive.name}",
                    f"its rule does not know the parameter {name}={value!r}",
                    frame(eqn),
                    "declare a rule that takes it as a keyword-only argument, with xform.extend",
                )

    def call(self, formula: Formula, eqn: JaxprEqn, *args: Any) -> Any:
        used = self.used[formula]
        if not used:
            return formula(*args)
        return formula(*args, **{k: eqn.params[k] for k in used if k in eqn.params})


def declare(kind: type[R], primitive: Primitive | str, word: str,
            formulas: Sequence[Formula], traits: Traits = PLAIN,
            known: Iterable[str] | None = (), **fields: Any) -> R:  # fmt: skip
    """Enter a rule of some kind; the formulas' keyword-only arguments are known parameters too."""
    used = {f: _keywords(f) for f in formulas}
    name = primitive if isinstance(primitive, str) else primitive.name
    every = None if known is None else frozenset(known).union(*used.values())
    return add_rule(primitive, kind(name, word, tuple(formulas), used, every, traits, **fields))


def _keywords(f: Formula) -> tuple[str, ...]:
    params = inspect.signature(f).parameters.values()
    return tuple(p.name for p in params if p.kind is p.KEYWORD_ONLY)


def add_rule(primitive: Primitive | str, rule: R) -> R:
    """Enter the rule of a primitive; declared again (a notebook cell run twice), it is replaced.

    Args:
      primitive: the Primitive; a name stands for JAX's own primitive of that name.
      rule: an instance of a subclass of `Rule`, mostly of `xform.extend.Structured`, which has the
        example.

    Returns:
      The rule.

    Raises:
      WrongRule: the primitive has one of the library's own rules, or a name is no primitive's.
    """
    if isinstance(primitive, str):
        own, rule = named(primitive), dataclasses.replace(rule, own=True)
        if own is None:
            if _elsewhere is not None:
                raise WrongRule(
                    f"declaration of a rule for {primitive!r}",
                    "JAX has no primitive of that name, or has not loaded it yet",
                    "",
                    "pass the Primitive object",
                )
            LATER[primitive] = rule
            return rule
        primitive = own
    before = rule_of(primitive)
    if before is not None:
        if before.own:
            raise WrongRule(
                f"declaration of a rule for {primitive.name}",
                "xform has a rule for that primitive",
                "",
                "bind a primitive of your own, or wrap the call in jax.custom_jvp or "
                "jax.custom_vjp",
            )
        forget()
    RULES[primitive] = rule
    return rule


_elsewhere: Callable[[Primitive], Rule | None] | None = None


def loaded(elsewhere: Callable[[Primitive], Rule | None]) -> None:
    """The library's own rules are all there: a name that JAX does not know is wrong from now on.

    A primitive that has no rule here may have one `elsewhere`.
    """
    global _elsewhere
    _elsewhere = elsewhere


def rule_of(primitive: Primitive) -> Rule | None:
    """The rule of a primitive, if it has one."""
    rule = RULES.get(primitive)
    if rule is None and primitive.name in LATER and named(primitive.name) is primitive:
        rule = RULES[primitive] = LATER.pop(primitive.name)
    return _elsewhere(primitive) if rule is None and _elsewhere is not None else rule


def every_rule() -> dict[str, Rule]:
    """All rules by the names of their primitives, loaded or not: for lists, not for looking up.

    Of primitives of one name, the library's own.
    """
    rules = sorted((*LATER.values(), *RULES.values()), key=lambda rule: rule.own)
    return {rule.name: rule for rule in rules}


def traits(primitive: Primitive) -> Traits:
    """The traits of a primitive; those of which nothing is known, if it has no rule."""
    rule = rule_of(primitive)
    return UNKNOWN if rule is None else rule.traits


def lookup(eqn: JaxprEqn) -> Rule:
    """The rule of an equation's primitive, checked against its parameters."""
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
