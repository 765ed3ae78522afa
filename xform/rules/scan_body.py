"""The body of a `lax.scan`: its constants, carries and scanned inputs, and which are active.

A carry that starts from a constant may become active in a later iteration. So the active carries
are found by iteration: the set grows until it no longer changes. The same holds for the carries
that get a cotangent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from xform._jax import JaxprEqn, scan_counts
from xform.interpret.activity import path
from xform.program.ir import Mask, Program, program, union


class ScanBody:
    """A scan's body, and the positions of its constants, carries and scanned inputs."""

    def __init__(self, eqn: JaxprEqn):
        self.prog: Program = program(eqn.params["jaxpr"])
        self.n_consts, self.n_carry = scan_counts(eqn.params)

    def parts(self, values: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """Split values into constants, carries and scanned inputs."""
        first_scanned = self.n_consts + self.n_carry
        carry = list(values[self.n_consts : first_scanned])
        return list(values[: self.n_consts]), carry, list(values[first_scanned:])

    def active(self, active: Mask) -> tuple[Mask, Mask]:
        """Return the inputs and outputs that are active in some iteration."""
        while True:
            outs = path(self.prog, active).outputs
            consts, carry, scanned = self.parts(active)
            grown = union(carry, outs[: self.n_carry])
            if grown == tuple(carry):
                return active, (*grown, *outs[self.n_carry :])
            active = (*consts, *grown, *scanned)

    def wanted(self, active: Mask, wanted: Mask) -> Mask:
        """Return the outputs of the body that have a cotangent in some iteration.

        `active` are the inputs of the scan that are differentiated, `wanted` its outputs that have
        a cotangent.
        """
        active, outs = self.active(active)
        while True:
            _, carry, _ = self.parts(path(self.prog, active, wanted).inputs)
            grown = (*union(wanted[: self.n_carry], carry), *wanted[self.n_carry :])
            if grown == wanted:
                return tuple(w and o for w, o in zip(wanted, outs, strict=True))
            wanted = grown
