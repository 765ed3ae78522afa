"""Find which values of a loss depend on parameters, on the batch or on both, and group them.

A *weight* is a value that depends on parameters and not on the batch. A *data value* depends on
both. Only equations that compute data values belong to a group. A new group begins at

- an equation that multiplies a weight with a value that depends on the batch, or looks up a weight
  by it: a layer. An elementwise product or sum, such as adding a bias, begins no layer;
- a loop, a branch or a remat region (`jax.checkpoint`);
- an equation that reads data values of several groups, such as the sum in a residual path;
- an equation that reads a data value that is an input of the program, such as the carry of a loop;
- any other equation that reads no data value, such as a batch times an elementwise scale.

All other equations that compute data values belong to the group of the data values they read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from xform._jax import JaxprEqn, has_effects
from xform.diagnosis.groups import Dependence, DependenceMap, Group, Weight
from xform.errors import NotDifferentiable
from xform.passes.dataflow import Lattice, results_through
from xform.passes.inline import inlined
from xform.passes.structured import called_body, is_remat_region, nested_programs, plain_call_body
from xform.program.ir import Program
from xform.program.source import frame
from xform.registry.table import flow_of, rule_of
from xform.registry.words import Linear

# `Dependence.weights` of every data value. The parameters behind a data value do not matter, and
# the set of all of them would be long.
_SOME_WEIGHTS = frozenset[Weight]({(-1, 0)})


def dependence_map(prog: Program, inputs: Sequence[Dependence], results: int | None = None
                   ) -> DependenceMap:  # fmt: skip
    """Return the dependence of each value of a program on parameters and batch, and its groups.

    Args:
      prog: the program of a loss, or a program inside it.
      inputs: for each input of the program, the parameters and the batch that it depends on.
      results: number of leading outputs that count as results, as in a `DependenceMap`.

    Raises:
      NotDifferentiable: the program has effects, such as a print. A diagnosis runs the loss several
        times and would repeat them.
    """
    prog = inlined(prog, plain_call_body)
    deps = DependenceMap(prog, dict(zip(prog.inputs, inputs, strict=True)), results)
    for i, eqn in enumerate(prog.equations):
        _check_effects(eqn)
        read = [deps.of(v) for v in eqn.invars]
        weights = frozenset[Weight]().union(*(dep.weights for dep in read))
        batch = any(dep.batch for dep in read)
        is_data = bool(weights) and batch
        nested = _nested_maps(eqn, read) if is_data else ()
        if nested:
            deps.nested[id(eqn)] = nested
        number = _group_of(deps, eqn, read, bool(nested)) if is_data else -1
        dependence = Dependence(_SOME_WEIGHTS if is_data else weights, batch, number)
        deps.by_value.update((v, dependence) for v in eqn.outvars)
        if number >= 0:
            deps.groups[number].equations.append(i)
            deps.groups[number].values.extend(eqn.outvars)
    return deps


def _check_effects(eqn: JaxprEqn) -> None:
    """Raise an error for an equation with side effects."""
    if has_effects(eqn):
        raise NotDifferentiable(
            "health of a loss",
            f"{eqn.primitive.name} has a side effect, and a diagnosis runs the loss several times",
            frame(eqn),
            "remove the print, callback or mutable value for the diagnosis",
        )


def _group_of(
    deps: DependenceMap, eqn: JaxprEqn, read: Sequence[Dependence], has_nested: bool
) -> int:
    """Return the index of an equation's group, and add a new group if one begins here.

    `read` has the dependences of the equation's operands.
    """
    sources = {dep.group for dep in read if dep.is_data and dep.group >= 0}
    if has_nested:
        kind = "nested"
    elif begins_layer(eqn, read):
        kind = "layer"
    elif len(sources) == 1 and not any(dep.is_data and dep.group < 0 for dep in read):
        return sources.pop()
    else:
        kind = "combination" if any(dep.is_data for dep in read) else "other"
    deps.groups.append(Group(kind))
    return len(deps.groups) - 1


def begins_layer(eqn: JaxprEqn, read: Sequence[Dependence]) -> bool:
    """Return whether an equation begins a layer. `read` has the dependences of its operands.

    An equation begins a layer if it multiplies a weight with a value that depends on the batch,
    unless the product is elementwise. It also begins a layer if it looks up a weight by such a
    value. A custom derivative that reads a weight and a value that depends on the batch begins a
    layer if its body has a product that is not elementwise.
    """
    rule = rule_of(eqn.primitive)
    if rule is None:
        return False
    known = rule.traits
    if known.calls == "custom" and known.call:
        reads_both = any(dep.is_weight for dep in read) and any(dep.batch for dep in read)
        return reads_both and _has_product(called_body(eqn))
    if known.fusion == "elementwise":
        return False
    if rule.word == "bilinear":
        a, b = read[:2]
        return (a.is_weight and b.batch) or (b.is_weight and a.batch)
    if isinstance(rule, Linear) and rule.argnums and len(read) > 1:
        looked_up = read[rule.argnums[0]]
        return looked_up.is_weight and any(dep.batch for dep in read[1:])
    return False


def _has_product(prog: Program) -> bool:
    """Return whether a program has a product that is not elementwise."""
    for eqn in prog.equations:
        rule = rule_of(eqn.primitive)
        if rule is not None and rule.word == "bilinear" and rule.traits.fusion != "elementwise":
            return True
        if any(map(_has_product, nested_programs(eqn))):
            return True
    return False


def _nested_maps(eqn: JaxprEqn, read: Sequence[Dependence]) -> tuple[DependenceMap, ...]:
    """Return the dependence maps of the programs inside a loop, branch or remat region, or `()`.

    The map of a loop's body holds for all iterations.
    """
    flow = flow_of(eqn)
    if flow is None or (flow.is_call and not is_remat_region(eqn)):
        return ()
    maps: list[DependenceMap] = []

    def analyze(body: Program, inputs: list[Dependence]) -> list[Dependence]:
        maps.append(dependence_map(body, inputs))
        return list(map(maps[-1].of, maps[-1].program.outputs))

    inputs = [dataclasses.replace(dep, group=-1) for dep in read]
    results_through(flow, inputs, eqn.outvars, _InAllIterations(), analyze)
    return tuple(maps[-len(flow.bodies) :])


class _InAllIterations(Lattice[Dependence]):
    """The dependence of a value inside a loop or branch, in any iteration."""

    def join(self, a: Dependence, b: Dependence) -> Dependence:
        return Dependence(a.weights | b.weights, a.batch or b.batch)

    def slice(self, x: Dependence, v: Any) -> Dependence:
        """Return the dependence of a slice of a scanned input.

        An input that depends on exactly one parameter counts as that parameter, with one more
        leading axis that the surrounding scans iterate over. So each iteration gets its own slice.
        """
        one = len(x.weights) == 1
        return dataclasses.replace(x, weights=frozenset((w, n + one) for w, n in x.weights))
