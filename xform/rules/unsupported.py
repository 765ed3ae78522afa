"""Primitives that JAX registers and that have no rule, with the reason for each."""

from __future__ import annotations

from collections.abc import Iterable

_WHOLE = ("all_gather", "all_to_all", "pbroadcast", "ppermute", "psum", "reduce_scatter")
_STARTED = ("all_gather_reduced", "psum_invariant", "unreduced_psum", "unreduced_reduce_scatter")


def _because(reason: str, names: Iterable[str]) -> dict[str, str]:
    return dict.fromkeys(names, reason)


UNSUPPORTED: dict[str, str] = {
    **_because(
        "its factors have no derivative rule in JAX either; use qr, eig or eigh",
        ("schur", "hessenberg", "tridiagonal", "geqrf", "geqp3"),
    ),
    **_because(
        "one half of an asynchronous collective; differentiate the whole collective",
        (*(f"{name}_start" for name in (*_WHOLE, *_STARTED)), *(f"{name}_done" for name in _WHOLE)),
    ),
    **_because("one half of a transfer between two devices; use ppermute", ("psend", "precv")),
    **_because(
        "used only inside JAX's own transforms: it is in no traced program",
        ("accum_grad_in_ref", "custom_jvp_call_jaxpr", "custom_lin", "zeros_like",
         "call_hi_primitive_linearized"),
    ),
    **_because(
        "the types of jax.experimental.hijax are not arrays",
        ("box_get", "box_set", "new_box", "log_extend", "log_read", "new_log"),
    ),
    **_because("a buffer of a kernel, not a value", ("pin", "unpin", "create_linear")),
    **_because("occurs only inside Pallas kernels", ("masked_load", "masked_swap", "get_global")),
    **_because("a lowering of coo_matvec and the like for GPUs",
               ("coo_spmv", "coo_spmm", "csr_spmv", "csr_spmm")),
    "select_and_scatter": "takes programs, and no function of JAX binds it",
    "relayout": "no public function of JAX binds it",
    "unreachable": "it only raises",
}  # fmt: skip

# Primitives whose rules serve one mode only.
ONE_WAY: dict[str, tuple[str, str]] = {
    "custom_vjp_call": ("jvp", "the user's rule pulls cotangents back"),
    "bcoo_spdot_general": ("pull", "the places of the result are not those of the inputs"),
}
