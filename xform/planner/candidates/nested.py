"""Turn loops into nested loops: the outer loop saves its states (carries), the inner is recomputed.

The backward pass takes one outer iteration at a time: the inner loop runs again, and saves the
values of a minimum cut. Such plans fit budgets that are smaller than the states of the original
loop. They also fit budgets that the original loop meets only by recomputing its whole body. Loops
inside other loops or remat regions (the parts that `jax.checkpoint` marks) can be nested too. Then
all loops around them save their states only.

A *Schedule* says which values of a program are saved for its backward pass. A loop is a *node* of
it, whose body has a Schedule of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from xform.interpret.cost import aval_bytes
from xform.interpret.joint import Schedule
from xform.interpret.node import Node
from xform.planner.candidate import Candidate
from xform.planner.candidates.large_loops import inner_loops, large_loops, loop_nodes, loops_around
from xform.planner.candidates.states import all_states, outer_states
from xform.planner.costs.saved_values import device_bytes, expand_token
from xform.planner.decide import schedule
from xform.planner.loops import Shapes
from xform.planner.plan.decision import edit_decision
from xform.planner.problem import Problem
from xform.planner.shape import Shape, fold_loop
from xform.policies import MinCut

# The numbers of levels of outer loops that are tried.
_DEPTHS = (1, 2, 3)
# The same for loops that are inside other loops or regions. 0 leaves these loops as written.
_INNER_DEPTHS = (0, 1, 2)
# The policies of the innermost loops. The first recomputes only operations that XLA fuses, the
# second saves the fewest bytes.
_BODY_POLICIES = (MinCut(), MinCut(0.0, 0.0))


def nested_candidates(problem: Problem) -> Iterator[Candidate]:
    """Yield candidates whose large loops became nested loops, in several shapes.

    A loop is large if it saves a large share of the program's saved bytes.
    """
    outer = loop_nodes(large_loops(problem))
    for depth, body_policy in itertools.product(_DEPTHS, _BODY_POLICIES) if outer else ():
        shapes = {i: _shape(node, body_policy, depth) for i, node in outer.items()}
        base = problem.schedule(body_policy, shapes)
        yield problem.candidate(edit_decision(base, outer_states), shapes)
    inner = loop_nodes(inner_loops(problem))
    around = loops_around(problem.program, outer, inner)
    for depth, body_policy in itertools.product(_INNER_DEPTHS, _BODY_POLICIES) if inner else ():
        shapes = {i: _shape(node, body_policy, depth) for i, node in inner.items() if depth}
        yield _all_states_candidate(problem, shapes, body_policy)
        if depth and around:
            shapes |= {i: _state_shape(node, depth) for i, node in around.items()}
            yield _all_states_candidate(problem, shapes, body_policy)


def _shape(node: Node, body_policy: MinCut, depth: int) -> Shape:
    """Return the nested loops that hold the fewest bytes, with `depth` levels of outer loops.

    `body_policy` decides what each step saves.
    """
    (joint,) = node.joints
    schedules = (schedule(joint, body_policy),)
    step_bytes = device_bytes(expand_token(node, schedules)) // node.iterations
    return fold_loop(node.iterations, depth, _state_bytes(node, schedules[0]), step_bytes)[0]


def _state_shape(node: Node, depth: int) -> Shape:
    """Return the same as `_shape`, for a loop that saves its states only."""
    state_bytes = _state_bytes(node, schedule(node.joints[0], MinCut()))
    return fold_loop(node.iterations, depth, state_bytes, state_bytes)[0]


def _state_bytes(node: Node, body: Schedule) -> int:
    """Return the bytes of one iteration's carry, as far as the backward pass reads it."""
    inputs = zip(node.stored_states((body,)), body.joint.inputs, strict=True)
    return sum(n * aval_bytes(v.aval) for n, v in inputs) // node.iterations


def _all_states_candidate(problem: Problem, shapes: Shapes, body_policy: MinCut) -> Candidate:
    """Return the candidate whose loops around other loops save their states only.

    `body_policy` decides what the loops inside them save. `shapes` says which loops are nested.
    """
    base = problem.schedule(MinCut(), shapes)
    return problem.candidate(edit_decision(base, all_states(body_policy, {})), shapes)
