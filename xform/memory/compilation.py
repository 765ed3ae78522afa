"""Compile a function for a target and collect the compiler's figures in a `MemoryReport`.

A target names the devices to compile for (`targets.py`). For devices of this process, the function
is lowered and compiled here. For devices that need not be attached, it is exported (`lowering.py`)
and compiled in another process (`remote.py`).
"""

from __future__ import annotations

import contextlib
import re
import uuid
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
from jax.sharding import AbstractMesh, NamedSharding

from xform._jax import compiler_options, jaxpr_and_consts
from xform._jax.meshes import shape_dtype_struct
from xform.errors import CompilationFailed
from xform.interpret.cost import flops
from xform.introspection.callables import function_name
from xform.memory import buffers
from xform.memory.answers import Answer, cached_answer
from xform.memory.executable import compile_here
from xform.memory.lowering import (
    device_count,
    jitted_with_arguments,
    lower,
    lower_traced,
    lowering_context,
    refuse_donation,
    trace_jitted,
)
from xform.memory.remote import compile_there
from xform.memory.report import MemoryReport
from xform.memory.sharding import LoweringArguments, on_mesh
from xform.memory.targets import Target, check_installed, parse_target
from xform.program.ir import program
from xform.terminal import progress_line
from xform.terminal.text import parse_bytes

# Finds the size of a program in the compiler's message that refuses the program, such as
# "... required for HLO temporaries (39.00G) exceeds ..." or "Used 24.00G of 15.75G hbm".
_SIZES = re.compile(r"(?:\(|Used )(?P<size>\d+(?:\.\d+)?)(?P<unit>[KMGT])(?:\) exceeds| of )")


@runtime_checkable
class PlansForTarget(Protocol):
    """A function that compiles itself, as its plans depend on the target: one of `xform.jit`."""

    def report_for(
        self, target: str | None, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> MemoryReport:
        """Return the report of the compiled function; a target of None is its own."""
        ...


def compile_for(
    f: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    target: str | Target | None = None,
    *,
    mesh: Mapping[str, int] | None = None,
    in_specs: Any = None,
    donate_argnums: int | Sequence[int] = (),
    timeout_seconds: float = 3600,
) -> MemoryReport:
    """Compile a function for a target, whose devices need not be attached.

    Args:
      f: a function of pytrees of arrays, or a function made by `jax.jit` with its own options. A
        function of `xform.jit` makes its plans for the target.
      args: arrays or `jax.ShapeDtypeStruct`s in pytrees; nothing is run. They may have
        `NamedSharding`s over an `AbstractMesh` or over other devices: only the mesh's axes matter.
      kwargs: keyword arguments, of the same kinds.
      target: see `parse_target`; None is JAX's default backend.
      mesh: sizes of the axes of a mesh of the target's devices, by name.
      in_specs: a `PartitionSpec` for each of `args`, or a prefix of their tree, over `mesh` or the
        arguments' own mesh. A None in it means replicated. Without `in_specs` the arguments keep
        their own shardings, and an argument without a sharding is replicated.
      donate_argnums: positions of the arguments whose memory may be reused.
      timeout_seconds: time limit of a compiler that runs in a separate process.

    Returns:
      A `MemoryReport`, also if the program is too large for the device.

    Raises:
      WrongArgument: the target is unknown, or the mesh does not fit it.
      MissingExtra: a package that is needed to compile for the target is not installed.
      CompilationFailed: the compiler failed, or exceeded the time limit.

    Cost: a trace, a lowering and a compilation; for devices that are not attached, also a process
    that imports JAX. Results are cached by program and target, see `xform.memory.answers`.
    """
    parsed = target if isinstance(target, Target) else parse_target(target)
    if isinstance(f, PlansForTarget):
        refuse_donation(donate_argnums)
        place = _on_devices if parsed.local else on_mesh
        arguments = place(args, kwargs or {}, parsed, mesh, in_specs)
        return f.report_for(target and parsed.name, arguments.args, arguments.kwargs)
    with progress_line.show(f"compiling {function_name(f)} for {parsed.name}"):
        f, args, kwargs = jitted_with_arguments(f, args, kwargs or {}, donate_argnums)
        if parsed.local:
            return _compile_locally(f, args, kwargs, parsed, mesh, in_specs)
        return _compile_elsewhere(f, args, kwargs, parsed, mesh, in_specs, timeout_seconds)


def compiled_bytes(f: Callable[..., Any], avals: Sequence[Any], target: str | None = None) -> float:
    """Return the bytes of a compiled function, with its arguments and outputs.

    The result is infinite if the compiler refuses the function and reports no size.

    Args:
      f: a function of flat arrays.
      avals: the types of its arguments. Symbolic dimensions have their sizes at the current sample.
      target: see `parse_target`; None is JAX's default backend.

    Raises and costs: see `compile_for`.
    """
    return compile_for(f, [*map(shape_dtype_struct, avals)], target=target).counted_bytes


def _compile_elsewhere(f: Any, args: Sequence[Any], kwargs: Mapping[str, Any], target: Target,
                       mesh: Mapping[str, int] | None, in_specs: Any, timeout_seconds: float
                       ) -> MemoryReport:  # fmt: skip
    """Compile in a separate process, for devices that need not be attached."""
    check_installed(target)
    lowered, jaxpr = lower(f, on_mesh(args, kwargs, target, mesh, in_specs), target)
    ask = lambda: compile_there(lowered, target, timeout_seconds)
    key = target.name, str(lowered.donated), str(lowered.options)
    answer = cached_answer(lowered.program, *key, ask=ask)
    return report_of(lowered.name, target, lowered.devices, answer, jaxpr, lowered.arguments)


def trace_for(f: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], target: Target,
              donate_argnums: int | Sequence[int] = ()) -> Any:  # fmt: skip
    """Trace a function with `jax.jit` for a target, and return JAX's `Traced` object.

    Args:
      f: a function of pytrees of arrays, or a function made by `jax.jit` with its own options.
      args: arrays or `jax.ShapeDtypeStruct`s in pytrees.
      kwargs: keyword arguments, of the same kinds.
      target: the target.
      donate_argnums: positions of the arguments whose memory may be reused.
    """
    f, args, kwargs = jitted_with_arguments(f, args, kwargs, donate_argnums)
    if target.local:
        arguments = _on_devices(args, kwargs, target, None, None)
        with _planned_locally(target):
            return trace_jitted(f, arguments)
    arguments = on_mesh(args, kwargs, target, None, None)
    with lowering_context(target, arguments):
        return trace_jitted(f, arguments)


def _on_devices(args: Sequence[Any], kwargs: Mapping[str, Any], target: Target,
                mesh: Mapping[str, int] | None, in_specs: Any) -> LoweringArguments:  # fmt: skip
    """Return the arguments for a lowering on devices of this process.

    The arguments are placed on these devices if they have an abstract mesh, if the caller gives a
    mesh or specs, or if the devices are not of JAX's default backend.
    """
    arguments = on_mesh(args, kwargs, target, mesh, in_specs)
    has_mesh = mesh is not None or in_specs is not None
    is_abstract = has_mesh or any(map(_has_abstract_mesh, jax.tree.leaves((args, kwargs))))
    if is_abstract or target.backend != jax.default_backend():
        return arguments.on(jax.devices(target.backend))
    return LoweringArguments(tuple(args), dict(kwargs), arguments.mesh)


@contextlib.contextmanager
def _planned_locally(target: Target) -> Generator[None]:
    """Return a context that plans traces for a device of this process and places arrays on it."""
    first = jax.local_devices(backend=target.backend)[0]
    with target.planned_for(), jax.default_device(first):
        yield


def _compile_locally(f: Any, args: Sequence[Any], kwargs: Mapping[str, Any], target: Target,
                     mesh: Mapping[str, int] | None, in_specs: Any) -> MemoryReport:  # fmt: skip
    """Compile for devices of this process."""
    arguments = _on_devices(args, kwargs, target, mesh, in_specs)
    with _planned_locally(target):
        trace = trace_jitted(f, arguments)
        lowered = lower_traced(trace, target.platform)

    # A unique option makes JAX's compilation cache miss: a cached program has no buffer assignment.
    ask = lambda: compile_here(lowered, {"xla_dump_emitter_re": uuid.uuid4().hex})[1]
    key = target.name, target.device.name, str(compiler_options(trace))
    answer = cached_answer(lowered.as_text(debug_info=True).encode(), *key, ask=ask)
    return report_of(trace.fun_name, target, device_count(lowered), answer, trace.jaxpr)


def _has_abstract_mesh(x: Any) -> bool:
    """Return whether an argument is sharded over a mesh without devices."""
    sharding = getattr(x, "sharding", None)
    return isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh)


def report_of(name: str, target: Target, devices: int, answer: Answer, jaxpr: Any,
                   arguments: tuple[str, ...] = ()) -> MemoryReport:  # fmt: skip
    """Return the `MemoryReport` for a compiler's answer, or raise `CompilationFailed`."""
    if answer.failed:
        raise CompilationFailed(
            f"{name} for target={target.name!r}",
            f"the compiler refused it: {answer.error.strip().splitlines()[0]}",
            "",
            "fix the program; if it is correct, report this error with the program",
        )
    prog = program(jaxpr)
    needed_bytes = _needed_bytes(answer.error, target)
    sizes = dict(answer.bytes)
    if answer.module and sizes:
        assignment = buffers.read(answer.module)
        sizes["constant"] = assignment.constant_bytes
        if target.platform == "tpu":
            # libtpu's own sum is up to a third larger than its buffer assignment.
            sizes["temp"] = assignment.temp_bytes
    return MemoryReport(
        name,
        target,
        devices,
        sizes,
        flops(prog),
        answer.compile_seconds,
        answer.module,
        arguments,
        answer.error,
        needed_bytes,
        _closed_bytes(jaxpr),
        prog,
        answer.known,
    )


def _closed_bytes(jaxpr: Any) -> int:
    """Return the bytes of the arrays that a program and its inner programs close over."""
    sizes: dict[int, int] = {}
    seen, stack = set[int](), [jaxpr]
    while stack:
        inner, consts = jaxpr_and_consts(stack.pop())
        sizes |= {id(x): getattr(x, "nbytes", 0) for x in consts}
        if id(inner) not in seen:
            seen.add(id(inner))
            params = (v for eqn in inner.eqns for v in eqn.params.values())
            stack += [j for v in params for j in (v if isinstance(v, tuple) else (v,))
                      if hasattr(j, "eqns")]  # fmt: skip
    return sum(sizes.values())


def _needed_bytes(error: str, target: Target) -> int | None:
    """Return the bytes that a refused program needs; None if the error message does not say it.

    A size in the message that does not exceed the device's capacity is ignored. It is about
    something else, such as a memory on the chip.
    """
    sizes = (parse_bytes(f"{m['size']}{m['unit']}iB") for m in _SIZES.finditer(error))
    return max((n for n in sizes if n > (target.device.capacity_bytes or 0)), default=None)
