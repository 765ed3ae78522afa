"""`xform.memory_analysis`: compile a function for a device and report its memory.

The device need not be attached to this machine. `compilation.py` compiles, and `report.py` has the
`MemoryReport`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import inspect
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from xform.errors import WrongArgument
from xform.introspection.callables import check_callable, definition_site, function_name
from xform.memory.compilation import PlansForTarget, compile_for
from xform.memory.description import describe, short
from xform.memory.report import MemoryReport
from xform.planner.idle_regions import warn_of_idle_regions
from xform.planner.planning import current_planner, use_planner
from xform.policies.budgets import bytes_of
from xform.policies.sample import check_known_sizes
from xform.policies.unused_names import warn_of_unused_names


def memory_analysis(
    f: Callable[..., Any],
    *args: Any,
    target: str | None = None,
    mesh: Mapping[str, int] | None = None,
    in_specs: Any = None,
    donate_argnums: int | Sequence[int] = (),
    capacity: str | int | None = None,
    **kwargs: Any,
) -> MemoryReport:
    """Compile `f` for a device and report the memory that it needs there.

    The device need not be attached to this machine. The function is not run.

    Args:
      f: a function of pytrees of arrays, or a function made by `jax.jit`, whose donation, shardings
        and static arguments are kept. A function of `xform.jit` makes its plans for the device.
      *args: arrays or `jax.ShapeDtypeStruct`s (with shardings if you like) in pytrees. A
        `ShapeDtypeStruct` allocates nothing. Strings and objects that are not pytrees of arrays are
        held constant; for a function made by `jax.jit`, only its static arguments are.
      target: `"cpu"`, `"cpu:8"`, `"tpu:v5e:2x2"` (v4, v5e, v5p, v6e, tpu7x, and a slice),
        `"gpu:h100"` or `"gpu:h100:8"` (a100-40, a100-80, h100, h200, b200, l4, rtx4090); None is
        JAX's default backend. `python -m xform doctor` lists the targets that work here.
      mesh: sizes of the axes of a mesh of the target's devices, by name: `{"data": 4, "model": 4}`.
      in_specs: a `PartitionSpec` for each of `args`, or a prefix of their tree. It names axes of
        `mesh`, or of the mesh in the arguments' own shardings. None keeps the arguments' shardings.
      donate_argnums: positions of the arguments whose memory may be reused, as for `jax.jit`.
      capacity: memory of one device, in bytes or as a string such as `"14 GiB"`. It replaces the
        known capacity. A CPU has no known capacity; on a GPU, JAX uses three quarters of the
        memory by default.
      **kwargs: keyword arguments of `f`, of the same kinds as `args`.

    Returns:
      A `MemoryReport` of one device. Its headline `total_bytes` is argument + output + temp -
      alias. If the program is too large for the device, the report says by how much.

    Raises:
      WrongArgument: `f` is not callable, a keyword argument is neither one of `f` nor an option,
        the target is unknown, or the mesh does not fit it.
      MissingExtra: a package that is needed to compile for the target is not installed.
      CompilationFailed: the compiler failed.

    Cost: one trace, one lowering and one compilation of `f`. For a device that is not attached, the
    compiler runs in a separate process. Results are cached in this process, and on disk too if
    JAX's compilation cache is on (`jax_compilation_cache_dir`).
    Source: https://docs.jax.dev/en/latest/aot.html

    >>> x = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    >>> report = xform.memory_analysis(lambda x: x @ x, x)
    >>> report.argument_bytes, report.output_bytes, report.flops
    (262144, 262144, 33554432)
    """
    check_callable(f, "memory_analysis")
    check_names(f, kwargs, memory_analysis)
    check_known_sizes(f"memory_analysis of {function_name(f)}", (args, kwargs))
    bytes_given = None if capacity is None else bytes_of(capacity, f"capacity={capacity!r}")
    is_planned = isinstance(f, PlansForTarget)  # it warns itself, and says what was compiled
    with contextlib.nullcontext() if is_planned else _warnings_of_idle_policies(function_name(f)):
        report = compile_for(f, args, kwargs, target, mesh=mesh, in_specs=in_specs,
                             donate_argnums=donate_argnums)  # fmt: skip
    if bytes_given is not None:
        device = dataclasses.replace(report.device, capacity_bytes=bytes_given)
        compiled_for = dataclasses.replace(report.compiled_for, device=device)
        report = dataclasses.replace(report, compiled_for=compiled_for)
    if not is_planned:
        report = dataclasses.replace(report, **subject_of(f, args, kwargs))
    if (
        mesh is not None
        and in_specs is None
        and not any(map(_has_mesh, jax.tree.leaves((args, kwargs))))
    ):
        note = dataclasses.replace(report.description, note=_REPLICATED)
        report = dataclasses.replace(report, description=note)
    return report


def check_names(
    f: Callable[..., Any], kwargs: Mapping[str, Any], caller: Callable[..., Any]
) -> None:
    """Raise WrongArgument for a keyword argument that neither `f` nor `caller` has."""
    try:
        parameters = inspect.signature(f, follow_wrapped=False).parameters
    except (TypeError, ValueError):  # some callables have no signature
        return
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    mine = inspect.signature(caller).parameters.values()
    options = [p.name for p in mine if p.kind is p.KEYWORD_ONLY]
    for name in kwargs.keys() - parameters.keys():
        close = difflib.get_close_matches(name, options, 1)
        remedy = f"did you mean {close[0]}?" if close else f"the options are {', '.join(options)}"
        if name == "policy":
            remedy = "a policy is for a derivative: pass xform.grad(f, policy=...) or xform.jit(f, "
            remedy += "policy), or call xform.compare"
        raise WrongArgument(
            f"{caller.__name__} of {function_name(f)} with {name}=",
            f"neither {function_name(f)} nor {caller.__name__} has an argument {name!r}",
            definition_site(f), remedy,
        )  # fmt: skip


def subject_of(
    f: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the fields of a report about a function's arguments: `shapes` and `description`."""
    leaves = [jax.typeof(x) if not isinstance(x, jax.ShapeDtypeStruct) else x
              for x in jax.tree.leaves((args, kwargs)) if hasattr(x, "shape")]  # fmt: skip
    types = frozenset((short(x.dtype), tuple(x.shape)) for x in leaves)
    return {"shapes": types, "description": describe(f, args, kwargs)}


# A remark in the report if a mesh is given and no sharding.
_REPLICATED = (
    "no argument is sharded over the mesh, so each device holds a full copy of every argument: "
    "give in_specs, or on the command line --in-specs x=data"
)


@contextlib.contextmanager
def _warnings_of_idle_policies(name: str) -> Generator[None]:
    """A context for traces of a function: unused names and regions that change nothing warn."""
    planner = current_planner()

    def plan(problem: Any, policy: Any, compiler: Any) -> Any:
        warn_of_unused_names(policy, problem.marked, f"a derivative in {name}")
        warn_of_idle_regions(policy, problem, f"a derivative in {name}")
        return planner(problem, policy, compiler)

    with use_planner(plan):
        yield


def _has_mesh(x: Any) -> bool:
    """Return whether an argument has a sharding over a mesh."""
    return isinstance(getattr(x, "sharding", None), NamedSharding)
