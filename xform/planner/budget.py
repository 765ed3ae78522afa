"""Plans that fit a number of bytes.

A program of moderate size is decided exactly (`exact.py`), with what is sent to the host. A larger
one is decided block by block (`blocks.py`), and by prices: a price of work, in bytes for each FLOP,
gives by minimum cuts the plan that is best at that price, in all nested programs at once; less
price, fewer bytes. The price is found by bisection. Between the two plans that stand on either side
of the budget, each program takes the price of one up to some point and that of the other from there
on, since equal layers all change at the same price. The better of the two ways is taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from xform._jax import JaxprEqn
from xform.cost import equation_flops
from xform.errors import BudgetInfeasible
from xform.interpret.checkpoints import steps_run
from xform.interpret.joint import Joint, Plan
from xform.interpret.node import Node, bound, gather, join_p
from xform.passes.dce import live
from xform.planner import blocks
from xform.planner.choice import Choice
from xform.planner.exact import MOST, choose
from xform.planner.held import held, held_bytes
from xform.planner.link import Link
from xform.planner.residuals import Residual, residuals_of
from xform.planner.work import fusible
from xform.policies import Budget, MinCut
from xform.text import human_bytes

# Prices of a FLOP, in bytes, between which all plans lie: a product of matrices as thin as can be
# makes 2 bytes for each of its FLOPs, one that is a million thick a millionth of that.
_DEAREST, _CHEAPEST = 16.0, 1e-8
_HALVINGS = 24

Make = Callable[[MinCut | Choice], Plan]


def fit(joint: Joint, budget: Budget, make: Make, link: Link | None = None) -> Plan:
    """The Plan of a Joint that keeps at most `budget.bytes`; `make` plans it in some way.

    Of the plans that are tried and fit, it is the one that runs the least work again. With a link,
    values may be sent to the host, in programs that are decided exactly. Raises `BudgetInfeasible`
    if even the plan that keeps least keeps more.
    """
    most = make(MinCut())
    if kept_bytes(most) <= budget.bytes:
        return most
    most_equations = math.inf if budget.solver == "exact" else MOST
    best = _lowest(most, make, most_equations, link)
    if kept_bytes(best) > budget.bytes:
        raise over_budget(best, budget, kept_bytes(best))

    chosen = choose(most, budget.bytes, most_equations, link)
    if chosen is not None and kept_bytes(exact := make(chosen)) <= budget.bytes:
        return min(best, exact, key=_work)
    chosen = blocks.choose(most, budget.bytes)
    if chosen is not None and kept_bytes(found := make(chosen)) <= budget.bytes:
        best = min(best, found, key=_work)
    return by_prices(best, budget.bytes, make)


def _lowest(most: Plan, make: Make, most_equations: float, link: Link | None) -> Plan:
    """The plan that keeps the fewest bytes."""
    found = make(MinCut(0.0, 0.0))
    chosen = choose(most, None, most_equations, link) if link else None
    return min(found, make(chosen), key=kept_bytes) if chosen else found


def by_prices(best: Plan, most: int, make: Make) -> Plan:
    """The least work within so many bytes, of the plans at all prices, and of `best`."""

    def fits(how: MinCut) -> bool:
        nonlocal best
        found = make(how)
        if kept_bytes(found) > most:
            return False
        best = min(best, found, key=_work)
        return True

    below, above = _CHEAPEST, _DEAREST
    for _ in range(_HALVINGS):
        middle = math.sqrt(below * above)
        below, above = (middle, above) if fits(MinCut(middle, middle)) else (below, middle)
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS // 2):
        middle = (low + high) / 2
        low, high = (low, middle) if fits(MinCut(below, above, middle)) else (middle, high)
    return best


def _work(how: Plan) -> tuple[int, int, int]:
    return again_flops(how), sent_bytes(how), kept_bytes(how)


def again_flops(how: Plan) -> int:
    """FLOPs of the work that does not fuse and that a Plan runs again.

    In all trips of loops, and over all devices that a `shard_map` runs it on.
    """
    if "flops" not in how.cache:
        how.cache["flops"] = sum(_flops(eqn, how) for eqn in how.order)
    return how.cache["flops"]


def _flops(eqn: JaxprEqn, how: Plan) -> int:
    if eqn.primitive is join_p:
        node, plans = eqn.params["node"], how.inner[eqn.params["node"]]
        runs = node.trips * node.device_count
        return runs * sum(map(again_flops, plans)) + sum(_retraced(node, p) for p in plans)
    if id(eqn) not in how.again or fusible(eqn):
        return 0
    return equation_flops(bound(eqn))


def _retraced(node: Node, how: Plan) -> int:
    """FLOPs of the steps that are run again from stored states, on the way to them and in them."""
    if how.slots is None:
        return 0
    joint = how.joint
    work = lambda wanted: sum(
        equation_flops(bound(e)) for e in live(joint.first, wanted, effects=False) if not fusible(e)
    )
    further = steps_run(node.trips, how.slots) - max(node.trips - 1, 0)
    first = node.first_carry
    stored = gather(joint.inputs[first:], node.stacked([how])[first:])
    after = dict(zip(joint.inputs[first:], joint.outputs, strict=False))
    return further * work([after[v] for v in stored]) + node.trips * work(how.kept)


def kept_bytes(how: Plan) -> int:
    """Bytes that a Plan keeps on each device, in all trips of loops."""
    if "bytes" not in how.cache:
        how.cache["bytes"] = held_bytes(held(how))
    return how.cache["bytes"]


def sent_bytes(how: Plan) -> int:
    """Bytes that a Plan keeps in other memories, in all trips of loops."""
    if "sent" not in how.cache:
        how.cache["sent"] = sum(v.total_bytes for v in held(how)) - kept_bytes(how)
    return how.cache["sent"]


def over_budget(floor: Plan, budget: Budget, least: int) -> BudgetInfeasible:
    """The error for a budget below the `least` that can be saved."""
    rows = floor_rows(floor)
    return BudgetInfeasible(
        f"policy={budget!r}",
        f"the plan that saves least saves {human_bytes(least)}: {'; '.join(rows)}",
        rows[0].rpartition(" at ")[2] if rows else "",
        "raise the budget, make the batch or the sequence smaller, or mark with xform.remat what "
        "holds these values",
        least,
    )


def floor_rows(floor: Plan) -> list[str]:
    """The three largest values that a Plan keeps."""
    rows = residuals_of(floor, [""] * len(floor.joint.inputs), "")
    return [_said(r) for r in rows if r.trip_bytes and r.kind != "argument"][:3]


def _said(row: Residual) -> str:
    trips = f" x {row.trips}" if row.trips > 1 else ""
    return f"{row.type}{trips} of {row.operation} at {row.where}"
