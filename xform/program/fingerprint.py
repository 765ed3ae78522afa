"""Fingerprints: texts of programs that are equal only if the programs are equal.

A fingerprint is the key for cached compiler results, for plans on disk, and for finding equal
blocks and equal equations. It covers the primitive of each equation, every parameter, the context
of the trace, the type of every value (with sharding, memory space, weak type and varying axes), and
the content of constants. Line numbers and variable names are not part of it.

`text_of` writes any value, such as a parameter, as a text. Plain values, and objects built from
plain values, have the same text in every process. An object whose equality cannot be decided gets a
*unique name*, which no other object has in any process. So the object equals only itself.
"""

from __future__ import annotations

import copyreg
import dataclasses
import enum
import functools
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from xform._jax import (
    JaxprEqn,
    Literal,
    Primitive,
    ShapedArray,
    Tracer,
    context_fields,
    is_bookkeeping,
    is_jaxpr,
    jaxpr_and_consts,
    primitive_named,
)
from xform._jax.custom_functions import RULE_PARAMS
from xform._jax.symbolic import SymbolicDimension
from xform._jax.wrappers import innermost
from xform.program.arithmetic import is_key
from xform.program.ir import Atom, Program
from xform.program.naming import (
    cached_text,
    digest,
    from_library,
    is_importable,
    name_of,
    primitive_name,
    unique_name,
)

# `id`s of the enclosing objects, outermost first, to detect an object that contains itself.
_Outer = tuple[int, ...]

_PLAIN = {bool, int, float, complex, str, bytes, type(None), type(...), range, SymbolicDimension}
# A *reduction* is the result of `__reduce_ex__`, from which pickle makes a copy of an object: a
# function, its arguments, and the object's attributes. Functions in `_NEW` only make an instance.
_NEW: Any = (copyreg.__newobj__, copyreg.__newobj_ex__)  # pyright: ignore[reportAttributeAccessIssue]
# Bytes of an object that has room for a `__dict__` and for weak references, but no other data.
_BARE = object.__basicsize__ + 16


def fingerprint(prog: Program) -> str:
    """Return a text that only equal programs share. Cost: linear in equations, then cached."""
    if "fingerprint" not in prog.cache:
        consts = (text_of(x) for _, x in prog.consts)
        prog.cache["fingerprint"] = digest((*listing(prog), *consts))
    return prog.cache["fingerprint"]


def listing(prog: Program, rules: bool = True) -> tuple[str, ...]:
    """Return the lines of a program: equations, inputs, constants, outputs. Cached on the program.

    Constants are listed by type, like inputs, not by content. `rules`: with the rules of custom
    functions.
    """
    key = "listing", rules
    if key not in prog.cache:
        consts = [v for v, _ in prog.consts]
        rows = _listing(prog.inputs, consts, prog.equations, prog.outputs, rules)
        prog.cache[key] = tuple(rows)
    return prog.cache[key]


def _listing(inputs: Sequence[Any], consts: Sequence[Any], equations: Sequence[JaxprEqn],
             outputs: Sequence[Atom], rules: bool) -> Iterator[str]:  # fmt: skip
    """Yield the lines of a program: its equations, then its inputs, constants and outputs.

    `rules`: with the rules of custom functions.
    """
    variables = dict.fromkeys((*inputs, *consts))
    names = {v: f"i{n}" for n, v in enumerate(variables)}
    yield from lines(equations, names, rules)
    yield " ".join(("inputs", *(f"{names[v]}:{type_text(v.aval)}" for v in inputs)))
    yield " ".join(("constants", *(f"{names[v]}:{type_text(v.aval)}" for v in consts)))
    yield " ".join(("outputs", *(_atom(v, names) for v in outputs)))


def lines(equations: Iterable[JaxprEqn], names: dict[Any, str], rules: bool = True
          ) -> Iterator[str]:  # fmt: skip
    """Yield each equation as a line of text. Variables are named in order of appearance.

    `names` has the names of variables that already have one. New names are added to it. `rules`:
    with the rules of custom functions.
    """
    for eqn in equations:
        reads = [_atom(v, names) for v in eqn.invars]
        for v in eqn.outvars:
            names[v] = f"v{len(names)}"
        yield f"{operation_text(eqn, rules)} {' '.join(reads)}"


def _atom(v: Atom, names: dict[Any, str]) -> str:
    """Return the text of a literal, or the name of a variable; an unknown variable gets a name."""
    if isinstance(v, Literal):
        return literal_text(v)
    if v not in names:  # defined outside these equations
        names[v] = f"v{len(names)}"
        return f"{names[v]}:{type_text(v.aval)}"
    return names[v]


def operation_text(eqn: JaxprEqn, rules: bool = True) -> str:
    """Return an equation without its inputs, as text: primitive, parameters, types of outputs."""
    outputs = " ".join([type_text(v.aval) for v in eqn.outvars])
    return f"{outputs} = {primitive_name(eqn.primitive)}[{parameters_text(eqn, rules)}]"


def literal_text(v: Literal) -> str:
    """Return a literal as text, with its type. 0.0 and -0.0 differ, because their bits do."""
    plain = isinstance(getattr(v.aval, "dtype", None), np.dtype)
    value = np.asarray(v.val) if plain else v.val
    return f"{(_number_text(value) if plain else '') or text_of(value)}:{type_text(v.aval)}"


def parameters_text(eqn: JaxprEqn, rules: bool = True) -> str:
    """Return the parameters of an equation, and the context of its trace, as text.

    With `rules` False, the rules of custom functions are left out, also in nested programs. Their
    text says what they close over, such as a list that each call makes longer.
    For JAX's own primitives, parameters that are None are left out: whether an equation lists them
    depends on the version of JAX and on how the primitive was bound. For other primitives, a
    missing parameter may have another meaning than None.
    """
    skip_none = primitive_named(eqn.primitive.name) is eqn.primitive
    params = sorted((k, v) for k, v in eqn.params.items() if rules or k not in RULE_PARAMS)
    text = text_of if rules else _without_rules
    texts = [f"{k}={text(v)}" for k, v in params if v is not None or not skip_none]
    where = cached_text(eqn.ctx, _context)
    if where and _mesh_in_types(eqn):
        where = _context(eqn.ctx, mesh=False)
    return ", ".join([*texts, where] if where else texts)


def _mesh_in_types(eqn: JaxprEqn) -> bool:
    """Return whether a type of an input or output has the mesh of the equation's context.

    If so, `parameters_text` leaves out the mesh of the context. Whether JAX sets it there depends
    on which call traced a function first, because JAX caches its traces.
    """
    mesh = getattr(eqn.ctx, "cur_abstract_mesh", None)
    types = (v.aval for v in (*eqn.outvars, *eqn.invars))
    return any(getattr(getattr(t, "sharding", None), "mesh", None) == mesh for t in types)


def _context(ctx: Any, mesh: bool = True) -> str:
    """Return the fields of a trace context that are not defaults. `mesh`: with the mesh."""
    unusual = {k: v for k, v in context_fields(ctx).items() if mesh or k != "cur_abstract_mesh"}
    return f"in {_pairs(unusual, ())}" if unusual else ""


def type_text(aval: Any) -> str:
    """Return the type of a value as text."""
    return cached_text(aval, _type_text)


def _type_text(aval: Any) -> str:
    if type(aval) is not ShapedArray:
        return _reduced(aval, (id(aval),))
    # Attributes that equal those of a value without a mesh, in device memory, are left out.
    default = ShapedArray(aval.shape, aval.dtype).__getnewargs_ex__()[1]
    unusual = {k: v for k, v in aval.__getnewargs_ex__()[1].items() if v != default[k]}
    dims = ",".join(map(str, aval.shape))
    short = f"{'~' if aval.weak_type else ''}{_dtype_text(aval.dtype)}[{dims}]"
    return f"{short}{{{_pairs(unusual, ())}}}" if unusual else short


def text_of(x: Any, outer: _Outer = ()) -> str:
    """Return a text that only equal values share. It includes the type, so 1, 1.0 and True differ.

    The text is the same in every process for plain data and for objects built from it: arrays,
    enums, dataclasses, functions (by code and closure), programs, JAX's own types. `outer` has the
    `id`s of the objects that contain `x`.
    """
    kind = type(x)
    if kind in _PLAIN:
        return repr(x)
    if kind is tuple:
        inner = ", ".join([text_of(v, outer) for v in x])
        return f"({inner},)" if len(x) == 1 else f"({inner})"
    if isinstance(x, np.dtype):
        return f"dtype {_dtype_text(x)}"
    if is_jaxpr(x):
        return cached_text(x, _nested)
    if id(x) in outer:
        return f"<what is {len(outer) - outer.index(id(x))} levels up>"
    return _compound(x, (*outer, id(x)))


def _compound(x: Any, outer: _Outer) -> str:
    """Return the text of a value that may contain other values."""
    kind = type(x)
    if isinstance(x, np.ndarray | np.generic):
        return _array(x, outer)
    if isinstance(x, jax.Array):
        return unique_name(x) if isinstance(x, Tracer) else cached_text(x, _device_array)
    if isinstance(x, enum.Enum):
        return f"{name_of(kind)}.{x.name}" if x.name else f"{name_of(kind)}({x.value!r})"
    if isinstance(x, Primitive):
        return primitive_name(x)
    if kind is ShapedArray:
        return type_text(x)
    if isinstance(x, jax.Device):
        return f"<{x.platform} {x.device_kind!r} {x.id} of process {x.process_index}>"
    if isinstance(x, NamedSharding | Mesh | AbstractMesh):
        return cached_text(x, _mesh_or_sharding)
    if isinstance(x, type | types.ModuleType):
        return name_of(x)
    if is_bookkeeping(x):
        return name_of(kind)
    if (rule := innermost(x)) is not x:
        return f"rule {text_of(rule, outer)}"
    if hasattr(kind, "__fingerprint__"):
        return f"{name_of(kind)}{text_of(x.__fingerprint__(), outer)}"
    if kind is list:
        return f"[{_several(x, outer)}]"
    if kind in (set, frozenset):
        return f"{kind.__name__}{{{', '.join(sorted(text_of(v, outer) for v in x))}}}"
    if kind in (dict, types.MappingProxyType):
        return f"{kind.__name__}{{{_pairs(x, outer)}}}"
    if isinstance(x, jax.tree_util.PyTreeDef):
        inside = text_of(x.node_data(), outer), _several(x.children(), outer)
        return f"tree({inside[0]}, [{inside[1]}], {x.num_leaves})"
    return _function(x, outer) if callable(x) else _object(x, outer)


def _function(x: Any, outer: _Outer) -> str:
    """Return the text of a function: its name, code, defaults and closure.

    The text of a function that is not importable, such as a lambda, includes the globals it reads.
    """
    if isinstance(x, types.MethodType):
        return f"method({text_of(x.__self__, outer)}, {text_of(x.__func__, outer)})"
    if isinstance(x, functools.partial):
        arguments = f"({_several(x.args, outer)}), {{{_pairs(x.keywords, outer)}}}"
        return f"{name_of(type(x))}({text_of(x.func, outer)}, {arguments})"
    importable = is_importable(x)
    if importable and (from_library(x) or not isinstance(x, types.FunctionType)):
        return name_of(x)
    if not isinstance(x, types.FunctionType):
        return _object(x, outer)
    cells = [_cell_content(c) for c in x.__closure__ or ()]
    names = () if importable or from_library(x) else _global_names(x.__code__)
    values = {k: x.__globals__[k] for k in names if k in x.__globals__}
    texts = text_of((x.__defaults__, x.__kwdefaults__, cells), outer), _pairs(values, outer)
    return f"{x.__module__}.{x.__qualname__}#{digest((cached_text(x.__code__, _code), *texts))}"


def _cell_content(cell: types.CellType) -> Any:
    """Return the value of a variable that a function closes over; ... if it has no value yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return ...


def _code(code: types.CodeType) -> str:
    """Return the text of a code object, without its line numbers."""
    consts = [
        cached_text(c, _code) if isinstance(c, types.CodeType) else text_of(c)
        for c in code.co_consts
    ]
    names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
    counts = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags
    table = getattr(code, "co_exceptiontable", b"")
    return digest((repr(code.co_code), *consts, repr(names), repr(counts), repr(table)))


def _global_names(code: types.CodeType) -> set[str]:
    """Return the names that a code object, or a nested one, may read from its module."""
    inner = (_global_names(c) for c in code.co_consts if isinstance(c, types.CodeType))
    return {*code.co_names}.union(*inner)


def _object(x: Any, outer: _Outer) -> str:
    """Return the text of an object by its fields, or else by its reduction; see `_reduced`."""
    kind = type(x)
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        return f"{name_of(kind)}({_several(x, outer)})"
    if dataclasses.is_dataclass(x):
        fields = {f.name: getattr(x, f.name) for f in dataclasses.fields(x) if hasattr(x, f.name)}
        return f"{name_of(kind)}({_pairs(fields, outer)})"
    return _reduced(x, outer)


def _reduced(x: Any, outer: _Outer) -> str:
    """Return the text of an object by its reduction, from which pickle would make a copy.

    The object's class must define `__eq__`, or be JAX's own: JAX does not change objects that are
    parameters. Any other object gets a unique name.
    """
    kind = type(x)
    if kind.__eq__ is object.__eq__ and kind.__module__.partition(".")[0] != "jax":
        return unique_name(x)
    try:
        reduction = x.__reduce_ex__(4)
    except Exception:  # a class may raise anything
        return unique_name(x)
    if not isinstance(reduction, tuple):
        return unique_name(x)
    creator, args, *more = reduction
    parts = [_part(kind, x) for x in more if x is not None]
    if creator in _NEW:
        # The class has state, but its reduction has none, so equality cannot be decided.
        slots = any(vars(c).get("__slots__") for c in kind.__mro__)
        if len(args) == 1 and not parts and (slots or kind.__basicsize__ > _BARE):
            return unique_name(x)
        args = args[1:]
    else:
        args = creator, args
    return f"{name_of(kind)}({_several((*args, *parts), outer)})"


def _part(kind: type, x: Any) -> Any:
    """Return a part of a reduction, such as the attributes, without cached properties."""
    if isinstance(x, Iterator):
        return list(x)
    if not isinstance(x, dict):
        return x
    cached = functools.cached_property
    return {k: v for k, v in x.items() if not isinstance(getattr(kind, str(k), None), cached)}


def _array(x: Any, outer: _Outer = ()) -> str:
    """Return the text of a NumPy array, by its content."""
    if x.dtype.hasobject:
        return f"array({x.shape}, {text_of(x.tolist(), outer)})"
    kind = f"{type(x).__name__} {_dtype_text(x.dtype)}"
    if number := _number_text(x):
        return f"{kind}({number})"
    return f"{kind}[{','.join(map(str, x.shape))}]#{digest([x.tobytes()])}"


def _number_text(x: Any) -> str:
    """Return the text of a scalar number; "" for arrays and NaN (which has many bit patterns)."""
    value = x.item() if x.ndim == 0 else None
    return repr(value) if isinstance(value, int | float) and value == value else ""


def _mesh_or_sharding(x: Any) -> str:
    """Return a short text of a mesh, or of a sharding over a mesh."""
    mesh, kind = getattr(x, "mesh", x), type(x).__name__
    triples = zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
    axes = ", ".join(f"{name}={size} {type_.name}" for name, size, type_ in triples)
    spec = f"{text_of(x.spec.partitions)} on " if isinstance(x, NamedSharding) else ""
    return f"{kind}({spec}{axes})#{digest([_reduced(x, (id(x),))])[:16]}"


def _device_array(x: jax.Array) -> str:
    """Return the text of a JAX array, its content and sharding; a unique name if unreadable."""
    try:
        with jax.ensure_compile_time_eval():
            value = np.asarray(jax.random.key_data(x) if is_key(x) else x)
    except (RuntimeError, TypeError):  # deleted, or on the devices of several processes
        return unique_name(x)
    return f"{type_text(jax.typeof(x))}:{_array(value)} on {text_of(x.sharding)}"


def _dtype_text(dtype: Any) -> str:
    if not isinstance(dtype, np.dtype):
        return text_of(dtype)
    plain = dtype.fields is None and dtype.isnative
    return dtype.name if plain else f"{dtype.str}{dtype.descr}"


def _nested(jaxpr: Any, rules: bool = True) -> str:
    """Return the text of a nested program. `rules`: with the rules of custom functions."""
    opened, consts = jaxpr_and_consts(jaxpr)
    rows = _listing(opened.invars, opened.constvars, opened.eqns, opened.outvars, rules)
    return f"program#{digest((*rows, *map(text_of, consts)))}"


def _nested_without_rules(jaxpr: Any) -> str:
    """Return the text of a nested program without the rules of custom functions.

    The derivative rule of a function often calls the function itself. Such a call in a call counts
    as one call: whether the inner one is kept depends on the derivatives around.
    """
    while (inner := _only_custom_call(jaxpr)) is not None:
        jaxpr = inner
    return _nested(jaxpr, rules=False)


def _only_custom_call(jaxpr: Any) -> Any:
    """Return the program of the custom function that is all that a program calls; else None."""
    opened = jaxpr_and_consts(jaxpr)[0]
    for eqn in opened.eqns if len(opened.eqns) == 1 else ():
        same = eqn.invars == [*opened.constvars, *opened.invars] and eqn.outvars == opened.outvars
        if same and not RULE_PARAMS.isdisjoint(eqn.params):
            return eqn.params["call_jaxpr"]
    return None


def _without_rules(x: Any) -> str:
    """Return the text of a parameter without the rules of custom functions in its programs."""
    if type(x) is tuple and any(map(is_jaxpr, x)):
        return f"({', '.join(map(_without_rules, x))})"
    return cached_text(x, _nested_without_rules) if is_jaxpr(x) else text_of(x)


def _several(values: Iterable[Any], outer: _Outer) -> str:
    """Return the texts of values, in order."""
    return ", ".join([text_of(v, outer) for v in values])


def _pairs(values: Mapping[Any, Any], outer: _Outer) -> str:
    """Return the text of a dict, as sorted `key=value`."""
    pairs = ((k if type(k) is str else text_of(k, outer), v) for k, v in values.items())
    return ", ".join(sorted(f"{k}={text_of(v, outer)}" for k, v in pairs))
