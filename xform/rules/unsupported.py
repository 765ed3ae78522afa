"""JAX's primitives that have no rule, or a rule for one mode only, with the reason for each.

The command `python -m xform rules` prints the reasons, and tests check that the lists are complete.
"""

from __future__ import annotations

from collections.abc import Iterable

# Collectives with the primitives `..._start` and `..._done`, and collectives with `..._start` only.
_START_AND_DONE = ("all_gather", "all_to_all", "pbroadcast", "ppermute", "psum", "reduce_scatter")
_START = ("all_gather_reduced", "psum_invariant", "unreduced_psum", "unreduced_reduce_scatter")


def _because(reason: str, names: Iterable[str]) -> dict[str, str]:
    """Return a dict from each name to the reason."""
    return dict.fromkeys(names, reason)


UNSUPPORTED: dict[str, str] = {
    **_because(
        "its factors have no derivative rule in JAX either; use qr, eig or eigh",
        ("schur", "hessenberg", "tridiagonal", "geqrf", "geqp3"),
    ),
    **_because(
        "one half of an asynchronous collective; differentiate the whole collective",
        (*(f"{name}_start" for name in (*_START_AND_DONE, *_START)),
         *(f"{name}_done" for name in _START_AND_DONE)),
    ),
    **_because("one half of a transfer between two devices; use ppermute", ("psend", "precv")),
    **_because(
        "used only inside JAX's own transforms: it is in no traced program",
        ("accum_grad_in_ref", "custom_jvp_call_jaxpr", "zeros_like",
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

# Primitives whose rules serve one mode only: the mode that raises an error, and the reason.
ONE_WAY: dict[str, tuple[str, str]] = {
    "custom_vjp_call": ("jvp", "the user's rule pulls cotangents back"),
    "bcoo_spdot_general": ("pull", "the result has elements at other positions than the inputs"),
}
