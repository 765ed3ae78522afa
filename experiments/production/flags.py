"""The compiler flags that trainers run with, as options of `jax.jit`.

Sources, read 2026-11-27: for GPUs https://docs.nvidia.com/jax-toolbox (GPU performance) and the
Llama scripts for H100s in https://github.com/AI-Hypercomputer/maxtext; for TPUs
`benchmarks/xla_flags_library.py` there. A flag that XLA no longer has is left out.
"""

from __future__ import annotations

from typing import Any

Flags = dict[str, Any]

# The scheduler, combined and pipelined collectives, and loops with two iterations at a time.
GPU: Flags = {
    "xla_gpu_enable_latency_hiding_scheduler": True,
    "xla_gpu_enable_highest_priority_async_stream": True,
    "xla_gpu_enable_triton_gemm": False,
    "xla_gpu_enable_command_buffer": "",
    "xla_gpu_all_reduce_combine_threshold_bytes": 134_217_728,
    "xla_gpu_all_gather_combine_threshold_bytes": 134_217_728,
    "xla_gpu_reduce_scatter_combine_threshold_bytes": 67_108_864,
    "xla_gpu_enable_pipelined_all_gather": True,
    "xla_gpu_enable_pipelined_reduce_scatter": True,
    "xla_gpu_enable_pipelined_all_reduce": True,
    "xla_gpu_enable_while_loop_double_buffering": True,
    "xla_gpu_enable_all_gather_combine_by_dim": False,
    "xla_gpu_enable_reduce_scatter_combine_by_dim": False,
    "xla_disable_hlo_passes": "rematerialization",
}
# Asynchronous collectives, and all-reduces of data parallelism.
TPU_COLLECTIVES: Flags = {
    "xla_enable_async_all_gather": True,
    "xla_enable_async_all_reduce": True,
    "xla_tpu_overlap_compute_collective_tc": True,
    "xla_tpu_enable_async_collective_fusion": True,
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": True,
    "xla_tpu_enable_async_collective_fusion_multiple_steps": True,
    "xla_tpu_enable_data_parallel_all_reduce_opt": True,
    "xla_tpu_data_parallel_opt_different_sized_ops": True,
}
# The scheduler that MaxText uses with values in host memory.
TPU_SCHEDULER: Flags = {
    "xla_tpu_enable_all_experimental_scheduler_features": True,
    "xla_tpu_enable_scheduler_memory_pressure_tracking": True,
    "xla_tpu_host_transfer_overlap_limit": 24,
    "xla_tpu_aggressive_opt_barrier_removal": "ENABLED",
    "xla_lhs_prioritize_async_depth_over_stall": "ENABLED",
    "xla_tpu_enable_ag_backward_pipelining": True,
    "xla_should_allow_loop_variant_parameter_in_chain": "ENABLED",
    "xla_should_add_loop_invariant_op_in_chain": "ENABLED",
    "xla_max_concurrent_host_send_recv": 100,
    "xla_tpu_scheduler_percent_shared_memory_limit": 100,
    "xla_latency_hiding_scheduler_rerun": 2,
}
TPU: Flags = TPU_COLLECTIVES | TPU_SCHEDULER


def _without(flags: Flags, name: str) -> Flags:
    return {k: v for k, v in flags.items() if k != name}


# Parts of the flags, to find out which of them costs bytes.
GPU_PARTS: dict[str, Flags] = {
    "the scheduler alone": {"xla_gpu_enable_latency_hiding_scheduler": True},
    "all but two iterations at a time": _without(GPU, "xla_gpu_enable_while_loop_double_buffering"),
    "pipelined host offloading alone": {"xla_gpu_enable_pipelined_host_offloading": True},
    "all, and pipelined host offloading": {
        **GPU,
        "xla_gpu_enable_pipelined_host_offloading": True,
    },
}
TPU_PARTS: dict[str, Flags] = {
    "collectives alone": TPU_COLLECTIVES,
    "scheduler alone": TPU_SCHEDULER,
    "all but the removal of barriers": _without(TPU, "xla_tpu_aggressive_opt_barrier_removal"),
}
