"""`compare`: the memory and time of several policies on several targets, in one table.

A policy says which values the backward pass saves. A target is a device to compile for. A budget is
a policy that keeps the bytes of the peak below a limit.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax

from xform.errors import BudgetInfeasible, NotScalar, WrongArgument
from xform.introspection.callables import check_callable, function_name
from xform.memory.analysis import memory_analysis
from xform.memory.description import Description, describe
from xform.memory.report import MemoryReport
from xform.memory.report_page import write
from xform.memory.targets import parse_target
from xform.planner.report.picture import BLUE, ORANGE, new_axes, save_figure
from xform.policies import min_cut, parse, policy_name
from xform.policies.budgets import Fit, bytes_of
from xform.policies.sample import check_known_sizes
from xform.steps.gradient import GradientStep
from xform.steps.step import is_step, refuse_loss_options
from xform.terminal import progress_line
from xform.terminal.notebook import Result
from xform.terminal.text import (
    BYTES,
    FLOPS,
    columns,
    human_bytes,
    human_flops,
    human_seconds,
    unit_of,
)
from xform.transforms.function import Tree
from xform.transforms.inspect import SUBJECT
from xform.transforms.reverse import Policy

# Points of a plot share one label if they are closer than this fraction of the largest value.
_NEAR = 0.03
# Units for an estimated time, from microseconds up.
_TIMES = ("us", "ms", "s")

Policies = Mapping[str, Policy] | Sequence[Policy]


@dataclasses.dataclass(frozen=True)
class Entry:
    """One policy on one target. `report` is None if no plan of the policy fits.

    Attributes:
      policy: the name of the policy.
      target: the name of the target.
      report: the compiler's memory report.
      floor_bytes: for a budget that no plan fits, the lowest peak found, in bytes.
    """

    policy: str
    target: str
    report: MemoryReport | None
    floor_bytes: int = 0


@dataclasses.dataclass(frozen=True, repr=False)
class Comparison(Result):
    """The reports of several policies on several targets, as a table, a plot or an HTML page.

    Attributes:
      function: the name of the function.
      entries: one entry for each policy on each target.
      description: the compiled transform and its arguments.
    """

    function: str
    entries: tuple[Entry, ...]
    description: Description = dataclasses.field(default_factory=Description)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def to_dict(self) -> dict[str, Any]:
        """Return the whole comparison as plain data."""
        return {
            "function": self.function,
            "compiled": self.description.compiled,
            "given": self.description.given,
            "entries": [
                {
                    "policy": e.policy,
                    "target": e.target,
                    "floor_bytes": e.floor_bytes,
                    "report": None if e.report is None else e.report.to_dict(),
                }
                for e in self.entries
            ],
        }

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Write one HTML page with every report and a switch between them."""
        entries = [(e, e.report) for e in self.entries if e.report is not None]
        labels = [f"{e.policy}, {e.target}" for e, _ in entries]
        write([r.to_dict() for _, r in entries], path, labels)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Plot bytes against estimated time, or against FLOPs if a device's speed is unknown."""
        figure, ax = new_axes("Comparison.plot")
        entries = [
            e for e in self.entries if e.report is not None and e.report.total_bytes is not None
        ]
        timed = all(e.report is not None and e.report.seconds is not None for e in entries)
        sizes = [e.report.total_bytes or 0 for e in entries if e.report is not None]
        costs = [1e6 * (e.report.seconds or 0) if timed else e.report.flops
                 for e in entries if e.report is not None]  # fmt: skip
        size_unit, size_scale = unit_of(max(sizes, default=0), 1024, BYTES)
        cost_unit, cost_scale = unit_of(max(costs, default=0), 1000, _TIMES if timed else FLOPS)
        for i, target in enumerate(dict.fromkeys(e.target for e in entries)):
            own = [k for k, e in enumerate(entries) if e.target == target]
            color = (BLUE, ORANGE, "#2f855a", "#805ad5", "#718096")[i % 5]
            ax.plot([sizes[k] / size_scale for k in own], [costs[k] / cost_scale for k in own],
                    "o", color=color, label=target)  # fmt: skip
        for k, names in _labels(entries, sizes, costs).items():
            at_right = sizes[k] > 0.6 * max(sizes)  # a label to its right would leave the frame
            point = sizes[k] / size_scale, costs[k] / cost_scale
            ax.annotate(", ".join(names), point, fontsize=8, xytext=(-6 if at_right else 6, 5),
                        textcoords="offset points", ha="right" if at_right else "left")  # fmt: skip
        ax.set_title(f"{self.function}: what each policy takes", loc="left")
        ax.set_xlabel(f"{size_unit} on each device (compiled)")
        ax.set_ylabel(f"step, {cost_unit} (roofline estimate)" if timed else cost_unit)
        ax.margins(y=0.2)
        ax.set_xlim(0, 1.05 * max(sizes, default=0) / size_scale or 1)
        # The upper left has the policies that save little, and the lower right those that save all.
        ax.legend(frameon=False, loc="upper right")
        save_figure(figure, "Comparison.plot", path)

    def heading(self) -> str:
        """Return the function, the policies, the targets, and the least and the most bytes."""
        policies, targets = (", ".join(dict.fromkeys(names)) for names in
                             ([e.policy for e in self], [e.target for e in self]))  # fmt: skip
        sizes = [e.report.total_bytes for e in self if e.report is not None]
        known = [n for n in sizes if n is not None]
        span = f": {human_bytes(min(known))} to {human_bytes(max(known))}" if known else ""
        return f"{self.function} under {policies}, on {targets}{span}"

    def __str__(self) -> str:
        head = ["policy", "target", "total", "temp", "head-room", "FLOPs", "step (estimate)"]
        table = columns([head, *map(_cells, self.entries)], right=(2, 3, 4, 5, 6))
        return (
            f"{self.function}\n{self.description}\n\n{table}"
            if self.description.arguments
            else table
        )


def compare(
    f: Callable[..., Any],
    *args: Tree,
    policies: Policies,
    targets: Sequence[str | None] = (None,),
    argnums: int | Sequence[int] = 0,
    progress: Callable[[str, str], None] | None = None,
    **options: Any,
) -> Comparison:
    """Compile `f` under several policies for several targets and compare memory and time.

    Args:
      f: a loss, as for `value_and_grad`, or a training step that `xform.jit` returns, see `plan`.
        `compare` compiles the whole step, or the value and the gradient of the loss.
      *args: arrays or `jax.ShapeDtypeStruct`s in pytrees; nothing is run.
      policies: a list of policies or of their texts, such as `"budget:6GiB"`, or a mapping from
        names to them. None is the default policy. "auto" fits the memory of each target, or
        `capacity`. A budget limits the whole compiled function.
      targets: names of devices, such as `"cpu"`, `"tpu:v5e:2x2"` or `"gpu:h100:8"`, attached or
        not; None is JAX's default backend. `python -m xform doctor` lists the names.
      argnums: for a loss, position or positions of the arguments to differentiate.
      progress: a function `progress(policy, target)`, called with the two names before each
        compilation. None: no calls.
      **options: options of `memory_analysis`: `mesh`, `in_specs`, `donate_argnums` and `capacity`.
        They apply to every target. A step has its own `donate_argnums`.

    Returns:
      A `Comparison`. If no plan fits a budget, its row has no report. It shows the floor instead:
      the lowest peak of any plan that was found.

    Raises:
      WrongArgument: a target is unknown, or there are no policies or no targets.
      NotScalar: the loss returns something other than a scalar.

    Cost: one trace of `f` for each policy, and one compilation for each policy and target; at most
    eight for a budget of the peak. Budgets share the trace and the compilations.

    >>> loss = lambda w, x: jnp.sum(jnp.sin(x @ w) @ w)
    >>> w = x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    >>> table = xform.compare(loss, w, x, policies=["min_cut", "save_nothing"])
    >>> [entry.policy for entry in table]
    ['min_cut', 'save_nothing']
    """
    check_callable(f, "compare")
    request = f"compare of {function_name(f)}"
    check_known_sizes(request, args)
    if "target" in options:
        target = options["target"]
        raise WrongArgument(request, f"target={target!r} is not an option of compare", "",
                            f"give a list of targets: targets=[{target!r}]")  # fmt: skip
    by_name = _policies_by_name(policies, request)
    if is_step(f):
        step = f
        refuse_loss_options(f, "compare", argnums=argnums != 0)
    else:
        step = GradientStep(f, argnums, options.pop("donate_argnums", ()))
    several = [targets] if isinstance(targets, str) else targets
    if not isinstance(several, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise WrongArgument(request, f"targets={targets!r} is not a list of targets", "",
                            "give a list, such as ['cpu', 'tpu:v5e:1x1']")  # fmt: skip
    target_list = list(several)
    for argument, is_empty in (("policies", not by_name), ("targets", not target_list)):
        if is_empty:
            raise WrongArgument(
                f"{request} with {argument}=[]", "there is nothing to compare", "",
                f"give at least one, such as {argument}=[None]: None is the default",
            )  # fmt: skip
    for target in target_list:  # before the first compilation
        parse_target(target)
    entries: list[Entry] = []
    with progress_line.show(f"comparing policies of {function_name(f)}"):
        for target, name in itertools.product(target_list, by_name):
            count = len(target_list) * len(by_name)
            progress_line.update(f"{len(entries) + 1} of {count}, {name}")
            if progress:
                progress(name, target or "default backend")
            try:
                policy = within_capacity(by_name[name], target, options.get("capacity"))
                report = memory_analysis(step.under(policy), *args, target=target, **options)
                entries.append(Entry(name, report.target, report))
            except NotScalar as error:
                raise NotScalar(error.request, error.problem, error.where, SUBJECT) from None
            except BudgetInfeasible as error:
                entries.append(Entry(name, target or jax.default_backend(), None,
                                     error.floor_bytes))  # fmt: skip
    note = next((e.report.description.note for e in entries if e.report is not None), "")
    description = dataclasses.replace(describe(step, args, {}), policy="", note=note)
    return Comparison(function_name(f), tuple(entries), description)


def within_capacity(policy: Policy, target: str | None, capacity: str | int | None) -> Policy:
    """Return the policy; "auto" is a budget of the memory `capacity`, if that is given."""
    if not isinstance(policy, Fit) or capacity is None:
        return policy
    device = parse_target(target).device.name
    return policy.within(bytes_of(capacity, f"capacity={capacity!r}"), device)


def of_targets(reports: Sequence[MemoryReport]) -> Comparison:
    """Return the comparison of one function on several targets, without a policy."""
    first = reports[0]
    entries = tuple(Entry("as it is", report.target, report) for report in reports)
    return Comparison(first.function, entries, first.description)


def _labels(entries: Sequence[Entry], sizes: Sequence[float], costs: Sequence[float]
            ) -> dict[int, list[str]]:  # fmt: skip
    """Return the names of policies to write at points of a plot, by the index of the point.

    Points that are too close for two labels share one, at the first of them.
    """
    cell = lambda values, k: round(values[k] / max(*values, 1) / _NEAR)
    first_in_cell: dict[tuple[int, int], int] = {}
    labels: dict[int, list[str]] = {}
    for k, entry in enumerate(entries):
        first = first_in_cell.setdefault((cell(sizes, k), cell(costs, k)), k)
        labels[first] = list(dict.fromkeys([*labels.get(first, ()), entry.policy]))
    return labels


def _policies_by_name(policies: Any, caller: str) -> dict[str, Policy]:
    """Return the policies by name; equal names are numbered. None is replaced by the default."""
    if isinstance(policies, Mapping):
        return {str(name): min_cut if p is None else parse(p) for name, p in policies.items()}
    if callable(policies) or isinstance(policies, str) or not isinstance(policies, Iterable):
        raise WrongArgument(
            caller,
            f"policies={policies!r} is not a list of policies",
            "",
            "give a list, such as ['min_cut', 'save_nothing'], or a dict of names",
        )
    by_name: dict[str, Policy] = {}
    count_by_name = collections.Counter[str]()
    for policy in policies:
        policy = min_cut if policy is None else parse(policy)
        name = policy_name(policy)
        count_by_name[name] += 1
        by_name[name if count_by_name[name] == 1 else f"{name} ({count_by_name[name]})"] = policy
    return by_name


def _cells(entry: Entry) -> list[str]:
    """Return the cells of an entry's row in the table."""
    report = entry.report
    if report is None:
        floor = human_bytes(entry.floor_bytes or None)
        return [entry.policy, entry.target, f"floor {floor}", *[""] * 4]
    room = report.head_room_bytes
    left = "" if room is None else human_bytes(room) if room >= 0 else f"over {human_bytes(-room)}"
    return [
        entry.policy,
        entry.target,
        human_bytes(report.total_bytes),
        "refused" if report.refused else human_bytes(report.temp_bytes),
        left,
        human_flops(report.flops),
        "" if report.seconds is None else human_seconds(report.seconds),
    ]
