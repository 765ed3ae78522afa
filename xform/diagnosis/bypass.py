"""Find the equations of a loss that some path avoids, as a residual path avoids a layer.

A *data value* depends on parameters and on the batch, like the result of a layer. A *path* leads
from an input of the first layers to a result of the program, through floating-point data values. An
equation is avoided by some path if fewer paths lead through it than there are in total. The number
of paths grows exponentially with depth, so paths are counted modulo a large prime.
"""

from __future__ import annotations

from xform._jax import JaxprEqn, Var
from xform.diagnosis.groups import DependenceMap, has_derivative

_PRIME = 2**61 - 1


def bypassed_equations(deps: DependenceMap) -> dict[int, bool]:
    """Return for each equation of a program, by `id`, whether some path avoids it."""
    to_value, to_equation = _paths_from_inputs(deps)
    from_equation = _paths_to_results(deps)
    total = sum(to_value.get(v, 0) for v in deps.outputs) % _PRIME
    return {key: to_equation[key] * from_equation[key] % _PRIME != total for key in to_equation}


def _paths_from_inputs(deps: DependenceMap) -> tuple[dict[Var, int], dict[int, int]]:
    """Return the number of paths from the inputs of the first layers to each value and equation."""
    data = [v for v, dep in deps.by_value.items() if dep.is_data]
    to_value = {v: 1 for v in data if v in deps.program.inputs and has_derivative(v)}
    to_equation: dict[int, int] = {}
    batch_values = _batch_values(deps)
    for eqn in deps.program.equations:
        read = [v for v in eqn.invars if isinstance(v, Var) and v in to_value and has_derivative(v)]
        count = sum(to_value[v] for v in read) or int(any(deps.of(v).is_data for v in eqn.outvars))
        count += _batch_operands(deps, eqn, batch_values) if read else 0
        to_equation[id(eqn)] = count
        outs = (v for v in eqn.outvars if deps.of(v).is_data and has_derivative(v))
        to_value.update((v, count % _PRIME) for v in outs)
    return to_value, to_equation


def _paths_to_results(deps: DependenceMap) -> dict[int, int]:
    """Return the number of paths from each equation to the results of the program."""
    from_value: dict[Var, int] = dict.fromkeys(deps.outputs, 1)
    from_equation: dict[int, int] = {}
    for eqn in reversed(deps.program.equations):
        from_equation[id(eqn)] = sum(from_value.get(v, 0) for v in eqn.outvars) % _PRIME
        for v in eqn.invars:
            if isinstance(v, Var) and deps.of(v).is_data and has_derivative(v):
                from_value[v] = (from_value.get(v, 0) + from_equation[id(eqn)]) % _PRIME
    return from_equation


def _batch_operands(deps: DependenceMap, eqn: JaxprEqn, batch_values: frozenset[Var]) -> int:
    """Count the operands of an equation that depend on the batch alone and that layers also read.

    Each such operand begins a path around the first layers, like a residual path from the batch
    itself. The count is 0 after the last layers. There the loss may compare the model's result with
    its input, as in an autoencoder, and that is not a path around a layer.
    """
    group = deps.of(eqn.outvars[0]).group
    if group < 0 or not deps.has_later_layers[group]:
        return 0
    return sum(isinstance(v, Var) and v in batch_values for v in eqn.invars)


def _batch_values(deps: DependenceMap) -> frozenset[Var]:
    """Return the values that layers read and that depend on the batch and on no parameter."""
    starts = [deps.program.equations[g.equations[0]] for g in deps.groups if g.kind == "layer"]
    read = [v for eqn in starts for v in eqn.invars if isinstance(v, Var)]
    return frozenset(
        v for v in read if has_derivative(v) and deps.of(v).batch and not deps.of(v).is_data
    )
