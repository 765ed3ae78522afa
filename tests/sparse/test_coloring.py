"""Colourings are valid by the definition, and need no more colours than are known to suffice."""

import itertools

import jax
import numpy as np
import pytest
from scipy import sparse
from scipy.sparse import csgraph

from xform.sparse import greedy, symmetric
from xform.sparse.coloring import ORDERS, color_hessian, color_jacobian
from xform.sparse.forest import solve_forest
from xform.sparse.pattern import pattern_of

RANDOM = range(12)


def banded(n: int, half: int) -> sparse.csr_array:
    """Return a band of `half` diagonals on either side."""
    offsets = range(-half, half + 1)
    diagonals = [np.ones(n - abs(k)) for k in offsets]
    return sparse.csr_array(sparse.diags_array(diagonals, offsets=offsets))


def grid(n: int) -> sparse.csr_array:
    """Return the 5-point Laplacian of an n x n grid."""
    line, one = banded(n, 1), sparse.eye_array(n)
    return sparse.csr_array(sparse.kron(line, one) + sparse.kron(one, line))


def arrow(n: int) -> sparse.csr_array:
    """Return a diagonal, a full first row and a full first column."""
    at = np.arange(n)
    rows, cols = np.concatenate([at, 0 * at, at]), np.concatenate([at, at, 0 * at])
    return sparse.csr_array((np.ones(3 * n), (rows, cols)), shape=(n, n))


def random(seed: int, symmetric: bool = False) -> np.ndarray:
    rng = np.random.default_rng(seed)
    m, n = rng.integers(1, 20, 2)
    n = m if symmetric else n
    there = rng.random((m, n)) < rng.uniform(0.05, 0.5)
    values = rng.normal(size=(m, n)) * (there | there.T if symmetric else there)
    return values + values.T if symmetric else values


def recovered(matrix: np.ndarray, pattern, coloring) -> np.ndarray:
    """Recover a matrix from its products with the sums of each colour's basis vectors."""
    by_column = [matrix @ (coloring.columns == c) for c in range(coloring.pushes)]
    by_row = [(coloring.rows == c) @ matrix for c in range(coloring.pulls)]
    products = np.concatenate([np.zeros(0), *by_column, *by_row])
    values = products[coloring.product_indices] if products.size else products
    if coloring.trees is not None:
        with jax.enable_x64(True):
            values = solve_forest(coloring.trees, products, coloring.product_indices)
    out = np.zeros(matrix.shape)
    out[pattern.rows, pattern.cols] = values
    return out


@pytest.mark.parametrize("kind", ["auto", "column", "row", "bidirectional"])
@pytest.mark.parametrize("order", ORDERS)
def test_any_matrix_is_recovered_from_its_products(kind: str, order: str) -> None:
    for seed in RANDOM:
        matrix = random(seed)
        pattern = pattern_of(matrix, "test")
        coloring = color_jacobian(pattern, kind, order)
        np.testing.assert_array_equal(recovered(matrix, pattern, coloring), matrix)
        assert coloring.evaluations == len(np.unique(coloring.entries(pattern)))


@pytest.mark.parametrize("kind", ["star", "acyclic", "column"])
@pytest.mark.parametrize("order", ["best", "smallest_last", "saturation"])
def test_any_symmetric_matrix_is_too(kind: str, order: str) -> None:
    for seed in RANDOM[:3] if kind == "acyclic" else RANDOM:  # each pattern is compiled
        matrix = random(seed, symmetric=True)
        pattern = pattern_of(matrix, "test")
        coloring = color_hessian(pattern, kind, order)
        np.testing.assert_allclose(recovered(matrix, pattern, coloring), matrix, atol=1e-12)


@pytest.mark.parametrize("order", ORDERS[1:])
def test_star_and_acyclic_colourings_satisfy_their_definitions(order: str) -> None:
    for seed in RANDOM:
        there = random(seed, symmetric=True) != 0
        np.fill_diagonal(there, False)
        graph = sparse.csr_array(there.astype(np.int32))
        vertices = greedy.orders_of_vertices(graph, order)[order]()
        assert sorted(vertices) == list(range(graph.shape[0]))
        star, acyclic = symmetric.star(graph, vertices), symmetric.acyclic(graph, vertices)
        near = greedy.neighbours(graph)
        for w in range(graph.shape[0]):
            assert all(star[v] != star[w] and acyclic[v] != acyclic[w] for v in near[w])
            for x, v in itertools.permutations(near[w], 2):
                ends = (y for y in near[x] if y not in (w, v))
                assert all(len({star[v], star[w], star[x], star[y]}) > 2 for y in ends)
        color = np.array(acyclic)
        for a, b in itertools.combinations(range(max(acyclic) + 1), 2):
            edges = np.where(color[:, None] == a, there & (color == b), False)
            trees, _ = csgraph.connected_components(sparse.csr_array(edges), directed=False)
            assert edges.sum() == len(color) - trees


def evaluations(matrix, kind: str, hessian: bool = False) -> int:
    color = color_hessian if hessian else color_jacobian
    return color(pattern_of(matrix, "test"), kind, "best").evaluations


@pytest.mark.parametrize("half", [1, 5, 10])
def test_banded_matrices_take_the_theoretical_number_of_colours(half: int) -> None:
    """Gebremedhin et al. 2009: 2 h + 1 star colours, h + 1 acyclic ones, for h diagonals a side."""
    matrix = banded(3000, half)
    assert evaluations(matrix, "auto") == 2 * half + 1
    assert evaluations(matrix, "star", True) == 2 * half + 1
    assert evaluations(matrix, "acyclic", True) == half + 1


def test_an_arrow_takes_three_products() -> None:
    assert evaluations(arrow(20_000), "auto") == 3
    assert evaluations(arrow(300), "column") == evaluations(arrow(300), "row") == 300
    assert evaluations(arrow(300), "star", True) == 2


@pytest.mark.parametrize("seed", RANDOM)
def test_saturation_colours_bipartite_graphs_with_two(seed: int) -> None:
    """Brélaz 1979, theorem 3. Each edge is a row, whose two columns get different colours."""
    rng = np.random.default_rng(seed)
    one, other = rng.integers(2, 30, 2)
    tree = [(i, one + rng.integers(other)) for i in range(one)]
    tree += [(rng.integers(one), one + j) for j in range(other)]
    ends = np.array([*tree, *((rng.integers(one), one + rng.integers(other)) for _ in range(40))])
    at = np.repeat(np.arange(len(ends)), 2)
    edges = sparse.csr_array((np.ones(ends.size, int), (at, ends.ravel())))
    shuffled = sparse.csr_array(edges[:, rng.permutation(one + other)])
    graph = sparse.csr_array(
        ((shuffled.T @ shuffled) > 0).astype(int) - sparse.eye_array(one + other, dtype=int)
    )
    graph.eliminate_zeros()
    assert max(greedy.color_columns(shuffled, greedy.saturation(graph))) == 1


def test_a_grid_takes_few() -> None:
    assert evaluations(grid(40), "auto") == 5  # the five columns of a row differ
    assert evaluations(grid(40), "star", True) <= 5
    assert evaluations(grid(40), "acyclic", True) <= 4


def test_zero_and_empty_matrices_take_no_products() -> None:
    for kind in ("auto", "column", "row", "bidirectional"):
        assert evaluations(np.zeros((3, 4)), kind) == 0
        assert evaluations(np.zeros((0, 4)), kind) == 0
    for kind in ("star", "acyclic", "column"):
        assert evaluations(np.zeros((3, 3)), kind, True) == 0
        assert evaluations(np.zeros((0, 0)), kind, True) == 0
