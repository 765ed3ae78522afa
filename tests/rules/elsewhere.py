"""Primitives whose tests need more than a function and its arguments, and the test files."""

_FILES = {
    "tests/rules/test_structured.py": (
        "jit", "remat2", "closed_call", "core_call", "core_closed_call", "remat_opt",
        "eval_jaxpr",
    ),
    "tests/rules/test_hijax.py": ("call_hi_primitive",),
    "tests/rules/test_scan.py": ("scan",),
    "tests/rules/test_cond.py": ("cond",),
    "tests/rules/test_custom_rules.py": (
        "custom_jvp_call", "custom_vjp_call", "custom_lin", "custom_linear_solve",
    ),
    "tests/rules/test_while.py": ("while", "keep_lane", "store_lanes", "loop_result"),
    "tests/rules/test_collective.py": (
        "psum", "psum_invariant", "pvary", "all_gather", "all_gather_invariant", "reduce_scatter",
        "all_to_all", "ragged_all_to_all", "ppermute", "pbroadcast", "pbroadcast_dynamic",
        "pmax", "pmin",
        "all_gather_reduced", "unreduced_reduce_scatter", "unreduced_psum", "preduced",
        "vary_unreduced_cast_p", "vary_unreduced_cast", "reduced_vary_cast_p", "reduced_vary_cast",
    ),
    "tests/rules/test_shard.py": ("shard_map",),
    "tests/rules/test_rules.py": (
        "reshard", "host_local_array_to_global_array", "global_array_to_host_local_array",
    ),
    "tests/rules/test_reference.py": (
        "new_ref", "empty_ref", "get", "swap", "addupdate", "freeze", "free_ref", "run_state",
    ),
    "tests/rules/test_opaque.py": (
        "pallas_call", "ffi_call", "custom_partitioning", "pure_callback", "io_callback",
        "bcoo_spdot_general",
    ),
    "tests/rules/test_custom.py": ("to_edtype", "from_edtype", "xform_refused"),
    "tests/rules/test_calls.py": ("composite", "fused_call", "call"),
    "tests/steering/test_barrier.py": ("xform_barrier",),
    "tests/transforms/test_recorded.py": ("xform_deferred",),
    "tests/steering/test_materialize.py": ("xform_materialize",),
    "tests/steering/test_own_layout.py": ("xform_own_layout",),
}  # fmt: skip
ELSEWHERE = {name: path for path, names in _FILES.items() for name in names}
