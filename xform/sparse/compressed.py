"""Sparse Jacobians and Hessians: prepared once, then computed from few products at each point.

The preparation finds the elements that may be nonzero, and colours the columns or rows. Columns of
one colour are computed together, by one product with a vector. The preparation depends on the types
of the arguments only, and is cached. A call computes the products and reads the elements from them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import sparse as jax_sparse
from scipy import sparse

from xform._jax import Tracer, jit
from xform.errors import NotDifferentiable, WrongArgument, WrongDtype
from xform.introspection.argnums import positions
from xform.introspection.callables import definition_site, function_name
from xform.program.arrays import replicated
from xform.program.ir import gather
from xform.sparse.coloring import Coloring, color_hessian, color_jacobian
from xform.sparse.detection import derivative_matrix, not_sparse
from xform.sparse.forest import solve_forest
from xform.sparse.pattern import Pattern, pattern_of
from xform.storage.bounded_cache import BoundedCache
from xform.terminal.notebook import Result
from xform.transforms.forward import jvp
from xform.transforms.function import bind_others
from xform.transforms.reverse import grad, immediate_vjp


@dataclasses.dataclass(frozen=True, repr=False)
class PatternAndColoring(Result):
    """The pattern and the colouring of a matrix, for some argument types.

    Attributes:
      pattern: the elements that may be nonzero, a `Pattern`.
      coloring: the products with vectors that the elements are read from, a `Coloring`.
    """

    pattern: Pattern
    coloring: Coloring

    def __str__(self) -> str:
        return f"{str(self.pattern).splitlines()[0]}; {self.coloring}"


@dataclasses.dataclass(frozen=True, eq=False)
class SparseMatrixFunction:
    """A function that returns a sparse Jacobian or Hessian.

    `xform.sparse.jacobian` and `xform.sparse.hessian` return it. Call it with the arguments of the
    differentiated function. The pattern and the colouring depend on the types of the arguments
    only, and are computed once for all arguments of the same types. So the function works under
    `jit` and `vmap`. `prepare` computes the pattern and the colouring in advance.
    """

    _f: Callable[..., Any]
    _argnums: int | Sequence[int]
    _of: Literal["jacobian", "hessian"]
    _pattern: Any
    _coloring: str
    _order: str
    _chunk: int | None
    _format: str
    _cache: dict[Hashable, Any] = dataclasses.field(default_factory=BoundedCache, repr=False)

    def prepare(self, *args: Any, **kwargs: Any) -> PatternAndColoring:
        """Compute the pattern and the colouring for the types of these arguments.

        Args:
          *args: arguments of the function, as arrays or `jax.ShapeDtypeStruct`s.
          **kwargs: keyword arguments of the function, which are not differentiated.

        Returns:
          A `PatternAndColoring`, with `pattern` and `coloring`.
        """
        return self._prepared(args, kwargs)[0]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the sparse matrix at these arguments."""
        prepared, run, call = self._prepared(args, kwargs)
        pattern = prepared.pattern
        data, indices = run(call.traced)
        if self._format == "scipy":
            if isinstance(data, Tracer):
                raise WrongArgument(
                    f"{self._request} with format='scipy'",
                    "its values are tracers, which a SciPy array cannot hold",
                    definition_site(self._f),
                    "use the default format, 'bcoo', under jit, vmap and other transforms",
                )
            positions = (pattern.rows, pattern.cols)
            return sparse.csr_array((np.asarray(data), positions), shape=pattern.shape)
        return jax_sparse.BCOO(
            (data, indices), shape=pattern.shape, indices_sorted=True, unique_indices=True
        )

    @property
    def _request(self) -> str:
        """What the user asked for, for error messages."""
        return f"sparse.{self._of} of {function_name(self._f)}"

    def _prepared(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[PatternAndColoring, Callable[..., Any], SplitArguments]:
        """Return the pattern and colouring, the compiled function, and the split arguments."""
        call = SplitArguments.of(args, kwargs)
        if (key := call.key(self._request)) not in self._cache:
            prepared = self._prepare(call)
            self._cache[key] = prepared, self._compile(prepared, call)
        prepared, run = self._cache[key]
        return prepared, run, call

    def _prepare(self, call: SplitArguments) -> PatternAndColoring:
        """Compute the pattern and the colouring, and check the types and the given pattern."""
        request, (args, kwargs) = self._request, call.rebuild(call.traced)
        where = positions(self._argnums, len(args), f"sparse.{self._of}")
        for x in jax.tree.leaves([args[i] for i in where]):
            _check_real(getattr(x, "dtype", jnp.result_type(x)), request, "an input")
        f = lambda *args: self._f(*args[:-1], **args[-1])
        f.__name__ = function_name(self._f)
        matrix = derivative_matrix(f, (*args, kwargs), where, self._of, f"sparse.{self._of}")
        for aval in matrix.program.out_avals:
            _check_real(aval.dtype, request, "an output")
        m, n = matrix.shape
        if self._pattern is None:
            pattern = matrix.pattern()
            if pattern.nonzeros == m * n and min(m, n) > 1:
                raise not_sparse(request, f"all of its {m} x {n} elements may be nonzero")
        else:
            pattern = dataclasses.replace(pattern_of(self._pattern, request), name=matrix.name)
            if pattern.shape != (m, n):
                raise WrongArgument(
                    f"{request} with a pattern of shape {pattern.shape}",
                    f"the matrix has shape {(m, n)}",
                    "",
                    "give a pattern with one row per output element and one column per input "
                    "element",
                )
        if self._of == "hessian":
            _check_symmetric(pattern, request)
            return PatternAndColoring(pattern, color_hessian(pattern, self._coloring, self._order))
        forward = self._coloring != "auto" or self._has_forward_mode(call)
        return PatternAndColoring(
            pattern, color_jacobian(pattern, self._coloring, self._order, forward)
        )

    def _has_forward_mode(self, call: SplitArguments) -> bool:
        """Return whether the function has forward mode. A function with a `custom_vjp` has none."""

        def push(traced: list[Any]) -> Any:
            g, x = self._flat_function(call, traced)
            return jvp(g, (x,), (x,))[1]

        try:
            jax.eval_shape(push, call.traced)
        except NotDifferentiable:
            return False
        return True

    def _compile(self, prepared: PatternAndColoring, call: SplitArguments) -> Callable[..., Any]:
        """Return a function from the traced leaves to the values and indices of the nonzeros.

        The jitted part takes arrays of indices as arguments. As constants they would be part of the
        compiled code.
        """
        pattern, coloring = prepared.pattern, prepared.coloring
        indices = np.stack([pattern.rows, pattern.cols], 1)
        x, y = jax.eval_shape(lambda traced: self._input_and_output(call, traced), call.traced)
        with jax.ensure_compile_time_eval():  # put them on the device once, even inside a trace
            indices = jnp.asarray(indices.astype(np.int32))
            arrays = (jnp.asarray(coloring.product_indices.astype(np.int32)),
                      _color_vectors(coloring.columns, coloring.pushes, x.dtype),
                      _color_vectors(coloring.rows, coloring.pulls, y.dtype))  # fmt: skip
        run = jit(lambda arrays, traced: self._values(prepared, arrays, call, traced))
        return lambda traced: (run(arrays, traced), indices)

    def _input_and_output(self, call: SplitArguments, traced: list[Any]) -> tuple[Any, Any]:
        """Return the input and the output of the flat function."""
        g, x = self._flat_function(call, traced)
        return x, g(x)

    def _flat_function(
        self, call: SplitArguments, traced: list[Any]
    ) -> tuple[Callable[[Any], Any], Any]:
        """Return the function to differentiate, as a function of one flat vector, and the vector.

        For a Hessian, this function is the gradient.
        """
        args, kwargs = call.rebuild(traced)
        where = positions(self._argnums, len(args), self._request)
        f, primals = bind_others(self._f, where, args, kwargs)
        if self._of == "hessian":
            f = grad(f, tuple(range(len(primals))))
        return lambda x: _flatten(f(*_unflatten(x, primals))), _flatten(primals)

    def _values(
        self, prepared: PatternAndColoring, arrays: Any, call: SplitArguments, traced: list[Any]
    ) -> Any:
        """Return the values of the nonzeros, in the order of the pattern."""
        product_indices, column_vectors, row_vectors = arrays
        coloring, (g, x) = prepared.coloring, self._flat_function(call, traced)
        products: list[Any] = []
        if coloring.pushes:
            products.append(self._products(lambda v: jvp(g, (x,), (v,))[1], column_vectors))
        if coloring.pulls:
            pull = immediate_vjp(g, x)[1]
            products.append(self._products(lambda v: pull(v)[0], row_vectors))
        if not products:
            return jnp.zeros(0, jax.eval_shape(g, x).dtype)
        flat = jnp.concatenate([jnp.ravel(replicated(p)) for p in products])
        if coloring.trees is not None:
            return solve_forest(coloring.trees, flat, product_indices)
        return flat.at[product_indices].get(mode="promise_in_bounds") if flat.size else flat

    def _products(self, multiply: Callable[[Any], Any], vectors: Any) -> Any:
        """Return the products with all vectors, `chunk` of them at a time."""
        if self._chunk is None or self._chunk >= len(vectors):
            return jax.vmap(multiply)(vectors)
        return jax.lax.map(multiply, vectors, batch_size=self._chunk)


def _color_vectors(colors: np.ndarray, count: int, dtype: Any) -> Any:
    """Return the sum of the unit vectors of each colour's columns (or rows), `[colours, n]`."""
    return jnp.asarray(colors == np.arange(count)[:, None], dtype)


@dataclasses.dataclass(frozen=True, eq=False)
class SplitArguments:
    """Arguments of a call, split into traced leaves (arrays, floats, complex) and static leaves.

    Attributes:
      tree: the pytree structure of the positional and keyword arguments.
      is_traced: for each leaf, whether it is traced.
      traced: the traced leaves.
      static: the other leaves.
    """

    tree: Any
    is_traced: tuple[bool, ...]
    traced: list[Any]
    static: list[Any]

    @staticmethod
    def of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> SplitArguments:
        """Split the arguments of a call."""
        leaves, tree = jax.tree.flatten((args, kwargs))
        is_traced = tuple(hasattr(x, "dtype") or isinstance(x, float | complex) for x in leaves)
        static = gather(leaves, tuple(not traced for traced in is_traced))
        return SplitArguments(tree, is_traced, gather(leaves, is_traced), static)

    def rebuild(self, traced: list[Any]) -> Any:
        """Return the positional and keyword arguments, with the traced leaves replaced."""
        dynamic, static = iter(traced), iter(self.static)
        leaves = [next(dynamic if is_traced else static) for is_traced in self.is_traced]
        return jax.tree.unflatten(self.tree, leaves)

    def key(self, request: str) -> Hashable:
        """Return the key of the cache: types of traced leaves, and values of static leaves.

        `request` is what the user asked for, for the error message.
        """
        types = [(tuple(np.shape(x)), getattr(x, "dtype", type(x)), getattr(x, "weak_type", False))
                 for x in self.traced]  # fmt: skip
        key = self.tree, self.is_traced, tuple(types), tuple((type(x), x) for x in self.static)
        try:
            hash(key)
        except TypeError:
            raise WrongArgument(
                request,
                "an argument is not an array, and cannot be hashed",
                "",
                "bind it with functools.partial",
            ) from None
        return key


def _check_real(dtype: Any, request: str, what: str) -> None:
    if not jnp.issubdtype(dtype, np.floating):
        raise WrongDtype(
            request,
            f"{what} has dtype {dtype}",
            "",
            "use floating-point inputs and outputs; split complex ones into real and imaginary "
            "parts",
        )


def _check_symmetric(pattern: Pattern, request: str) -> None:
    matrix = pattern.scipy()
    if (matrix != matrix.T).nnz:
        raise WrongArgument(
            f"{request} with a pattern that is not symmetric",
            "a Hessian is symmetric",
            "",
            "include (j, i) in the pattern for each (i, j)",
        )


def _flatten(tree: Any) -> Any:
    """Return all elements of a tree, leaf by leaf, as one vector."""
    leaves = [jnp.ravel(x) for x in jax.tree.leaves(tree)]
    if len(leaves) == 1:
        return leaves[0]
    return jnp.concatenate(list(map(replicated, leaves))) if leaves else jnp.zeros(0)


def _unflatten(x: Any, like: Any) -> Any:
    """Return the inverse of `_flatten`: a tree with the shapes and dtypes of `like`."""
    leaves, tree = jax.tree.flatten(like)
    parts = jnp.split(x, np.cumsum([np.size(leaf) for leaf in leaves])[:-1])
    return jax.tree.unflatten(tree, [p.reshape(np.shape(leaf)).astype(jnp.result_type(leaf))
                                     for p, leaf in zip(parts, leaves, strict=True)])  # fmt: skip
