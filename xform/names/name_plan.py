"""`NamePlan`: which named values every layer saves, with exports for sites that run plain JAX."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from xform.names.name_set import NamedValue, NameSet, WeighedNames
from xform.names.trainers import maxtext_settings, tunix_settings
from xform.steps.step_plan import StepPlan
from xform.terminal.notebook import Result
from xform.terminal.text import (
    columns,
    human_bytes,
    human_flops,
    human_seconds,
    recomputed_flops,
    shorten_place,
)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class NamePlan(Result):
    """Which named values the remat regions of a program save, offload and recompute.

    `xform.plan_names` makes it. The choice is the same in every region, such as every layer. The
    program runs under plain JAX with it, so a site that cannot use xform at run time can still use
    the plan: see `checkpoint_policy`, `as_code`, `maxtext` and `tunix`.

    Attributes:
      function: the name of the function.
      policy: the budget, as text.
      target: the device that the plan is for.
      names: the saved and the offloaded names; all other values are recomputed.
      values: all named values of the regions.
      compiled_bytes: the compiler's peak of the plain JAX program under this choice, on each
        device. The plan promises these bytes.
      recompute_flops: FLOPs that the backward pass recomputes and that XLA does not fuse.
      compiles: how many programs were compiled to find the plan.
      seconds: the time of planning, without compilations.
      compile_seconds: the time of the compilations.
      nothing: the costs if no named value is saved, simulated.
      everything: the costs if regions save all their values, simulated.
      budget_bytes: the budget in bytes.
      free: the plan of `xform.jit` within the same budget, which is not restricted to names; None
        if it was not made.
      no_free_plan: why `free` was not made; "" if it was.
    """

    function: str
    policy: str
    target: str
    names: NameSet
    values: tuple[NamedValue, ...]
    compiled_bytes: int
    recompute_flops: int
    compiles: int
    seconds: float
    compile_seconds: float
    nothing: WeighedNames
    everything: WeighedNames
    budget_bytes: int
    free: StepPlan | None = None
    no_free_plan: str = ""

    @property
    def saved(self) -> tuple[str, ...]:
        """The names of the values that stay on the device."""
        return tuple(v.name for v in self.values if v.name in self.names.saved)

    @property
    def offloaded(self) -> tuple[str, ...]:
        """The names of the values that wait in the host's memory."""
        return tuple(v.name for v in self.values if v.name in self.names.offloaded)

    def checkpoint_policy(self) -> Callable[..., Any]:
        """Return the plan as a policy of `jax.checkpoint_policies`, for `jax.checkpoint`."""
        return self.names.policy()

    def as_code(self) -> str:
        """Return Python code that makes the policy with JAX alone, and marks a function `layer`.

        The code defines `policy`. A site that has no xform can paste it.
        """
        if not self.offloaded:
            made = f"policy = jax.checkpoint_policies.save_only_these_names(*{self.saved!r})"
        else:
            made = (
                "policy = jax.checkpoint_policies.save_and_offload_only_these_names(\n"
                f"    names_which_can_be_saved={list(self.saved)!r},\n"
                f"    names_which_can_be_offloaded={list(self.offloaded)!r},\n"
                '    offload_src="device",\n    offload_dst="pinned_host",\n)'
            )
        return f"import jax\n\n{made}\nlayer = jax.checkpoint(layer, policy=policy)\n"

    def maxtext(self) -> dict[str, str]:
        """Return the plan as settings of MaxText: `remat_policy=custom`, and one for each name.

        A setting is "device" (save), "offload" or "remat" (recompute). On MaxText's command line
        they are written `name=setting`. The names are those of MaxText 0.2.5.

        Raises:
          WrongArgument: MaxText has no setting for a saved or offloaded name. The message names it.
        """
        request = f"maxtext settings of {self!r}"
        return maxtext_settings(self.names, (v.name for v in self.values), request)

    def tunix(self) -> dict[str, str]:
        """Return the plan as a setting of Tunix's models, `remat_config`.

        Tunix has no setting for single names. Only a plan that saves none of them has a setting:
        DECODER.

        Raises:
          WrongArgument: the plan saves or offloads a value. The message names the closest setting
            and its cost.
        """
        return tunix_settings(self.names, self._closest_of_tunix(), f"tunix settings of {self!r}")

    def _closest_of_tunix(self) -> str:
        """Describe the setting of Tunix that is closest to this plan, and its cost."""
        costs = lambda each: (
            f"{human_bytes(each.peak)} (simulated) and recomputes "
            f"{human_flops(each.recompute_flops)}"
        )
        plan = f"this plan takes {human_bytes(self.compiled_bytes)} and recomputes "
        plan += human_flops(self.recompute_flops)
        if self.everything.peak <= self.budget_bytes:
            return f"use the closest setting, NONE: it takes {costs(self.everything)}; {plan}"
        return f"use the closest setting, DECODER: it takes {costs(self.nothing)}; {plan}"

    def __repr__(self) -> str:
        peak = f"{human_bytes(self.compiled_bytes)} compiled"
        return f"<NamePlan of {self.function}, {self.policy}, peak {peak}>"

    def __str__(self) -> str:
        decisions = {n: "SAVE" for n in self.saved} | {n: "OFFLOAD" for n in self.offloaded}
        rows = [
            [v.name, decisions.get(v.name, "RECOMPUTE"), human_bytes(v.bytes),
             shorten_place(v.where)]
            for v in self.values
        ]  # fmt: skip
        table = columns([["name", "decision", "bytes", "where"], *rows], right=(2,))
        title = f"named values of {self.function}, {self.policy}, on {self.target}"
        return f"{title}\n{table}\n{self.summary}"

    @property
    def summary(self) -> str:
        """Two lines: the bytes and FLOPs of the plan, and what its restriction costs.

        The restriction is that every region treats a name alike, and saves named values only. Its
        cost is the difference to the free plan.
        """
        programs = f"{self.compiles} program{'s' * (self.compiles != 1)}"
        own = (
            f"{human_bytes(self.compiled_bytes)} compiled under plain JAX, "
            f"{recomputed_flops(self.recompute_flops)}, planned in "
            f"{human_seconds(self.seconds)}, {programs} compiled in "
            f"{human_seconds(self.compile_seconds)}"
        )
        if self.free is None or self.free.compiled_bytes is None:
            return f"{own}\nnot compared with a free plan: {self.no_free_plan}"
        bytes_, flops = self.free.compiled_bytes, self.free.recompute_flops
        return (
            f"{own}\nthe restriction to names: it recomputes "
            f"{_compared(self.recompute_flops - flops, human_flops)} than the free plan "
            f"({human_flops(flops)}) and takes "
            f"{_compared(self.compiled_bytes - bytes_, human_bytes)} ({human_bytes(bytes_)})"
        )


def _compared(difference: int, text: Callable[[int], str]) -> str:
    """Return a difference as text: "2 MiB more" or "2 MiB less"."""
    return f"{text(abs(difference))} {'less' if difference < 0 else 'more'}"
