"""A sparse matrix of derivatives at a point: prepared once, then computed from few products."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import sparse as jax_sparse
from scipy import sparse

from xform._jax import Tracer
from xform.callables import function_name, written
from xform.errors import NotDifferentiable, WrongArgument, WrongDtype
from xform.ir import gather
from xform.recent import Recent
from xform.sparse.coloring import Coloring, color_hessian, color_jacobian
from xform.sparse.forest import solved
from xform.sparse.pattern import Pattern, pattern_of
from xform.sparse.sparsity import dense, subject
from xform.transforms.forward import jvp
from xform.transforms.function import partial, positions
from xform.transforms.reverse import grad, vjp


@dataclasses.dataclass(frozen=True)
class Prepared:
    """What is found once for the types of some arguments.

    Attributes:
      pattern: which elements may differ from zero.
      coloring: which products they are read from.
    """

    pattern: Pattern
    coloring: Coloring

    def __str__(self) -> str:
        return f"{str(self.pattern).splitlines()[0]}; {self.coloring}"


@dataclasses.dataclass(frozen=True, eq=False)
class Sparse:
    """A function that returns a sparse Jacobian or Hessian; `prepare` finds its pattern before.

    It may be called under `jit` and `vmap`: it is prepared from types alone, once for each.
    """

    _f: Callable[..., Any]
    _argnums: int | Sequence[int]
    _of: Literal["jacobian", "hessian"]
    _pattern: Any
    _coloring: str
    _order: str
    _chunk: int | None
    _format: str
    _found: dict[Hashable, Any] = dataclasses.field(default_factory=Recent, repr=False)

    def prepare(self, *args: Any, **kwargs: Any) -> Prepared:
        """The pattern and the colours for the types of these arguments.

        Args:
          *args: those of the function, as arrays or `jax.ShapeDtypeStruct`s.
          **kwargs: likewise; held constant.

        Returns:
          A `Prepared`, with `pattern` and `coloring`.
        """
        return self._prepared(args, kwargs)[0]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The matrix at a point."""
        prepared, run, call = self._prepared(args, kwargs)
        pattern = prepared.pattern
        data, indices = run(call.moving)
        if self._format == "scipy":
            if isinstance(data, Tracer):
                raise WrongArgument(
                    f"{self._asked} with format='scipy'",
                    "its values are traced, and SciPy's arrays hold numbers",
                    written(self._f),
                    "leave format out under jit, vmap and the like",
                )
            at = (pattern.rows, pattern.cols)
            return sparse.csr_array((np.asarray(data), at), shape=pattern.shape)
        return jax_sparse.BCOO(
            (data, indices), shape=pattern.shape, indices_sorted=True, unique_indices=True
        )

    @property
    def _asked(self) -> str:
        return f"sparse_{self._of} of {function_name(self._f)}"

    def _prepared(self, args: tuple[Any, ...], kwargs: dict[str, Any]):
        call = Call.of(args, kwargs)
        if (key := call.key(self._asked)) not in self._found:
            prepared = self._prepare(call)
            self._found[key] = prepared, self._runner(prepared, call)
        prepared, run = self._found[key]
        return prepared, run, call

    def _prepare(self, call: Call) -> Prepared:
        asked, (args, kwargs) = self._asked, call.rebuilt(call.moving)
        where = positions(self._argnums, len(args), f"sparse_{self._of}")
        for x in jax.tree.leaves([args[i] for i in where]):
            _check_real(getattr(x, "dtype", jnp.result_type(x)), asked, "an input")
        f = lambda *args: self._f(*args[:-1], **args[-1])
        f.__name__ = function_name(self._f)
        of = subject(f, (*args, kwargs), where, self._of, f"sparse_{self._of}")
        for aval in of.program.out_avals:
            _check_real(aval.dtype, asked, "an output")
        m, n = of.shape
        if self._pattern is None:
            pattern = of.pattern()
            if pattern.nonzeros == m * n and min(m, n) > 1:
                raise dense(asked, f"all of its {m} x {n} elements may differ from zero")
        else:
            pattern = dataclasses.replace(pattern_of(self._pattern, asked), name=of.name)
            if pattern.shape != (m, n):
                raise WrongArgument(
                    f"{asked} with a pattern of shape {pattern.shape}",
                    f"the matrix has shape {(m, n)}",
                    "",
                    "give a row for each element of the output, a column for each of the input",
                )
        if self._of == "hessian":
            _check_symmetric(pattern, asked)
            return Prepared(pattern, color_hessian(pattern, self._coloring, self._order))
        forward = self._coloring != "auto" or self._pushes(call)
        return Prepared(pattern, color_jacobian(pattern, self._coloring, self._order, forward))

    def _pushes(self, call: Call) -> bool:
        """Whether there is a forward mode: what has only a `custom_vjp` has none."""

        def push(moving: list[Any]) -> Any:
            g, x, _ = self._flattened(call, moving)
            return jvp(g, (x,), (x,))[1]

        try:
            jax.eval_shape(push, call.moving)
        except NotDifferentiable:
            return False
        return True

    def _runner(self, prepared: Prepared, call: Call) -> Callable[..., Any]:
        """Values and indices. What is known of them goes in as arguments, not into the code."""
        pattern, coloring = prepared.pattern, prepared.coloring
        indices = np.stack([pattern.rows, pattern.cols], 1)
        x, y = jax.eval_shape(lambda moving: self._ends(call, moving), call.moving)
        with jax.ensure_compile_time_eval():  # on the device once, though something is traced now
            indices, places = (jnp.asarray(a.astype(np.int32)) for a in (indices, coloring.places))
            known = (places, _seeds(coloring.columns, coloring.pushes, x.dtype),
                     _seeds(coloring.rows, coloring.pulls, y.dtype))  # fmt: skip
        run = jax.jit(lambda known, moving: self._values(prepared, known, call, moving))
        return lambda moving: (run(known, moving), indices)

    def _ends(self, call: Call, moving: list[Any]) -> tuple[Any, Any]:
        g, x, _ = self._flattened(call, moving)
        return x, g(x)

    def _flattened(self, call: Call, moving: list[Any]):
        """What is differentiated as a function of one vector to one, the vector, and its tree."""
        args, kwargs = call.rebuilt(moving)
        where = positions(self._argnums, len(args), self._asked)
        f, primals = partial(self._f, where, args, kwargs)
        if self._of == "hessian":
            f = grad(f, tuple(range(len(primals))))
        return lambda x: _flat(f(*_shaped(x, primals))), _flat(primals), primals

    def _values(self, prepared: Prepared, known: Any, call: Call, moving: list[Any]) -> Any:
        """The elements of the pattern, in its order."""
        places, columns, rows = known
        coloring, (g, x, _) = prepared.coloring, self._flattened(call, moving)
        products = [jnp.zeros(0, jax.eval_shape(g, x).dtype)]
        if coloring.pushes:
            products.append(self._products(lambda v: jvp(g, (x,), (v,))[1], columns))
        if coloring.pulls:
            pull = vjp(g, x)[1]
            products.append(self._products(lambda v: pull(v)[0], rows))
        flat = jnp.concatenate([jnp.ravel(p) for p in products])
        if coloring.trees is not None:
            return solved(coloring.trees, flat, places)
        return flat.at[places].get(mode="promise_in_bounds") if flat.size else flat

    def _products(self, of: Callable[[Any], Any], seeds: Any) -> Any:
        """Products with the seeds, so many at once."""
        if self._chunk is None or self._chunk >= len(seeds):
            return jax.vmap(of)(seeds)
        return jax.lax.map(of, seeds, batch_size=self._chunk)


def _seeds(colors: np.ndarray, count: int, dtype: Any) -> Any:
    """For each colour the sum of its basis vectors, `[colours, n]`."""
    return jnp.asarray(colors == np.arange(count)[:, None], dtype)


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """Arguments: what is traced (arrays, and numbers that are no integers), and what is held."""

    tree: Any
    moves: tuple[bool, ...]
    moving: list[Any]
    held: list[Any]

    @staticmethod
    def of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """What a function is called with."""
        leaves, tree = jax.tree.flatten((args, kwargs))
        moves = tuple(hasattr(x, "dtype") or isinstance(x, float | complex) for x in leaves)
        held = gather(leaves, tuple(not on for on in moves))
        return Call(tree, moves, gather(leaves, moves), held)

    def rebuilt(self, moving: list[Any]) -> Any:
        """Arguments and keyword arguments, with other arrays."""
        one, other = iter(moving), iter(self.held)
        return jax.tree.unflatten(self.tree, [next(one if on else other) for on in self.moves])

    def key(self, asked: str) -> Hashable:
        """What a preparation holds for."""
        types = [(tuple(np.shape(x)), getattr(x, "dtype", type(x)), getattr(x, "weak_type", False))
                 for x in self.moving]  # fmt: skip
        key = self.tree, self.moves, tuple(types), tuple((type(x), x) for x in self.held)
        try:
            hash(key)
        except TypeError:
            raise WrongArgument(
                asked,
                "an argument is no array, and cannot be hashed",
                "",
                "bind it with functools.partial",
            ) from None
        return key


def _check_real(dtype: Any, asked: str, what: str) -> None:
    if not jnp.issubdtype(dtype, np.floating):
        raise WrongDtype(
            asked,
            f"{what} has dtype {dtype}",
            "",
            "differentiate in floating-point arguments; of complex ones take real and imaginary "
            "parts as arguments",
        )


def _check_symmetric(pattern: Pattern, asked: str) -> None:
    matrix = pattern.scipy()
    if (matrix != matrix.T).nnz:
        raise WrongArgument(
            f"{asked} with a pattern that is not symmetric",
            "a Hessian is",
            "",
            "give both places of each element",
        )


def _flat(tree: Any) -> Any:
    """All elements of a tree, leaf by leaf, as one array."""
    leaves = [jnp.ravel(x) for x in jax.tree.leaves(tree)]
    return jnp.concatenate(leaves) if leaves else jnp.zeros(0)


def _shaped(x: Any, like: Any) -> Any:
    """The inverse of `_flat`."""
    leaves, tree = jax.tree.flatten(like)
    parts = jnp.split(x, np.cumsum([np.size(leaf) for leaf in leaves])[:-1])
    return jax.tree.unflatten(tree, [p.reshape(np.shape(leaf)).astype(jnp.result_type(leaf))
                                     for p, leaf in zip(parts, leaves, strict=True)])  # fmt: skip
