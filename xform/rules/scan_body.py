"""The body of a `lax.scan`: its constants, carries and scanned inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from xform._jax import JaxprEqn, scan_counts
from xform.program.ir import Program, program


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
