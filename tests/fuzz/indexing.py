"""Lines that read and write at computed places."""

from __future__ import annotations

import math

from tests.fuzz.arrays import LARGEST, some_array, some_axis
from tests.fuzz.writer import Writer


def _as_is(w: Writer) -> str:
    """Return an option or nothing; with the option, a negative start is clamped."""
    return ", allow_negative_indices=False" if w.chance(0.5) else ""


def _start(w: Writer, k: int) -> str:
    """Return a start from the scalar at `k`; it may be negative."""
    return f"jnp.int32({{{k}}}) - 4" if w.chance(0.4) else f"{{{k}}}"


def index(w: Writer) -> None:
    """Write a read at computed places."""
    x = some_array(w)
    n, rest = x.shape[0], x.shape[1:]
    way = int(w.random.integers(6))
    if way == 0:
        w.emit(f"jnp.asarray({{0}})[{_start(w, 1)}]", [x, w.scalar("i")], rest, "f", x.most)
    elif way == 1:
        i = w.pick("i", where=lambda v: len(v.shape) == 1 and v.size * x.size // n <= LARGEST)
        mode = w.choose(("clip", "fill"))
        text = f"jnp.asarray({{0}}).at[{{1}}].get(mode='{mode}', fill_value=0.5)"
        w.emit(text, [x, i], (*i.shape, *rest), "f", x.most)
    elif way == 2:
        sizes = tuple(int(w.random.integers(1, d + 1)) for d in x.shape)
        starts = [w.scalar("i") for _ in sizes]
        at = "".join(f"{_start(w, k + 1)}, " for k in range(len(sizes)))
        w.emit(f"lax.dynamic_slice({{0}}, ({at}), {sizes}{_as_is(w)})", [x, *starts], sizes, "f",
               x.most)  # fmt: skip
    elif way == 3:
        axis = some_axis(w, x)
        i = w.scalar("i")
        to = (*x.shape[:axis], *x.shape[axis + 1 :])
        text = f"lax.dynamic_index_in_dim({{0}}, {_start(w, 1)}, {axis}, False{_as_is(w)})"
        w.emit(text, [x, i], to, "f", x.most)
    elif way == 4:
        axis = some_axis(w, x)
        i = w.pick("i", x.shape)
        text = f"jnp.take_along_axis({{0}}, jnp.clip({{1}}, 0, {x.shape[axis] - 1}), {axis})"
        w.emit(text, [x, i], x.shape, "f", x.most)
    else:
        i, axis = w.pick("i", (2,)), some_axis(w, x)
        to = (*x.shape[:axis], 2, *x.shape[axis + 1 :])
        if math.prod(to) <= LARGEST:
            w.emit(f"jnp.take({{0}}, {{1}}, {axis}, mode='clip')", [x, i], to, "f", x.most)


def update(w: Writer) -> None:
    """Write a write at computed places."""
    x = some_array(w)
    rest = x.shape[1:]
    way = int(w.random.integers(6))
    if way == 0:
        y = w.pick("f", rest)
        op = w.choose(("set", "add"))
        w.emit(f"jnp.asarray({{0}}).at[{{1}}].{op}({{2}})" if op == "add" else
               "lax.dynamic_update_index_in_dim({0}, {2}, {1}, 0)", [x, w.scalar("i"), y],
               x.shape, "f", x.most + y.most)  # fmt: skip
    elif way == 1:
        sizes = tuple(int(w.random.integers(1, d + 1)) for d in x.shape)
        y, starts = w.pick("f", sizes), [w.scalar("i") for _ in sizes]
        at = "".join(f"{_start(w, k + 2)}, " for k in range(len(sizes)))
        text = f"lax.dynamic_update_slice({{0}}, {{1}}, ({at}){_as_is(w)})"
        w.emit(text, [x, y, *starts], x.shape, "f", max(x.most, y.most))
    elif way == 2:
        i, y = w.pick("i", (2,)), w.pick("f", (2, *rest))
        text = f"jnp.asarray({{0}}).at[{{1}}].add({{2}}, mode='{w.choose(('clip', 'drop'))}')"
        w.emit(text, [x, i, y], x.shape, "f", x.most + 2 * y.most)
    elif way == 3:
        y = w.pick("f", (2, *rest))
        places = w.random.permutation(max(x.shape[0], 2))[:2].tolist()
        op = w.choose(("set", "multiply", "subtract"))
        how = "mode='drop', unique_indices=True"
        text = f"jnp.asarray({{0}}).at[np.array({places})].{op}({{1}}, {how})"
        most = x.most * max(y.most, 1.0) + y.most
        w.emit(text, [x, y], x.shape, "f", most)
    elif way == 4:
        i, y, r = w.pick("i", (2,)), w.pick("f", (2, *rest)), w.ramp((2, *rest))
        op = w.choose(("max", "min"))
        text = f"jnp.asarray({{0}}).at[{{1}}].{op}({{2}} + {{3}}, mode='drop')"
        w.emit(text, [x, i, y, r], x.shape, "f", max(x.most, y.most + r.most))
    else:
        k = int(w.random.integers(x.shape[-1]))
        y = w.pick("f", x.shape[:-1])
        text = f"jnp.asarray({{0}}).at[..., {k}].{w.choose(('set', 'add'))}({{1}})"
        w.emit(text, [x, y], x.shape, "f", x.most + y.most)


FAMILY = ((index, 4.0), (update, 4.0))
