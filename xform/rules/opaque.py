"""Rules of kernels and callbacks. JAX knows only the types of their inputs and outputs.

They run unchanged if nothing differentiates through them: in the rules of a custom_jvp or
custom_vjp function, or before a stop_gradient. A derivative through one is an error. Operations
that only print, check or order values are here too. They have no derivative, and raise no error.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from xform._jax import JaxprEqn, jaxprs_of
from xform.errors import NotDifferentiable
from xform.interpret.cost import flops
from xform.program.arithmetic import Value
from xform.program.ir import Mask, program
from xform.program.source import frame
from xform.registry.table import Rule, declare
from xform.registry.traits import FOREIGN, UNFUSED
from xform.registry.words import constant


class Opaque(Rule):
    """A rule without derivative: it raises an error only if a derivative is needed."""

    def push(self, eqn: JaxprEqn, xs: Sequence[Value], ys: Sequence[Value], dxs: Sequence[Value]):
        raise self._no_derivative(eqn)

    def pull(self, eqn: JaxprEqn, xs: Sequence[Value], ys: Sequence[Value], cts: Sequence[Value],
             active: Mask):  # fmt: skip
        raise self._no_derivative(eqn)

    def _no_derivative(self, eqn: JaxprEqn) -> NotDifferentiable:
        return NotDifferentiable(
            f"derivative of {_name_with_target(eqn)}",
            f"{self.name} is an opaque call: JAX does not know what it computes",
            frame(eqn),
            "wrap the call in a function with a jax.custom_vjp rule (jax.custom_jvp for forward "
            "mode), or cut it off with jax.lax.stop_gradient",
        )


def _name_with_target(eqn: JaxprEqn) -> str:
    """Return the name of the primitive, with the name of the kernel that it calls, if any."""
    params: dict[str, Any] = eqn.params
    name = params.get("target_name") or params.get("name")
    return f"{eqn.primitive.name} {name!r}" if isinstance(name, str) else eqn.primitive.name


def _pallas_flops(eqn: JaxprEqn) -> int:
    """Return the kernel's own FLOP estimate, or its body's FLOPs times the points of its grid."""
    estimate, grid = eqn.params["cost_estimate"], eqn.params["grid_mapping"].grid
    return estimate.flops if estimate else math.prod(grid) * flops(program(eqn.params["jaxpr"]))


def _is_pure(side_effects: Any) -> bool:
    """Return whether a parameter `has_side_effects` denies them.

    It is a bool, or a member of an enumeration, such as PURE.
    """
    return side_effects is False or getattr(side_effects, "name", "") == "PURE"


def _pallas_repeatable(eqn: JaxprEqn) -> bool:
    """Return whether a kernel has no side effects, and seeds the random numbers that it draws."""
    if not _is_pure(getattr(eqn.params["compiler_params"], "has_side_effects", False)):
        return False
    names = _primitives_in(eqn)
    return "prng_seed" in names or "prng_random_bits" not in names


def _primitives_in(eqn: JaxprEqn) -> set[str]:
    """Return the names of the primitives in the programs that an equation runs."""
    equations = [e for jaxpr in jaxprs_of(eqn) for e in program(jaxpr).equations]
    return {e.primitive.name for e in equations}.union(*map(_primitives_in, equations))


def _exported_repeatable(eqn: JaxprEqn) -> bool:
    """Return whether an exported program draws no random numbers without a key.

    In its serialized form, the names of its operations are texts that end and begin with a zero.
    """
    return b"\0rng_v" not in eqn.params["exported"].mlir_module_serialized


KERNELS = (
    "ffi_call", "custom_partitioning", "mosaic_gpu_p", "cudnn_fusion", "core_map", "mpmd_map",
    "dot_product_attention_fwd", "dot_product_attention_fwd_wrapper",
    "dot_product_attention_bwd", "dot_product_attention_bwd_wrapper",
    "dot_product_attention_fp8_fwd", "dot_product_attention_fp8_fwd_wrapper",
    "dot_product_attention_fp8_bwd", "dot_product_attention_fp8_bwd_wrapper",
    "rnn_fwd", "rnn_bwd", "scaled_matmul", "scaled_matmul_wrapper", "scaled_dot",
)  # fmt: skip
CALLBACKS = ("pure_callback", "io_callback", "buffer_callback")

for _name in (*KERNELS, *CALLBACKS):
    declare(Opaque, _name, "opaque", (), FOREIGN, supported_params=None)
declare(Opaque, "tpu_custom_call", "opaque", (), dataclasses.replace(
    FOREIGN, repeatable=lambda eqn: _is_pure(eqn.params["has_side_effects"])
), supported_params=None)  # fmt: skip
declare(Opaque, "call_exported", "opaque", (),
        dataclasses.replace(FOREIGN, repeatable=_exported_repeatable),
        supported_params=None)  # fmt: skip
declare(Opaque, "pallas_call", "opaque", (),
        dataclasses.replace(FOREIGN, repeatable=_pallas_repeatable, flops=_pallas_flops),
        supported_params=None)  # fmt: skip

# Operations that only print, check, order, or return a size.
constant(
    "debug_callback", "debug_print", "inspect_sharding", "check", "shape_assertion", "dce_sink",
    "after_all", "create_token", "dimension_size", "dim_as_value", "platform_index",
    traits=UNFUSED,
)  # fmt: skip
