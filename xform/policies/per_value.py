"""Policies that decide about one value at a time, and the answer of such a policy for an equation.

Each policy is a callable of JAX's protocol: `policy(primitive, *avals, **params)` returns True to
save the outputs of an equation, False to recompute them, or an `Offloadable` to offload them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from xform._jax import (
    JaxprEqn,
    Offloadable,
    Primitive,
    policy_answer,
)
from xform.errors import WrongArgument
from xform.policies.budgets import Budget
from xform.policies.min_cut import MinCut
from xform.program.source import frame
from xform.registry.table import label, traits

# The answer of a policy for an equation.
Answer = bool | Offloadable
Policy = Callable[..., Any]
# The prefix of the names that xform gives to the values that a `TaggedPolicy` saves.
TAG = "xform saves "


@dataclasses.dataclass(frozen=True)
class ConstantPolicy:
    """The class of the policies `save_everything` and `save_nothing`.

    `save_everything` saves everything that the backward pass reads. `save_nothing` saves nothing
    but the arguments. The loops of a whole function still save their carries. Results of effects,
    and random numbers without a key, are saved under every policy.

    Attributes:
      name: its name, for messages.
      answer: whether every value is saved.
    """

    name: str
    answer: bool

    def __call__(self, prim: Primitive, *_: Any, **params: Any) -> Answer:
        """Return the answer for an equation, in JAX's protocol."""
        return self.answer

    def __repr__(self) -> str:
        return self.name


@dataclasses.dataclass(frozen=True)
class DotsPolicy:
    """The class of `save_dots`, `save_dots_with_no_batch_dims` and their offloading variant.

    `save_dots` saves the results of matrix products and convolutions.
    `save_dots_with_no_batch_dims` saves those of matrix products without batch dimensions.

    Attributes:
      name: its name, for messages.
      batch: whether it also covers products with batch dimensions, and convolutions.
      answer: True to save them, or an `Offloadable` to offload them.
    """

    name: str
    batch: bool = True
    answer: Answer = True

    def __call__(self, prim: Primitive, *_: Any, **params: Any) -> Answer:
        """Return the answer for an equation, in JAX's protocol."""
        product = traits(prim).product
        if product == "matrix":
            _, batch_dims = params["dimension_numbers"]
            return self.answer if self.batch or not any(map(len, batch_dims)) else False
        return self.answer if self.batch and product else False

    def __repr__(self) -> str:
        return self.name


@dataclasses.dataclass(frozen=True)
class TaggedPolicy:
    """A policy that decided for a whole remat region, and gave a name to each saved value.

    Attributes:
      planned: the policy that decided. xform's transforms use it again.
      names: the names of the saved values. JAX's transforms save the values with these names.
    """

    planned: MinCut | Budget
    names: frozenset[str]

    def __call__(self, prim: Primitive, *_: Any, **params: Any) -> Answer:
        """Return whether the equation gives a value one of the names."""
        return label(prim, params) in self.names

    def __repr__(self) -> str:
        return repr(self.planned)


@dataclasses.dataclass(frozen=True)
class NamePolicy:
    """A policy that decides by the names that `checkpoint_name` gives to values.

    Attributes:
      saved: the names of the values to save.
      offloaded: the names of the values to offload to `destination`.
      excluded: if not None, all named values are saved except these.
      destination: the memories of an offloaded value.
    """

    saved: frozenset[str] = frozenset()
    offloaded: frozenset[str] = frozenset()
    excluded: frozenset[str] | None = None
    destination: Offloadable | None = None

    def __call__(self, prim: Primitive, *_: Any, **params: Any) -> Answer:
        """Return the answer for an equation, in JAX's protocol."""
        name = label(prim, params)
        if name is None:
            return False
        if self.excluded is not None:
            return name not in self.excluded
        if name in self.offloaded and self.destination is not None:
            return self.destination
        return name in self.saved

    def __repr__(self) -> str:
        if self.excluded is not None:
            return f"save_any_names_but_these({', '.join(sorted(self.excluded))})"
        offloaded = f"; offload {', '.join(sorted(self.offloaded))}" if self.offloaded else ""
        return f"save_only_these_names({', '.join(sorted(self.saved))}{offloaded})"


save_everything = ConstantPolicy("save_everything", True)
"""Save everything that the backward pass reads."""
save_nothing = ConstantPolicy("save_nothing", False)
"""Save nothing but the arguments. The loops of a whole function still save their carries."""
save_dots = DotsPolicy("save_dots")
"""Save the results of matrix products and convolutions."""
save_dots_with_no_batch_dims = DotsPolicy("save_dots_with_no_batch_dims", batch=False)
"""Save the results of matrix products without batch dimensions."""


def save_only_these_names(*names: str) -> NamePolicy:
    """Return a policy that saves the values that `checkpoint_name` gave one of these names.

    >>> import xform
    >>> from jax.ad_checkpoint import checkpoint_name
    >>> f = lambda x: jnp.sum(jnp.sin(checkpoint_name(jnp.exp(x), "e")))
    >>> policy = xform.policies.save_only_these_names("e")
    >>> xform.residuals(f, jnp.ones(8), policy=policy).total_bytes
    32
    """
    return NamePolicy(saved=_name_set("save_only_these_names", names))


def save_any_names_but_these(*names: str) -> NamePolicy:
    """Return a policy that saves every named value whose name is not one of these."""
    return NamePolicy(excluded=_name_set("save_any_names_but_these", names))


def save_and_offload_only_these_names(
    *,
    names_which_can_be_saved: tuple[str, ...] | list[str],
    names_which_can_be_offloaded: tuple[str, ...] | list[str],
    offload_src: str,
    offload_dst: str,
) -> NamePolicy:
    """Return a policy that saves values with some names, and offloads values with other names.

    Args:
      names_which_can_be_saved: names of values that stay on the device.
      names_which_can_be_offloaded: names of values that are moved to `offload_dst`.
      offload_src: the memory that offloaded values come from, such as "device".
      offload_dst: the memory where they wait, such as "pinned_host". XLA:CPU has only one memory.

    Raises:
      WrongArgument: a name is in both lists, or is not a string.
    """
    request = "save_and_offload_only_these_names"
    saved, offloaded = names_which_can_be_saved, names_which_can_be_offloaded
    saved, offloaded = _name_set(request, saved), _name_set(request, offloaded)
    if in_both := saved & offloaded:
        raise WrongArgument(
            request,
            f"{sorted(in_both)} are in both lists",
            "",
            "put each name into one list: saved or offloaded",
        )
    _name_set(request, (offload_src, offload_dst))
    destination = Offloadable(src=offload_src, dst=offload_dst)
    return NamePolicy(saved=saved, offloaded=offloaded, destination=destination)


def offload_dots_with_no_batch_dims(offload_src: str, offload_dst: str) -> DotsPolicy:
    """Return a policy that offloads matrix products without batch dimensions, and saves nothing.

    Args:
      offload_src: the memory that offloaded values come from, such as "device".
      offload_dst: the memory where they wait, such as "pinned_host". XLA:CPU has only one memory.

    Raises:
      WrongArgument: a memory is not given as a string.
    """
    _name_set("offload_dots_with_no_batch_dims", (offload_src, offload_dst))
    destination = Offloadable(src=offload_src, dst=offload_dst)
    return DotsPolicy("offload_dots_with_no_batch_dims", batch=False, answer=destination)


def _name_set(request: str, names: Any) -> frozenset[str]:
    """Return names as a set, or raise `WrongArgument` unless they are a sequence of strings."""
    is_list = not isinstance(names, str) and isinstance(names, Iterable)
    invalid = [n for n in names if not isinstance(n, str)] if is_list else [names]
    if invalid:
        raise WrongArgument(
            request, f"{invalid[0]!r} is not a name", "", "give each name as a string"
        )
    return frozenset(names)


@dataclasses.dataclass(frozen=True)
class EitherPolicy:
    """A policy that saves a value if one of two policies saves it."""

    one: Policy
    other: Policy

    def __call__(self, prim: Primitive, *avals: Any, **params: Any) -> Answer:
        """Return the answer for an equation, in JAX's protocol."""
        answers = [_answer(p, prim, avals, params) for p in (self.one, self.other)]
        if not all(isinstance(a, bool) for a in answers):
            raise WrongArgument(
                "save_from_both_policies",
                "one of the two policies offloads values, which cannot be combined with saving",
                "",
                "write one callable policy that returns True, False or an Offloadable",
            )
        return any(answers)


def answer_for(policy: Policy, eqn: JaxprEqn) -> Answer:
    """Return a policy's answer for one equation.

    Raises:
      WrongArgument: the policy returned something else than True, False or an `Offloadable`.
    """
    return _answer(policy, eqn.primitive, [v.aval for v in eqn.invars], eqn.params, eqn)


def _answer(policy: Policy, prim: Primitive, avals: Sequence[Any], params: Mapping[str, Any],
            eqn: JaxprEqn | None = None) -> Answer:  # fmt: skip
    """Return a policy's answer for a primitive; `eqn` gives the source line of an error."""
    answer = policy(prim, *avals, **params)
    if (known := policy_answer(answer)) is not None:
        return known
    raise WrongArgument(
        f"policy={getattr(policy, '__name__', repr(policy))}",
        f"it returned {answer!r}, of type {type(answer).__name__}, for {prim.name}",
        frame(eqn) if eqn else "",
        "call it first: it returns a policy" if callable(answer) else
        "return True (save), False (recompute) or a jax.ad_checkpoint.Offloadable",
    )  # fmt: skip
