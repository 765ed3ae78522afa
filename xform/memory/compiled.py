"""What the compiler says a function needs: bytes by kind, FLOPs, compile time."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax

from xform.errors import WrongArgument, XformError
from xform.ir import program
from xform.planner.cost import flops
from xform.text import columns, human_bytes, human_flops


@dataclasses.dataclass(frozen=True)
class MemoryReport:
    """Memory of one compiled function, on each device it runs on; prints as a table.

    Attributes:
      argument_bytes: inputs.
      output_bytes: outputs.
      temp_bytes: everything in between, at its peak.
      alias_bytes: outputs that reuse the memory of donated inputs, counted in both of the above.
      host_bytes: what waits in host memory (offloaded values).
      code_bytes: the compiled code.
      flops: of the whole program over all devices, with trip counts; see `xform.planner.cost`.
      compile_seconds: wall time of the compiler.
    """

    argument_bytes: int
    output_bytes: int
    temp_bytes: int
    alias_bytes: int
    host_bytes: int
    code_bytes: int
    flops: int
    compile_seconds: float

    @property
    def total_bytes(self) -> int:
        """The headline: argument + output + temp - alias."""
        return self.argument_bytes + self.output_bytes + self.temp_bytes - self.alias_bytes

    def to_dict(self) -> dict[str, int | float]:
        """The numbers, with `total_bytes`, as plain data."""
        return {k: getattr(self, k) for k in _ORDER}

    def __str__(self) -> str:
        rows: list[list[str]] = []
        for key, value in self.to_dict().items():
            name, _, unit = key.rpartition("_")
            if unit == "bytes":
                rows.append([name, human_bytes(int(value)), _NOTES.get(key, "")])
        rows.append(["flops", human_flops(self.flops), ""])
        rows.append(["compile", f"{self.compile_seconds:.2f} s", ""])
        return columns(rows, right=(1,))


_ORDER = (
    "argument_bytes",
    "output_bytes",
    "temp_bytes",
    "alias_bytes",
    "total_bytes",
    "host_bytes",
    "code_bytes",
    "flops",
    "compile_seconds",
)
_NOTES = {
    "alias_bytes": "outputs in the memory of donated arguments",
    "total_bytes": "argument + output + temp - alias",
}


def memory_analysis(f: Callable[..., Any], *args: Any, **kwargs: Any) -> MemoryReport:
    """Compile `f` and report the memory that it needs on each device.

    Args:
      f: a function of pytrees of arrays, or one that `jax.jit` made: its donation, shardings and
        static arguments are kept.
      *args: arrays, or `jax.ShapeDtypeStruct`s (with shardings, if wanted) in pytrees. Nothing is
        run, and for the latter nothing is allocated.
      **kwargs: keyword arguments, of the same kinds.

    Returns:
      A `MemoryReport`. The headline `total_bytes` is argument + output + temp - alias; `flops` are
      counted from the program, times trip counts.

    Raises:
      WrongArgument: `f` is not callable.
      XformError: the backend reports no memory statistics.

    Cost: one trace, one lowering and one compilation of `f`.
    Source: https://docs.jax.dev/en/latest/aot.html

    >>> x = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    >>> report = xform.memory_analysis(lambda x: x @ x, x)
    >>> report.argument_bytes, report.output_bytes, report.flops
    (262144, 262144, 33554432)
    """
    if not callable(f):
        raise WrongArgument(
            "memory_analysis", f"{f!r} is not callable", "", "pass the function, then its arguments"
        )
    jitted: Any = f if hasattr(f, "trace") and hasattr(f, "lower") else jax.jit(f)
    traced = jitted.trace(*args, **kwargs)
    jaxpr = getattr(traced, "traced", traced).jaxpr  # `nnx.jit` wraps what `jax.jit` traced
    lowered = traced.lower()
    start = time.perf_counter()
    compiled = lowered.compile()
    seconds = time.perf_counter() - start
    stats = compiled.memory_analysis()
    if stats is None:
        raise XformError(
            f"memory_analysis of {getattr(f, '__name__', type(f).__name__)}",
            f"the backend {jax.default_backend()!r} reports no memory statistics",
            "",
            "compile for another backend, such as with JAX_PLATFORMS=cpu",
        )

    def read(kind: str) -> int:
        return int(getattr(stats, f"{kind}_size_in_bytes", None) or 0)

    return MemoryReport(
        argument_bytes=read("argument"),
        output_bytes=read("output"),
        temp_bytes=read("temp"),
        alias_bytes=read("alias"),
        host_bytes=sum(map(read, ("host_argument", "host_output", "host_temp")))
        - read("host_alias"),
        code_bytes=read("generated_code"),
        flops=flops(program(jaxpr)),
        compile_seconds=seconds,
    )
