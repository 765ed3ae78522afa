"""Remat policies: which values a backward pass keeps.

A policy answers, for one equation, whether its outputs are saved. Those here are JAX's, by xform's
names; each is also a callable of JAX's protocol (`policy(primitive, *avals, **params)`), so that
`jax.checkpoint` takes them, and anything that `jax.checkpoint` takes is taken by xform.

>>> import xform
>>> xform.policies.save_only_these_names("hidden") == xform.policies.save_only_these_names("hidden")
True
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from xform._jax import JaxprEqn, Offloadable, Primitive, policy_answer
from xform.errors import WrongArgument

Answer = bool | Offloadable
Policy = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Constantly:
    """One answer for every value."""

    name: str
    answer: bool

    def __call__(self, prim: Primitive, *_: Any, **params: Any) -> Answer:
        """The answer, in JAX's protocol."""
        return self.answer

    def __repr__(self) -> str:
        return self.name


@dataclasses.dataclass(frozen=True)
class Dots:
    """Matrix products (and convolutions, unless `batch` is False) are saved or offloaded."""

    name: str
    batch: bool = True
    answer: Answer = True

    def __call__(self, prim: Primitive, *_: Any, **params: Any) -> Answer:
        """The answer, in JAX's protocol."""
        if prim.name == "dot_general":
            _, batch_dims = params["dimension_numbers"]
            return self.answer if self.batch or not any(map(len, batch_dims)) else False
        return self.answer if self.batch and prim.name == "conv_general_dilated" else False

    def __repr__(self) -> str:
        return self.name


@dataclasses.dataclass(frozen=True)
class MinCut:
    """The fewest bytes with which the backward pass runs again only what fuses and costs little.

    It decides for a whole program at once; asked for one primitive, it saves what is costly.
    """

    name: str

    def __call__(self, prim: Primitive, *_: Any, **params: Any) -> Answer:
        """Whether a primitive is one that is never run again, in JAX's protocol."""
        return prim.name in ("dot_general", "conv_general_dilated")

    def __repr__(self) -> str:
        return self.name


@dataclasses.dataclass(frozen=True)
class Names:
    """Values named by `checkpoint_name`: `saved`, `offloaded`, or all but the `excluded`."""

    saved: frozenset[str] = frozenset()
    offloaded: frozenset[str] = frozenset()
    excluded: frozenset[str] | None = None
    destination: Offloadable | None = None

    def __call__(self, prim: Primitive, *_: Any, **params: Any) -> Answer:
        """The answer, in JAX's protocol."""
        if prim.name != "name":
            return False
        name = params["name"]
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


@dataclasses.dataclass(frozen=True)
class Either:
    """Saved if one of two policies saves it."""

    one: Policy
    other: Policy

    def __call__(self, prim: Primitive, *avals: Any, **params: Any) -> Answer:
        """The answer, in JAX's protocol."""
        answers = [policy_answer(p(prim, *avals, **params)) for p in (self.one, self.other)]
        if not all(isinstance(a, bool) for a in answers):
            raise WrongArgument(
                "save_from_both_policies",
                "one of the two policies offloads values; 'either' has no meaning for that",
                "",
                "write one callable policy that returns True, False or an Offloadable",
            )
        return any(answers)


save_everything = Constantly("save_everything", True)
min_cut = MinCut("min_cut")
save_nothing = Constantly("save_nothing", False)
save_dots = Dots("save_dots")
save_dots_with_no_batch_dims = Dots("save_dots_with_no_batch_dims", batch=False)


def save_only_these_names(*names: str) -> Names:
    """Save the values that `jax.ad_checkpoint.checkpoint_name` gave one of `names`."""
    return Names(saved=frozenset(names))


def save_any_names_but_these(*names: str) -> Names:
    """Save every named value whose name is not one of `names`."""
    return Names(excluded=frozenset(names))


def save_and_offload_only_these_names(
    *,
    names_which_can_be_saved: tuple[str, ...] | list[str],
    names_which_can_be_offloaded: tuple[str, ...] | list[str],
    offload_src: str,
    offload_dst: str,
) -> Names:
    """Save some names on the device and move others to `offload_dst` until they are needed.

    Memories are JAX's kinds, such as "device" and "pinned_host". XLA:CPU has one memory only.
    """
    both = set(names_which_can_be_saved) & set(names_which_can_be_offloaded)
    if both:
        raise WrongArgument(
            "save_and_offload_only_these_names",
            f"{sorted(both)} stand in both lists",
            "",
            "name each value once: saved or offloaded",
        )
    return Names(
        saved=frozenset(names_which_can_be_saved),
        offloaded=frozenset(names_which_can_be_offloaded),
        destination=Offloadable(src=offload_src, dst=offload_dst),
    )


def offload_dots_with_no_batch_dims(offload_src: str, offload_dst: str) -> Dots:
    """Move matrix products without batch dimensions to `offload_dst`; recompute the rest."""
    where = Offloadable(src=offload_src, dst=offload_dst)
    return Dots("offload_dots_with_no_batch_dims", batch=False, answer=where)


def save_from_both_policies(one: Policy, other: Policy) -> Either:
    """Save what either policy saves."""
    return Either(one, other)


def ask(policy: Policy, eqn: JaxprEqn) -> Answer:
    """A policy's answer for one equation."""
    return policy_answer(policy(eqn.primitive, *[v.aval for v in eqn.invars], **eqn.params))


def check(policy: Any) -> Policy:
    """The policy itself (None: save everything), or an error if it is none."""
    if policy is None or policy is jax.checkpoint_policies.everything_saveable:
        return save_everything
    if not callable(policy):
        raise WrongArgument(
            f"policy={policy!r}",
            "a policy is a callable of a primitive, its input types and parameters",
            "",
            "take one of xform.policies or jax.checkpoint_policies",
        )
    return policy
