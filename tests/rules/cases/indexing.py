"""Reading and writing at computed places, in every mode."""

import numpy as np
from jax import lax

from xform.testing import Case

V = np.array([0.3, -0.7, 1.4, 0.9, -1.1])
M = np.sin(np.arange(20.0)).reshape(5, 4)
T = np.cos(np.arange(24.0)).reshape(2, 4, 3)
LAST = np.int32(4)
ONE = np.int32(1)
BEFORE = np.int32(-3)  # bound to a primitive, which clamps it to 0
MODES = lax.GatherScatterMode
FILL = MODES.FILL_OR_DROP
ROWS = np.array([[3], [0], [3]], np.int32)  # one of them twice
ONCE = np.array([[3], [0], [4]], np.int32)
OUT = np.array([[3], [-2], [9], [1]], np.int32)  # two of them out of bounds
UPDATES = np.cos(np.arange(16.0)).reshape(4, 4) + 1.5

TAKE_ROWS = lax.GatherDimensionNumbers(
    offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0,)
)
PUT_ROWS = lax.ScatterDimensionNumbers(
    update_window_dims=(1,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0,)
)
# Separate rows for each element of a batch.
TAKE_BATCH = lax.GatherDimensionNumbers(
    offset_dims=(2,),
    collapsed_slice_dims=(1,),
    start_index_map=(1,),
    operand_batching_dims=(0,),
    start_indices_batching_dims=(0,),
)
PUT_BATCH = lax.ScatterDimensionNumbers(
    update_window_dims=(2,),
    inserted_window_dims=(1,),
    scatter_dims_to_operand_dims=(1,),
    operand_batching_dims=(0,),
    scatter_indices_batching_dims=(0,),
)
# Windows of 2 x 3 at a row and a column: they may overlap, and extend beyond the array.
TAKE_WINDOW = lax.GatherDimensionNumbers(
    offset_dims=(1, 2), collapsed_slice_dims=(), start_index_map=(0, 1)
)
PUT_WINDOW = lax.ScatterDimensionNumbers(
    update_window_dims=(1, 2), inserted_window_dims=(), scatter_dims_to_operand_dims=(0, 1)
)
BATCH = np.array([[[3], [1]], [[0], [2]]], np.int32)
CORNERS = np.array([[0, 1], [1, 0], [4, 3]], np.int32)
BATCHED_UPDATES = np.sin(np.arange(12.0) + 1).reshape(2, 2, 3) + 1.2
WINDOWS = np.sin(np.arange(18.0)).reshape(3, 2, 3)


def gather(numbers, sizes, **params):
    return lambda x, i: lax.gather(x, i, numbers, sizes, **params)


def scatter(name, numbers=PUT_ROWS, **params):
    return lambda x, i, u: getattr(lax, name)(x, i, u, numbers, **params)


def put(name, indices, updates, label, numbers=PUT_ROWS, operand=M, fields=None, **params):
    primitive = name.replace("_", "-")
    fields = fields or {}
    return Case(primitive, scatter(name, numbers, **params), (operand, indices, updates), label,
                **fields)  # fmt: skip


ROW = (1, 4)
CASES = [
    Case("dynamic_slice", lambda x, i: lax.dynamic_slice(x, (i, ONE), (2, 3)), (M, ONE),
         complex=True),
    Case("dynamic_slice", lambda x, i: lax.dynamic_slice(x, (i,), (3,)), (V, LAST), "clamped"),
    Case("dynamic_slice", lambda x, i: lax.dynamic_slice_p.bind(x, i, slice_sizes=(3,)),
         (V, BEFORE), "negative"),
    Case("dynamic_slice", lambda x, i: lax.dynamic_slice(x, (i,), (0,)), (V, LAST), "empty"),
    Case("dynamic_slice", lambda x: lax.dynamic_slice(x, (), ()), (np.array(0.4),), "scalar"),
    Case("dynamic_update_slice", lambda x, u, i: lax.dynamic_update_slice(x, u, (i, ONE)),
         (M, M[:2, :3] + 1, np.int32(2)), complex=True),
    Case("dynamic_update_slice", lambda x, u, i: lax.dynamic_update_slice(x, u, (i,)),
         (V, V[:3] + 1, LAST), "clamped"),
    Case("dynamic_update_slice", lax.dynamic_update_slice_p.bind, (V, V[:3] + 1, BEFORE),
         "negative"),
    Case("gather", gather(TAKE_ROWS, ROW), (M, ROWS), complex=True),
    Case("gather", gather(TAKE_ROWS, ROW, unique_indices=True, mode=MODES.PROMISE_IN_BOUNDS),
         (M, ONCE), "unique"),
    Case("gather", gather(TAKE_ROWS, ROW, mode=MODES.CLIP), (M, OUT), "clip"),
    Case("gather", gather(TAKE_ROWS, ROW, mode=FILL, fill_value=7.0), (M, OUT), "fill"),
    # The output holds nan out of bounds; its derivative there is 0.
    Case("gather", gather(TAKE_ROWS, ROW, mode=FILL), (M, OUT), "nan",
         differences=False),
    Case("gather", gather(TAKE_BATCH, (1, 1, 3)), (T, BATCH), "batch"),
    Case("gather", gather(TAKE_WINDOW, (2, 3)), (M, CORNERS[:2]), "windows"),
    Case("gather", gather(TAKE_ROWS, ROW), (M, ROWS[:0]), "empty"),
    *(
        case
        for name in ("scatter", "scatter_add", "scatter_sub", "scatter_mul")
        for case in (
            put(name, ONCE, UPDATES[:3], "unique", unique_indices=True, fields={"complex": True}),
            put(name, OUT, UPDATES, "drop", mode=FILL, unique_indices=True),
            put(name, ONCE, UPDATES[:3], "sorted", unique_indices=True,
                mode=MODES.PROMISE_IN_BOUNDS),
            put(name, BATCH, BATCHED_UPDATES, "batch", PUT_BATCH, T, unique_indices=True),
            put(name, ROWS[:0], UPDATES[:0], "empty", unique_indices=True),
        )
    ),
    *(
        case
        for name in ("scatter", "scatter_add", "scatter_sub", "scatter_min", "scatter_max")
        for case in (
            put(name, ROWS, UPDATES[:3], "twice"),
            put(name, OUT, UPDATES, "clip", mode=MODES.CLIP,
                # JAX reads clamped places of scatter-min and scatter-max as out of bounds.
                fields={"jax": name in ("scatter", "scatter_add", "scatter_sub")}),
            put(name, CORNERS, WINDOWS, "windows", PUT_WINDOW),
        )
    ),
    *(
        case
        for name in ("scatter_min", "scatter_max")
        for case in (
            put(name, ONCE, np.where(UPDATES[:3] > 1.5, 3, -3) * UPDATES[:3], "unique"),
            put(name, OUT, UPDATES, "drop", mode=FILL),
            put(name, BATCH, BATCHED_UPDATES, "batch", PUT_BATCH, T),
            # Ties with the old value and between updates are shared equally.
            put(name, ROWS, np.stack([M[3], M[0] * 2, M[3]]), "tie", fields={"differences": False}),
        )
    ),
    # Several factors at one place: JAX and xform know only the slope in the operand.
    Case("scatter-mul", lambda x: scatter("scatter_mul")(x, ROWS, UPDATES[:3].astype(x.dtype)),
         (M,), "twice"),
]  # fmt: skip
