"""Access to JAX's internals: all imports from jax.core, jax.extend and jax.interpreters.

A jaxpr is JAX's form of a traced function: a list of equations, each of which applies a primitive.
An aval is the type of a value: shape, dtype, sharding. The differences between JAX 0.10.2 and 0.12
are handled here:

- `jaxpr_and_consts`: in 0.11, ClosedJaxpr was replaced by a Jaxpr with `consts`;
- `custom_functions.pull_custom_vjp`: since 0.11, the backward function of a custom_vjp returns its
  cotangents and a dict of values that the user logs;
- `custom_functions.BACKWARD_FILLS_ZEROS`: since 0.12, it gets symbolic zeros for those that are
  zero;
- `operation_objects`: names of `jax.experimental.hijax` that 0.10 lacks;
- `scan_counts`: in 0.11, scan's `num_consts`, `num_carry` became the trees `ft_in`, `ft_out`;
- `compute_on`: in 0.11, `compute_on2` was renamed to `compute_on`, and replaced the older function;
- `current_trace`: since 0.12, no operation may run inside `take_current_trace`;
- `is_inlined`: in 0.11, a jit's `inline` became an enumeration;
- `callee`: in 0.11, the parameters with the bodies of a composite and of an `eval_jaxpr` were
  renamed;
- `with_metadata`, `linear_part`: an `xla_metadata_call` gives XLA metadata to all operations of a
  function. Since 0.12 its parameter `xla_metadata` has the metadata of the function, and its
  parameter `ad_metadata` the metadata of the linear part of the function's derivative.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import (
    api_util,
    jit,  # JAX's own, also while `xform.install` replaces `jax.jit`
)
from jax.ad_checkpoint import Offloadable
from jax.core import AbstractValue, ShapedArray, Trace, Tracer, eval_context
from jax.custom_derivatives import SymbolicZero
from jax.experimental import compute_on as _compute_on
from jax.experimental import scheduling_groups as _groups
from jax.experimental import xla_metadata as _metadata
from jax.extend import linear_util, source_info_util
from jax.extend.core import (
    AbstractToken,
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    Primitive,
    Var,
    jaxprs_in_params,
    new_jaxpr_eqn,
    set_current_trace,
    take_current_trace,
)
from jax.extend.core import primitives as jax_primitives
from jax.extend.core.primitives import (
    broadcast_in_dim_p,
    cond_p,
    conv_general_dilated_p,
    custom_jvp_call_p,
    custom_vjp_call_p,
    dot_general_p,
    iota_p,
    jit_p,
    name_p,
    ppermute_p,
    reshape_p,
    scan_p,
    transpose_p,
    while_p,
)
from jax.extend.mlir import ir as _ir
from jax.interpreters import ad, batching, mlir, partial_eval
from jax.ref import AbstractRef
from jaxlib import xla_client

from xform._jax.contexts import joined, no_mesh
from xform._jax.effects import has_effects, names_axis, side_effects
from xform._jax.mutable import argument_type, drop_content
from xform.introspection.loaded import names_of

__all__ = [
    "AbstractToken", "AbstractValue", "JVPTracer", "Jaxpr", "JaxprEqn", "Literal", "Offloadable",
    "Primitive", "ShapedArray", "SymbolicZero", "Trace", "Tracer", "Var", "ad", "argument_names",
    "batch_of", "batching", "broadcast_in_dim_p", "callee", "closed_jaxpr",
    "compiler_options", "compute_on",
    "cond_p",
    "context_fields", "conv_general_dilated_p", "cotangent_aval", "current_trace",
    "custom_jvp_call_p", "custom_vjp_call_p", "dot_general_p", "equation", "has_effects",
    "hlo_text", "iota_p", "ir", "is_bookkeeping", "is_inlined", "is_jaxpr", "is_reference",
    "is_zero", "itemsize", "jax_primitives", "jaxpr_and_consts", "jaxprs_in_params", "jaxprs_of",
    "jit", "jit_p", "linear_part", "linear_util", "match_weak_type", "mlir", "name_p", "named_axes",
    "policy_answer", "ppermute_p", "primitive_named", "primitives", "registered_names", "reshape_p",
    "run_at_once", "scan_counts", "scan_p", "set_current_trace", "side_effects", "source_info_util",
    "staging", "tangent_aval", "trace_context", "trace_of", "trace_to_jaxpr",
    "traced_like", "tracer_of_type",
    "transpose_p",
    "value_inside", "variable_of", "while_p", "with_jaxprs", "with_metadata",
]  # fmt: skip

JVPTracer: Any = ad.JVPTracer
ir: Any = _ir

# Wraps a function, like `compute_on2` in 0.10.
compute_on: Any = getattr(_compute_on, "compute_on2", None) or _compute_on.compute_on


def jaxpr_and_consts(jaxpr: Any) -> tuple[Jaxpr, Sequence[Any]]:
    """Return the Jaxpr and the constants of `jaxpr`, which is a ClosedJaxpr or a Jaxpr.

    A Jaxpr has constants of its own since 0.11. Before, there are none, and `()` is returned.
    """
    return getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ())


def is_jaxpr(x: Any) -> bool:
    """Return whether `x` is a Jaxpr or a ClosedJaxpr."""
    return isinstance(x, Jaxpr | ClosedJaxpr)


def trace_to_jaxpr(
    f: Callable[..., Sequence[Any]], args: Sequence[Any]
) -> tuple[Jaxpr, Sequence[Any]]:
    """Return the jaxpr of a function of flat arguments, and the values that it closed over.

    The jaxpr's first variables stand for these values: constvars, or leading inputs since 0.11.
    `jax.make_jaxpr` is not used: for a small function, it spends more time on pytrees and names
    than on tracing.
    """
    info = api_util.debug_info("xform", f, (), {})
    flat = linear_util.wrap_init(lambda *xs: jax.tree.leaves(f(*xs)), debug_info=info)
    jaxpr, _, consts = partial_eval.trace_to_jaxpr_dynamic(
        flat.with_unknown_names(), list(map(argument_type, args))
    )
    return jaxpr, consts


def compiler_options(traced: Any) -> dict[str, Any]:
    """Return the `compiler_options` of a `jax.jit`, from the result of its method `trace`."""
    return dict(getattr(traced, "_params", {}).get("compiler_options_kvs", ()))


def hlo_text(module: bytes) -> str:
    """Return the text of a serialized HloModuleProto."""
    client: Any = xla_client
    return client.XlaComputation(module).as_hlo_text()


def argument_names(jaxpr: Any) -> list[str]:
    """Return the names of a jaxpr's inputs, as paths such as `params['w']`."""
    opened = jaxpr_and_consts(jaxpr)[0]
    return [str(name) for name in opened.debug_info.safe_arg_names(len(opened.invars))]


def jaxprs_of(eqn: JaxprEqn) -> list[Any]:
    """Return the jaxprs in the parameters of an equation."""
    return list(jaxprs_in_params(eqn.params))


def with_jaxprs(eqn: JaxprEqn, f: Callable[[Any], Any]) -> JaxprEqn:
    """Return an equation with `f(jaxpr)`, of the same types, for each jaxpr in its parameters."""
    new: dict[str, Any] = {}
    for name, value in eqn.params.items():
        parts = value if isinstance(value, tuple) else (value,)
        if any(map(is_jaxpr, parts)):
            mapped = tuple(f(part) if is_jaxpr(part) else part for part in parts)
            new[name] = mapped if isinstance(value, tuple) else mapped[0]
    return eqn.replace(params={**eqn.params, **new})


def closed_jaxpr(jaxpr: Jaxpr, consts: Sequence[Any]) -> Any:
    """Return a jaxpr with the values of its constants, from the results of `trace_to_jaxpr`."""
    return ClosedJaxpr(jaxpr, list(consts))


def traced_like(jaxpr: Any, run: Callable[..., Sequence[Any]]) -> Any:
    """Return the jaxpr of a function, with the types and of the kind of another jaxpr."""
    types = [v.aval for v in jaxpr_and_consts(jaxpr)[0].invars]
    new, consts = trace_to_jaxpr(run, types)
    if hasattr(jaxpr, "consts"):
        return closed_jaxpr(new, consts)
    if consts:  # a Jaxpr of 0.10 has no constants, but a call in it may have some
        new, _ = trace_to_jaxpr(lambda *xs: jit(run)(*xs), types)
    return new


def named_axes(jaxpr: Any) -> set[Any]:
    """Return the named axes that a jaxpr uses: in collectives and in `axis_index`."""
    opened = jaxpr_and_consts(jaxpr)[0]
    effects: Any = opened.effects
    axes = {e.name for e in effects if names_axis(e)}
    return axes.union(*(named_axes(j) for eqn in opened.eqns for j in jaxprs_of(eqn)))


def callee(params: dict[str, Any], name: str) -> Any:
    """Return the jaxpr that a call runs: its parameter `name` or `call_jaxpr`, or None."""
    return params.get(name, params.get("call_jaxpr"))


def scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    """Return the numbers of constants and of carried values among a scan's inputs."""
    if "num_carry" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


def is_inlined(params: dict[str, Any]) -> bool:
    """Return whether a jit has `inline=True`. Since 0.11 it is an enumeration, always truthy."""
    inline = params["inline"]
    return inline if isinstance(inline, bool) else inline.name in ("JAX_EARLY", "JAX_LATE")


def with_metadata(f: Callable[..., Any], params: dict[str, Any]) -> Callable[..., Any]:
    """Return `f` wrapped in an `xla_metadata_call`; `params` are the parameters of such a call."""
    if "xla_metadata" not in params:
        return _groups.xla_metadata_call(f, **{k: v for k, v in params.items() if k != "jaxpr"})
    module: Any = _metadata
    linear = params["ad_metadata"]
    linear = linear if linear == "same" else dict(linear)
    return module.xla_metadata_call2(f, dict(params["xla_metadata"]), ad_metadata=linear)


def linear_part(eqn: JaxprEqn) -> JaxprEqn:
    """Return the `xla_metadata_call` for the linear part of the derivative of the call `eqn`.

    Since 0.12 a call may have other metadata for that part. Otherwise the result is `eqn` itself.
    """
    if (linear := eqn.params.get("ad_metadata", "same")) == "same":
        return eqn
    return eqn.replace(params={**eqn.params, "xla_metadata": linear, "ad_metadata": "same"})


def tangent_aval(aval: Any) -> Any:
    """Return the type of a tangent of a value of type `aval`; float0 for integers."""
    return aval.to_tangent_aval()


def cotangent_aval(aval: Any) -> Any:
    """Return the type of a cotangent of a value of type `aval`.

    It equals the tangent's type, except over mesh axes along which a value is unreduced or reduced:
    the cotangent of an unreduced value is reduced, and that of a reduced value is unreduced.
    """
    return aval.to_ct_aval()


def itemsize(dtype: Any) -> int:
    """Return the bytes of an element, also of an extended dtype, such as that of PRNG keys."""
    if not hasattr(dtype, "itemsize"):
        physical = dtype._rules.physical_element_aval(dtype)
        return physical.size * physical.dtype.itemsize
    return dtype.itemsize


def value_inside(x: Any) -> Any:
    """Return the value in a tracer of `vmap` or of JAX's own derivatives; None for others."""
    names = {"BatchTracer": "val", "JVPTracer": "primal", "LinearizeTracer": "primal"}
    name = names.get(type(x).__name__)
    return None if name is None else getattr(x, name)


def is_zero(x: Any) -> bool:
    """Return whether `x`, a result of a custom rule, is a symbolic zero."""
    return isinstance(x, SymbolicZero | ad.Zero)


def is_bookkeeping(x: Any) -> bool:
    """Return whether an object in a closure belongs to JAX's bookkeeping.

    Such objects are traces, debug information, and storage for output trees. They cannot change
    any result.
    """
    names = ("DebugInfo", "Store", "EqualStore")
    kind = type(x)
    return isinstance(x, Trace) or (kind.__module__.startswith("jax.") and kind.__name__ in names)


def context_fields(ctx: Any) -> dict[str, Any]:
    """Return the fields of an equation's context that are not the default, such as the mesh.

    `ctx` is `eqn.ctx`. The result maps the names of the fields to their values.
    """
    default = {"threefry_partitionable": "True", "remove_size_one_mesh_axis": "False",
               "cur_layout_mode": "LayoutMode.AUTO", "no_collectives": "frozenset()"}  # fmt: skip
    fields = {k: getattr(ctx, k, None) for k in type(ctx).__slots__ if not k.startswith("__")}
    return {
        k: v
        for k, v in fields.items()
        if k != "configs" and str(v) != default.get(k, "None") and not getattr(v, "empty", False)
    }


def is_reference(aval: Any) -> bool:
    """Return whether a type is the type of a mutable reference."""
    return isinstance(aval, AbstractRef)


def policy_answer(answer: Any) -> bool | Offloadable | None:
    """Return a checkpoint policy's answer as True (save), False (recompute) or an Offloadable.

    None if JAX does not accept the answer, such as a number or a NumPy boolean.
    """
    if isinstance(answer, bool | Offloadable):
        return answer
    return {"SaveableType": True, "RecomputeType": False}.get(type(answer).__name__)


def primitives() -> dict[str, Primitive]:
    """Return the primitives in `jax.extend.core.primitives`, by name."""
    public = {k: getattr(jax_primitives, k) for k in dir(jax_primitives) if k.endswith("_p")}
    return {p.name: p for p in public.values()}


def primitive_named(name: str) -> Primitive | None:
    """Return JAX's own primitive of this name; None if no loaded module of JAX holds one.

    Only some of JAX's primitives are public, so all loaded modules of JAX are searched. A primitive
    of the same name in another library is not returned. Nor is one of Pallas, which has a `gather`,
    a `scatter` and a `swap` of its own: a public primitive, or the one that was found first, keeps
    its name.
    """
    if name not in _FOUND:
        for module in [module for module in sys.modules if module not in _SEARCHED]:
            names = names_of(sys.modules[module]) if f"{module}.".startswith("jax.") else {}
            if not getattr(names.get("__spec__"), "_initializing", False):
                _SEARCHED.add(module)
            for p in [x for x in [*names.values()] if isinstance(x, Primitive)]:
                _FOUND.setdefault(p.name, p)
    return _FOUND.get(name)


_FOUND: dict[str, Primitive] = primitives()  # the primitives that were found, by name
_SEARCHED: set[str] = set()  # the modules that were searched


def registered_names() -> set[str]:
    """Return the names of JAX's primitives that are public or have a derivative in JAX.

    Primitives of modules that are not imported yet are missing. Primitives that other libraries
    (Flax) register are left out.
    """
    known = {*ad.primitive_jvps, *ad.primitive_transposes}
    return {*primitives(), *(p.name for p in known if primitive_named(p.name) is p)}


def equation(prim: Primitive, inputs: Sequence[Var], params: dict[str, Any],
             outputs: list[Var] | None = None) -> JaxprEqn:  # fmt: skip
    """Return an equation that applies a primitive to variables, with the current source position.

    Pass `outputs` if they are known: abstract evaluation takes longer than most operations.
    """
    effects: Any = set()
    if outputs is None:
        avals, effects = prim.abstract_eval(*[v.aval for v in inputs], **params)
        avals = avals if prim.multiple_results else [avals]
        outputs = [Var(drop_content(a)) for a in avals]
    return new_jaxpr_eqn(list(inputs), outputs, prim, params, effects, source_info_util.current())


def run_at_once() -> Any:
    """Return a context that runs operations on known values, in any trace and any `shard_map`.

    `jax.ensure_compile_time_eval` does not work in a `shard_map` outside `jit`.
    """
    return joined(eval_context(), no_mesh())


def current_trace() -> Any:
    """Return the current trace."""
    with take_current_trace() as trace:
        return trace


def trace_of(x: Any) -> Any:
    """Return the trace that a tracer belongs to; None for a plain value."""
    return x._trace if isinstance(x, Tracer) else None


def variable_of(x: Any) -> Any:
    """Return the variable of a traced value in its program; None for any other value."""
    return x.val if isinstance(x, partial_eval.DynamicJaxprTracer) else None


def batch_of(x: Any) -> tuple[Any, int | None]:
    """Return the batch that a value has in the current `vmap`, and the axis of the batch.

    A value that is not batched there is returned as it is, with None.
    """
    if is_batched(x) and trace_of(x) is current_trace():
        return x.val, x.batch_dim
    return x, None


def is_batched(x: Any) -> bool:
    """Return whether a value is a batched tracer of `vmap`."""
    return type(trace_of(x)).__name__ == "BatchTrace"


_probe = jit(lambda: ())


def trace_context() -> Any:
    """Return an object for the settings of JAX that a trace depends on, such as 64-bit dtypes.

    JAX keeps a trace of a function for each combination of settings. The object is such a trace.
    """
    return _probe.trace().jaxpr


def staging() -> bool:
    """Return whether operations are staged (under `jit`, in a loop body) rather than run.

    The current trace may be that of `vmap` or another transform, which passes operations on to its
    parent trace.
    """
    trace = current_trace()
    while trace is not None:
        if type(trace).__name__ == "DynamicJaxprTrace":
            return True
        trace = getattr(trace, "parent_trace", None)
    return False


def match_weak_type(x: Any, aval: Any) -> Any:
    """Return `x`, converted to a weak type if `aval` is weakly typed, else to a strong type.

    lax has no public function for this.
    """
    weak = getattr(aval, "weak_type", False)
    if weak == getattr(jax.typeof(x), "weak_type", False):
        return x
    convert = jax_primitives.convert_element_type_p
    return convert.bind(x, new_dtype=x.dtype, weak_type=weak, sharding=None)


def tracer_of_type(aval: Any) -> Tracer[Any]:
    """Return a tracer of JAX with the type `aval` and no trace.

    It is for code that looks inside a tracer to find out whether its value may have a tangent.
    `jax.closure_convert` does that, and recognizes only JAX's own tracers.
    """
    tracer = object.__new__(partial_eval.DynamicJaxprTracer)
    tracer.aval = aval
    return tracer
