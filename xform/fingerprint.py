"""What a program is, as text that is equal for equal programs only.

Compilers' answers, plans on disk, equal blocks and equal equations are all found by it. A
fingerprint covers the primitive of each equation, every parameter, the context that it was traced
in, the type of every value (sharding, memory space, weak type and varying axes among it), and
constants by their content. Line numbers and names of variables are not part of it.

Plain values, and what is made of them, have the same text in every process. What cannot be said
with certainty is equal to nothing but itself: it has a number, in this process alone.
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
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from xform._jax import (
    JaxprEqn,
    Literal,
    Primitive,
    ShapedArray,
    Tracer,
    behind,
    closed,
    context,
    is_jaxpr,
    is_silent,
    named,
)
from xform.ir import Atom, Program
from xform.naming import digest, from_library, is_importable, itself, name_of, once, primitive_name

# `id`s of the objects that are being said, outermost first: one may hold itself.
_Outer = tuple[int, ...]

_PLAIN = frozenset((bool, int, float, complex, str, bytes, type(None), type(...), range))
# What makes an object of its class alone.
_NEW: Any = (copyreg.__newobj__, copyreg.__newobj_ex__)  # pyright: ignore[reportAttributeAccessIssue]
# Bytes of an object that has attributes at most.
_BARE = object.__basicsize__ + 16


def fingerprint(prog: Program) -> str:
    """A text that other programs do not have. Linear in equations; made once for a program."""
    if "fingerprint" not in prog.cache:
        consts = (text_of(x) for _, x in prog.consts)
        prog.cache["fingerprint"] = digest((*listing(prog), *consts))
    return prog.cache["fingerprint"]


def listing(prog: Program) -> tuple[str, ...]:
    """The equations of a program as lines, then its inputs, constants and outputs; kept with it.

    Constants are there by type, as inputs are.
    """
    if "listing" not in prog.cache:
        consts = [v for v, _ in prog.consts]
        rows = _listing(prog.inputs, consts, prog.equations, prog.outputs)
        prog.cache["listing"] = tuple(rows)
    return prog.cache["listing"]


def _listing(inputs: Sequence[Any], consts: Sequence[Any], equations: Sequence[JaxprEqn],
             outputs: Sequence[Atom]) -> Iterator[str]:  # fmt: skip
    variables = dict.fromkeys((*inputs, *consts))
    names = {v: f"i{n}" for n, v in enumerate(variables)}
    yield from lines(equations, names)
    yield " ".join(("inputs", *(f"{names[v]}:{typed(v.aval)}" for v in inputs)))
    yield " ".join(("constants", *(f"{names[v]}:{typed(v.aval)}" for v in consts)))
    yield " ".join(("outputs", *(_atom(v, names) for v in outputs)))


def lines(equations: Iterable[JaxprEqn], names: dict[Any, str]) -> Iterator[str]:
    """Equations as text, one line for each; variables are named in the order in which they come.

    What is in `names` has a name already, and a type; what is made is added to them.
    """
    for eqn in equations:
        reads = [_atom(v, names) for v in eqn.invars]
        for v in eqn.outvars:
            names[v] = f"v{len(names)}"
        yield f"{operation(eqn)} {' '.join(reads)}"


def _atom(v: Atom, names: dict[Any, str]) -> str:
    if isinstance(v, Literal):
        return literal(v)
    if v not in names:  # made outside
        names[v] = f"v{len(names)}"
        return f"{names[v]}:{typed(v.aval)}"
    return names[v]


def operation(eqn: JaxprEqn) -> str:
    """What an equation does, to whatever inputs: primitive, parameters, types of outputs."""
    outputs = " ".join([typed(v.aval) for v in eqn.outvars])
    return f"{outputs} = {primitive_name(eqn.primitive)}[{parameters(eqn)}]"


def literal(v: Literal) -> str:
    """A literal as text, with its type. By its bits: -0.0 == 0.0, and NaN != NaN."""
    plain = isinstance(getattr(v.aval, "dtype", None), np.dtype)
    value = np.asarray(v.val) if plain else v.val
    return f"{(_number(value) if plain else '') or text_of(value)}:{typed(v.aval)}"


def parameters(eqn: JaxprEqn) -> str:
    """The parameters of an equation, and the context that it was traced in, as text.

    Of JAX's primitives None is what a parameter is that was not given, and it is left out: versions
    of JAX, and ways to bind a primitive, differ in which of those they write down. What it means to
    another primitive that a parameter is not there, nobody knows.
    """
    sparse = named(eqn.primitive.name) is eqn.primitive
    params = sorted(eqn.params.items())
    texts = [f"{k}={text_of(v)}" for k, v in params if v is not None or not sparse]
    where = once(eqn.ctx, _context)
    if where and _on_its_mesh(eqn):
        where = _context(eqn.ctx, mesh=False)
    return ", ".join([*texts, where] if where else texts)


def _on_its_mesh(eqn: JaxprEqn) -> bool:
    """Whether a type says in which mesh the equation is: the context may say so too, or not.

    Which it does depends on who traced a function of JAX first, as JAX keeps what it traced.
    """
    mesh = getattr(eqn.ctx, "cur_abstract_mesh", None)
    types = (v.aval for v in (*eqn.outvars, *eqn.invars))
    return any(getattr(getattr(t, "sharding", None), "mesh", None) == mesh for t in types)


def _context(ctx: Any, mesh: bool = True) -> str:
    unusual = {k: v for k, v in context(ctx).items() if mesh or k != "cur_abstract_mesh"}
    return f"in {_pairs(unusual, ())}" if unusual else ""


def typed(aval: Any) -> str:
    """The type of a value as text."""
    return once(aval, _typed)


def _typed(aval: Any) -> str:
    if type(aval) is not ShapedArray:
        return _remade(aval, (id(aval),))
    # What is as it is for a value of no mesh, in the device's memory, is left out.
    usual = ShapedArray(aval.shape, aval.dtype).__getnewargs_ex__()[1]
    more = {k: v for k, v in aval.__getnewargs_ex__()[1].items() if v != usual[k]}
    dims = ",".join(str(n) if type(n) is int else text_of(n) for n in aval.shape)
    name = f"{'~' if aval.weak_type else ''}{_dtype(aval.dtype)}[{dims}]"
    return f"{name}{{{_pairs(more, ())}}}" if more else name


def text_of(x: Any, outer: _Outer = ()) -> str:
    """A value as text that no other value has; its type is part of it: 1, 1.0 and True differ.

    An equal value of another process has the same text if it is plain data, or made of it: arrays,
    enums, dataclasses, functions by their code and what they close over, programs, JAX's own types.
    """
    kind = type(x)
    if kind in _PLAIN:
        return repr(x)
    if kind is tuple:
        inner = ", ".join([text_of(v, outer) for v in x])
        return f"({inner},)" if len(x) == 1 else f"({inner})"
    if isinstance(x, np.dtype):
        return f"dtype {_dtype(x)}"
    if is_jaxpr(x):
        return once(x, _nested)
    if id(x) in outer:
        return f"<what is {len(outer) - outer.index(id(x))} levels up>"
    return _held(x, (*outer, id(x)))


def _held(x: Any, outer: _Outer) -> str:
    """A value that may hold others."""
    kind = type(x)
    if isinstance(x, np.ndarray | np.generic):
        return _array(x, outer)
    if isinstance(x, jax.Array):
        return itself(x) if isinstance(x, Tracer) else once(x, _device_array)
    if isinstance(x, enum.Enum):
        return f"{name_of(kind)}.{x.name}" if x.name else f"{name_of(kind)}({x.value!r})"
    if isinstance(x, Primitive):
        return primitive_name(x)
    if kind is ShapedArray:
        return typed(x)
    if isinstance(x, jax.Device):
        return f"<{x.platform} {x.device_kind!r} {x.id} of process {x.process_index}>"
    if isinstance(x, NamedSharding | Mesh | AbstractMesh):
        return once(x, _placed)
    if isinstance(x, type | types.ModuleType):
        return name_of(x)
    if is_silent(x):
        return name_of(kind)
    if (rule := _behind(x)) is not x:
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
    """A function: its name, its code, and what it holds.

    Of one that is not found by its name, such as a lambda, the globals that it reads are part.
    """
    if isinstance(x, types.MethodType):
        return f"method({text_of(x.__self__, outer)}, {text_of(x.__func__, outer)})"
    if isinstance(x, functools.partial):
        arguments = f"({_several(x.args, outer)}), {{{_pairs(x.keywords, outer)}}}"
        return f"{name_of(type(x))}({text_of(x.func, outer)}, {arguments})"
    known = is_importable(x)
    if known and (from_library(x) or not isinstance(x, types.FunctionType)):
        return name_of(x)
    if not isinstance(x, types.FunctionType):
        return _object(x, outer)
    cells = [_content(c) for c in x.__closure__ or ()]
    reads = () if known or from_library(x) else _reads(x.__code__)
    read = {k: x.__globals__[k] for k in reads if k in x.__globals__}
    holds = text_of((x.__defaults__, x.__kwdefaults__, cells), outer), _pairs(read, outer)
    return f"{x.__module__}.{x.__qualname__}#{digest((once(x.__code__, _code), *holds))}"


def _behind(x: Any) -> Any:
    """What a function stands for, however often it was wrapped."""
    while (inner := behind(x)) is not x:
        x = inner
    return x


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not yet filled
        return ...


def _code(code: types.CodeType) -> str:
    """What a code object does: where its lines stand is no part of it."""
    consts = [
        once(c, _code) if isinstance(c, types.CodeType) else text_of(c) for c in code.co_consts
    ]
    names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
    counts = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags
    table = getattr(code, "co_exceptiontable", b"")
    return digest((repr(code.co_code), *consts, repr(names), repr(counts), repr(table)))


def _reads(code: types.CodeType) -> set[str]:
    """Names that a code object, or one in it, may read from its module."""
    inner = (_reads(c) for c in code.co_consts if isinstance(c, types.CodeType))
    return {*code.co_names}.union(*inner)


def _object(x: Any, outer: _Outer) -> str:
    """An object of a class: what it would be made of again, if its class says when two are equal.

    Parameters of JAX's own classes are immutable: those are what they are made of.
    """
    kind = type(x)
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        return f"{name_of(kind)}({_several(x, outer)})"
    if dataclasses.is_dataclass(x):
        fields = {f.name: getattr(x, f.name) for f in dataclasses.fields(x) if hasattr(x, f.name)}
        return f"{name_of(kind)}({_pairs(fields, outer)})"
    return _remade(x, outer)


def _remade(x: Any, outer: _Outer) -> str:
    kind = type(x)
    if kind.__eq__ is object.__eq__ and kind.__module__.partition(".")[0] != "jax":
        return itself(x)
    try:
        reduction = x.__reduce_ex__(4)
    except Exception:  # whatever the class raises: it does not say
        return itself(x)
    if not isinstance(reduction, tuple):
        return itself(x)
    make, args, *more = reduction
    parts = [_part(kind, x) for x in more if x is not None]
    if make in _NEW:
        # No state of a class that has some: it is kept where copies do not look.
        slots = any(vars(c).get("__slots__") for c in kind.__mro__)
        if len(args) == 1 and not parts and (slots or kind.__basicsize__ > _BARE):
            return itself(x)
        args = args[1:]
    else:
        args = make, args
    return f"{name_of(kind)}({_several((*args, *parts), outer)})"


def _part(kind: type, x: Any) -> Any:
    """What an object is made of besides arguments: its attributes, say, but those it works out."""
    if isinstance(x, Iterator):
        return list(x)
    if not isinstance(x, dict):
        return x
    worked_out = functools.cached_property
    return {k: v for k, v in x.items() if not isinstance(getattr(kind, str(k), None), worked_out)}


def _array(x: Any, outer: _Outer = ()) -> str:
    """An array of NumPy by its content."""
    if x.dtype.hasobject:
        return f"array({x.shape}, {text_of(x.tolist(), outer)})"
    kind = f"{type(x).__name__} {_dtype(x.dtype)}"
    if number := _number(x):
        return f"{kind}({number})"
    return f"{kind}[{','.join(map(str, x.shape))}]#{digest([x.tobytes()])}"


def _number(x: Any) -> str:
    """An array that is one number; nothing for others, and for NaN, of which there are many."""
    value = x.item() if x.ndim == 0 else None
    return repr(value) if isinstance(value, int | float) and value == value else ""


def _placed(x: Any) -> str:
    """A mesh, or a sharding over one, in short."""
    mesh, kind = getattr(x, "mesh", x), type(x).__name__
    ways = zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
    axes = ", ".join(f"{name}={size} {way.name}" for name, size, way in ways)
    spec = f"{text_of(x.spec.partitions)} on " if isinstance(x, NamedSharding) else ""
    return f"{kind}({spec}{axes})#{digest([_remade(x, (id(x),))])[:16]}"


def _device_array(x: jax.Array) -> str:
    """An array of JAX by its content and where it lies; itself if that cannot be read here."""
    try:
        with jax.ensure_compile_time_eval():
            keys = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
            value = np.asarray(jax.random.key_data(x) if keys else x)
    except (RuntimeError, TypeError):  # deleted, or on the devices of several processes
        return itself(x)
    return f"{typed(jax.typeof(x))}:{_array(value)} on {text_of(x.sharding)}"


def _dtype(dtype: Any) -> str:
    if not isinstance(dtype, np.dtype):
        return text_of(dtype)
    plain = dtype.fields is None and dtype.isnative
    return dtype.name if plain else f"{dtype.str}{dtype.descr}"


def _nested(jaxpr: Any) -> str:
    """A program within an equation."""
    opened, consts = closed(jaxpr)
    rows = _listing(opened.invars, opened.constvars, opened.eqns, opened.outvars)
    return f"program#{digest((*rows, *map(text_of, consts)))}"


def _several(values: Iterable[Any], outer: _Outer) -> str:
    return ", ".join([text_of(v, outer) for v in values])


def _pairs(values: Mapping[Any, Any], outer: _Outer) -> str:
    pairs = ((k if type(k) is str else text_of(k, outer), v) for k, v in values.items())
    return ", ".join(sorted(f"{k}={text_of(v, outer)}" for k, v in pairs))
