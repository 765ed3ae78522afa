"""Lines that hold programs: loops, branches, calls, regions, custom rules."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from tests.fuzz.source import Block, Value, pack
from tests.fuzz.writer import Writer

CARRIED = 2.0
POLICIES = (
    "None",
    "xform.policies.save_nothing",
    "xform.policies.save_everything",
    "xform.policies.save_dots",
    "xform.policies.save_dots_with_no_batch_dims",
    "xform.policies.save_only_these_names('h')",
    "xform.policies.save_any_names_but_these('h')",
    "xform.policies.save_from_both_policies(xform.policies.save_dots, "
    "xform.policies.save_only_these_names('g'))",
    "jax.checkpoint_policies.dots_saveable",
    "jax.checkpoint_policies.save_only_these_names('h', 'g')",
)
Fill = Callable[[Writer, int], None]


def _names(values: Sequence[Value]) -> str:
    return pack([v.name for v in values])


def _places(start: int, n: int) -> str:
    """`{3}, {4}, ` for two arguments from the third on."""
    return pack([f"{{{i}}}" for i in range(start, start + n)])


def _some(w: Writer, low: int = 1, high: int = 3, ints: float = 0.15) -> list[Value]:
    """Return a few values to pass in, occasionally the same one twice."""
    found = [
        w.pick("i") if w.chance(ints) else w.pick() for _ in range(w.random.integers(low, high))
    ]
    return [*found, found[0]] if w.chance(0.1) else found


def _fill(w: Writer, fill: Fill, most: int = 5) -> None:
    """Write the lines of a nested block."""
    fill(w, int(w.random.integers(1, most + 1)))


def _result(w: Writer, like: Value) -> Value:
    """Return a value of a type that depends on some computation."""
    if like.kind != "f":
        return w.pick(like.kind, like.shape)
    return w.bounded(w.pick("f", like.shape), CARRIED)


def _results(w: Writer, n: int) -> list[Value]:
    """Return any values, possibly parameters."""
    own = [v for v in w.scope if v.kind != "b" or w.chance(0.2)]
    return [w.choose(own[-6:]) if own and w.chance(0.7) else w.pick() for _ in range(n)]


def _carries(w: Writer, n: int) -> list[Value]:
    """Return the initial carry of a loop: values, constants, occasionally an integer."""
    out = []
    for _ in range(n):
        like = w.pick("i") if w.chance(0.15) else w.bounded(w.pick(), CARRIED)
        if w.chance(0.25):
            like = w.literal(like.kind, like.shape)
        out.append(like)
    return out


def _typed(v: Value) -> Value:
    return dataclasses.replace(v, most=CARRIED if v.kind == "f" else 9.0)


def scan(w: Writer, fill: Fill) -> None:
    """Write a scan of 0 to 4 steps with carries, scanned inputs, stacked outputs and closures."""
    length = int(w.choose((0, 1, 2, 3, 4), (1, 1, 3, 5, 2)))
    start = _carries(w, int(w.random.integers(0, 4)))
    scanned = [v for v in w.scope if v.shape and v.shape[0] == length and v.kind != "b"]
    xs = [w.choose(scanned) for _ in range(w.random.integers(0, 3))] if scanned else []
    carry = [w.param(_typed(v)) for v in start]
    parts = [w.param(dataclasses.replace(v, shape=v.shape[1:])) for v in xs]
    inner = w.inner([*carry, *parts])
    _fill(inner, fill)
    after = [_result(inner, v) for v in carry]
    small = [v for v in inner.scope[-6:] if len(v.shape) <= 2 and v.size <= 9]
    ys = [w.choose(small) for _ in range(w.random.integers(0, 3))] if small else []
    n, m = len(after), len(ys)
    block = Block(
        inner.name("body"), (*carry, *parts), tuple(inner.lines), (*after, *ys),
        takes="carry, xs", first=f"{_names(carry)}, {_names(parts)} = carry, xs",
        tail=f"{_places(0, n)}, {_places(n, m)}",
    )  # fmt: skip
    stacked = [dataclasses.replace(v, shape=(length, *v.shape)) for v in ys]
    results = [*carry, *stacked]
    if not results:
        return
    options = ", reverse=True" if w.chance(0.25) else ""
    options += f", unroll={w.choose((1, 2, 'True'))}" if w.chance(0.2) else ""
    text = f"out = lax.scan({{f0}}, {_places(0, len(start))}, {_places(len(start), len(xs))}"
    text += f", length={length}{options})\n{_unpacked('(*out[0], *out[1])', len(results))}"
    w.call(text, [*start, *xs], results, [block])


def while_loop(w: Writer, fill: Fill) -> None:
    """Write a loop of 0 to 4 steps, by a count that may be computed, or also by the state."""
    start = _carries(w, int(w.random.integers(1, 4)))
    carry = [w.param(_typed(v)) for v in start]
    count = w.param(Value("", (), "i", 4.0))
    trips = w.scalar("i") if w.chance(0.5) else w.literal("i", ())
    inner = w.inner([count, *carry])
    _fill(inner, fill)
    after = [_result(inner, v) for v in carry]
    body = Block(
        inner.name("body"), (count, *carry), tuple(inner.lines), (count, *after), takes="state",
        first=f"{_names([count, *carry])} = state",
        tail=f"({{0}} + 1, {', '.join(f'{{{i + 1}}}' for i in range(len(after)))},)",
    )  # fmt: skip
    tests: list[Value] = [count, trips]
    alive = "({0} < 4) & ({0} < {1})"
    floats = [v for v in carry if v.kind == "f"]
    if floats and w.chance(0.4):
        tests.append(w.choose(floats))
        alive += f" & (jnp.sum({{2}}) < {w.number()})"
    cond = Block(
        w.name("cond"), (count, *carry), (), tuple(tests), takes="state",
        first=f"{_names([count, *carry])} = state", tail=alive,
    )  # fmt: skip
    rest = "[1:]" if len(start) > 1 else "[1]"
    text = f"while_loop({{f0}}, {{f1}}, (np.int32(0), *{_places(0, len(start))})){rest}"
    w.call(text, start, [_typed(v) for v in start], [cond, body])


def _unpacked(text: str, n: int) -> str:
    """Return the right-hand side for n targets: the only element, if there is one."""
    return f"{text}[0]" if n == 1 else text


def fori(w: Writer, fill: Fill) -> None:
    """Write a `fori_loop` of a fixed number of steps."""
    start = _carries(w, int(w.random.integers(1, 3)))
    carry, i = [w.param(_typed(v)) for v in start], w.param(Value("", (), "i", 4.0))
    inner = w.inner([*carry, i])
    _fill(inner, fill)
    after = [_result(inner, v) for v in carry]
    body = Block(
        inner.name("body"), (i, *carry), tuple(inner.lines), tuple(after),
        takes="n, state", first=f"{i.name}, {_names(carry)} = jnp.int32(n), state",
    )  # fmt: skip
    n = int(w.random.integers(0, 5))
    text = f"lax.fori_loop(np.int32(0), np.int32({n}), {{f0}}, {_places(0, len(start))})"
    w.call(_unpacked(text, len(start)), start, [_typed(v) for v in start], [body])


def branch(w: Writer, fill: Fill) -> None:
    """Write `cond` or `switch` with operands and closures."""
    n = 2 if w.chance(0.7) else 3
    operands = _some(w, 1, 4)
    likes = [w.pick("i") if w.chance(0.1) else w.pick() for _ in range(w.random.integers(1, 3))]
    blocks = []
    for _ in range(n):
        params = [w.param(v) for v in operands]
        inner = w.inner(params)
        if w.chance(0.9):
            _fill(inner, fill, 4)
        results = tuple(_result(inner, v) for v in likes)
        blocks.append(Block(inner.name("branch"), tuple(params), tuple(inner.lines), results))
    functions = ", ".join(f"{{f{i}}}" for i in range(n))
    rest = "".join(f", {{{i + 1}}}" for i in range(len(operands)))
    if n == 2:
        which = w.scalar("b") if w.chance(0.7) else w.emit(
            f"jnp.sum({{0}}) > {w.number(-0.5, 0.5)}", [w.pick()], (), "b"
        )  # fmt: skip
        text = f"lax.cond({{0}}, {functions}{rest})"
    else:
        which = w.scalar("i")
        text = f"lax.switch({{0}}, [{functions}]{rest})"
    w.call(_unpacked(text, len(likes)), [which, *operands], [_typed(v) for v in likes], blocks)


def _called(w: Writer, fill: Fill, text: str) -> None:
    """Write a call of a nested function that returns any values."""
    operands = _some(w, 1, 4)
    params = [w.param(v) for v in operands]
    inner = w.inner(params)
    _fill(inner, fill)
    results = _results(inner, int(w.random.integers(1, 4)))
    block = Block(inner.name("fun"), tuple(params), tuple(inner.lines), tuple(results))
    text = text.replace("ARGS", ", ".join(f"{{{i}}}" for i in range(len(operands))))
    w.call(_unpacked(text, len(results)), operands, results, [block])


def jit(w: Writer, fill: Fill) -> None:
    """Write `jax.jit`, or calls without effect on values."""
    text = w.choose(("jax.jit({f0})(ARGS)", "jax.jit({f0}, inline=True)(ARGS)",
                     "jax.named_call({f0}, name='part')(ARGS)"), (5, 1, 1))  # fmt: skip
    _called(w, fill, text)


def remat(w: Writer, fill: Fill) -> None:
    """Write a remat region, JAX's or xform's, with any policy."""
    mark = w.choose(("jax.checkpoint", "xform.remat"))
    policy = w.choose(POLICIES)
    cse = ", prevent_cse=False" if w.chance(0.2) else ""
    _called(w, fill, f"{mark}({{f0}}, policy={policy}{cse})(ARGS)")


def vmap(w: Writer, fill: Fill) -> None:
    """Write a map over the leading axis of some operands."""
    batched = [v for v in w.scope if v.shape and v.kind != "b" and 0 < v.shape[0] <= 3]
    if not batched:
        return
    first = w.choose(batched)
    n = first.shape[0]
    rest = [v for v in _some(w, 1, 3)]
    operands = [first, *rest]
    axes = [0, *(0 if v.shape and v.shape[0] == n and w.chance(0.6) else None for v in rest)]
    params = [
        w.param(v if axis is None else dataclasses.replace(v, shape=v.shape[1:]))
        for v, axis in zip(operands, axes, strict=True)
    ]
    inner = w.inner(params)
    _fill(inner, fill)
    small = [v for v in inner.scope[-6:] if len(v.shape) <= 2 and v.size <= 9]
    results = [w.choose(small) if small else params[0] for _ in range(w.random.integers(1, 3))]
    block = Block(inner.name("lane"), tuple(params), tuple(inner.lines), tuple(results))
    args = ", ".join(f"{{{i}}}" for i in range(len(operands)))
    text = _unpacked(f"jax.vmap({{f0}}, in_axes={tuple(axes)})({args})", len(results))
    types = [dataclasses.replace(v, shape=(n, *v.shape)) for v in results]
    w.call(text, operands, types, [block])


FAMILY = ((scan, 6.0), (branch, 5.0), (while_loop, 2.5), (fori, 1.0), (jit, 3.0), (remat, 4.0),
          (vmap, 2.0))  # fmt: skip
