"""Lines that call functions with user rules: custom_jvp, custom_vjp, custom_vmap.

The rules are linear, as required, and are not the true derivatives. This detects a transform that
differentiates the function instead of using its rule. It holds for a custom_jvp only in first
order: in higher orders JAX itself forgets the rule inside loops and regions (`jax.grad` of
`jax.linearize` of a scan), so there the rule is the true derivative, by `jax.jvp`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tests.fuzz.nested import CARRIED, Fill
from tests.fuzz.source import Block, Line, Value
from tests.fuzz.writer import Writer


@dataclasses.dataclass
class _Function:
    """A function that gets a rule: its operands, its parameters, its lines and results."""

    operands: list[Value]
    params: list[Value]
    inner: Writer
    results: list[Value]

    @property
    def block(self) -> Block:
        """The function itself."""
        name = self.inner.name("plain")
        return Block(name, tuple(self.params), tuple(self.inner.lines), tuple(self.results))

    def call(self, w: Writer, text: str, name: str, blocks: Sequence[Block]) -> None:
        """Write the function with its rule under a name, and a call of it."""
        args = ", ".join(f"{{{i}}}" for i in range(len(self.operands)))
        call = _only(f"{name}({args})", len(self.results))
        w.call(f"{text}\n{call}", self.operands, self.results, blocks)


def _function(w: Writer, fill: Fill) -> _Function:
    operands = [w.pick() for _ in range(w.random.integers(1, 4))]
    if w.chance(0.2):
        operands.insert(int(w.random.integers(len(operands) + 1)), w.pick("i"))
    params = [w.param(v) for v in operands]
    inner = w.inner(params, closed=True)
    with w.shared.rule():
        fill(inner, int(w.random.integers(1, 4)))
    made = [v for v in inner.scope if v.kind == "f" and v.size]
    results = [inner.bounded(w.choose(made[-4:]), CARRIED) for _ in range(w.random.integers(1, 3))]
    return _Function(operands, params, inner, results)


def _of_all(f: _Function, y: Value) -> Value:
    """Return `y` plus a little of every parameter.

    JAX cannot run a staged vmap of a custom_jvp function if its rule is batched and its output not:
    `jax.jvp(jax.jit(jax.vmap(f)), ...)` fails.
    """
    terms = " + ".join(f"jnp.sum({{{i + 1}}})" for i in range(len(f.params)))
    return f.inner.emit(f"{{0}} + 0.03 * ({terms})", [y, *f.params], y.shape, "f", y.most + 0.5)


def _coefficient(w: Writer, shape: tuple[int, ...]) -> Value:
    """Return a factor of a linear term."""
    return w.bounded(w.pick("f", shape if w.chance(0.7) else ()), 1.5)


def _args(params: Sequence[Value]) -> str:
    return ", ".join(v.name for v in params)


def _only(text: str, n: int) -> str:
    """Return the right-hand side for n targets: the only element, if there is one."""
    return f"{text}[0]" if n == 1 else text


def _instantiated(values: Sequence[Value]) -> list[Line]:
    """Return arrays in place of possible symbolic zeros."""
    text = "jnp.zeros({0}.shape) if type({0}) is SymbolicZero else {0}"
    return [Line((v,), text, (v,)) for v in values]


def custom_jvp(w: Writer, fill: Fill) -> None:
    """Write a `jax.custom_jvp`, with or without symbolic zeros."""
    f = _function(w, fill)
    f.results = [_of_all(f, y) for y in f.results]
    symbolic, plain, name = w.chance(0.25), f.block, w.name("ruled")
    tangents = [dataclasses.replace(v, name=f"d_{v.name}") for v in f.params]
    active = [d for d in tangents if d.kind == "f"]
    lines = _instantiated(active) if symbolic else []
    if w.shared.order > 1:
        out = [Value(w.name("f"), y.shape) for y in f.results]
        text = f"jax.jvp({plain.name}, primals, ({_zeros(tangents)},))[1]"
        lines.append(Line(tuple(out), _only(text, len(out)), tuple(active)))
    else:
        rule = w.inner(f.params, closed=True)
        with w.shared.rule():
            fill(rule, 1)
        out, sums = _terms(rule, f.results, active)
        lines = [*rule.lines, *lines, *sums]
    rule = Block(
        w.name("rule"), tuple(f.params), tuple(lines), tuple(out), takes="primals, tangents",
        first=f"({_args(f.params)},), ({_args(tangents)},) = primals, tangents",
        tail=f"{name}(*primals), ({', '.join(f'{{{i}}}' for i in range(len(out)))},)",
    )  # fmt: skip
    option = ", symbolic_zeros=True" if symbolic else ""
    text = f"{name} = jax.custom_jvp({{f0}})\n{name}.defjvp({{f1}}{option})"
    f.call(w, text, name, [plain, rule])


def _zeros(tangents: Sequence[Value]) -> str:
    """Return tangents as `jax.jvp` takes them: float0 zeros for integers."""
    zero = "np.zeros({}, jax.dtypes.float0)"
    return ", ".join(d.name if d.kind == "f" else zero.format(d.shape) for d in tangents)


def _terms(
    rule: Writer, results: Sequence[Value], tangents: Sequence[Value]
) -> tuple[list[Value], list[Line]]:
    """Return for each result a sum of multiples of tangents, of all of them or of the first."""
    out: list[Value] = []
    lines: list[Line] = []
    for y in results:
        terms: list[str] = []
        args: list[Value] = []
        for d in tangents if rule.chance(0.8) else tangents[:1]:
            term = "{%d} * {%d}" if d.shape in (y.shape, ()) else "{%d} * jnp.sum({%d})"
            terms.append(term % (len(args), len(args) + 1))
            args += [_coefficient(rule, y.shape), d]
        out.append(Value(rule.name("f"), y.shape))
        text = f"jnp.broadcast_to({' + '.join(terms)}, {y.shape})"
        lines.append(Line((out[-1],), text, tuple(args)))
    return out, lines


def custom_vjp(w: Writer, fill: Fill) -> None:
    """Write a `jax.custom_vjp`, whose residuals are parameters and computed values."""
    f = _function(w, fill)
    w.shared.custom_vjp = True
    symbolic, name = w.chance(0.2), w.name("ruled")
    known = [v for v in f.inner.scope if v.kind != "b"]
    residuals = list(dict.fromkeys(w.choose(known) for _ in range(w.random.integers(1, 4))))
    n, m = len(f.results), len(residuals)
    fwd = dataclasses.replace(
        f.block, name=w.name("fwd"), results=(*f.results, *residuals),
        tail=f"({''.join(f'{{{i}}}, ' for i in range(n))}), "
             f"({''.join(f'{{{n + i}}}, ' for i in range(m))})",
    )  # fmt: skip
    rule = w.inner(residuals, closed=True)
    with w.shared.rule():
        fill(rule, 1)
    cts = [dataclasses.replace(y, name=w.name("ct")) for y in f.results]
    lines = _instantiated(cts) if symbolic else []
    out: list[Value] = []
    for v in f.params:
        if v.kind != "f":
            out.append(Value("None", v.shape, v.kind))
            continue
        terms, args = [], []
        for ct in cts if w.chance(0.8) else cts[:1]:
            c = _coefficient(rule, ct.shape)
            term = "{%d} * {%d}" if ct.shape == v.shape else "jnp.sum({%d} * {%d})"
            terms.append(term % (len(args), len(args) + 1))
            args += [c, ct]
        total = Value(w.name("f"), v.shape)
        text = f"jnp.broadcast_to({' + '.join(terms)}, {v.shape})"
        lines.append(Line((total,), text, tuple(args)))
        out.append(total)
    bwd = Block(
        w.name("bwd"), (*residuals, *cts), (*rule.lines, *lines), tuple(out),
        takes="residuals, cts",
        first=f"({_args(residuals)},), ({_args(cts)},) = residuals, cts",
    )  # fmt: skip
    fun = f"{name} = jax.custom_vjp(lambda *xs: {{f0}}(*xs)[0])"
    pair = "{f0}, {f1}"
    if symbolic:
        pair = "lambda *ps: {f0}(*(p.value for p in ps)), {f1}, symbolic_zeros=True"
    f.call(w, f"{fun}\n{name}.defvjp({pair})", name, [fwd, bwd])


def custom_vmap(w: Writer, fill: Fill) -> None:
    """Write a `custom_vmap`, whose rule agrees with `vmap`."""
    f = _function(w, fill)
    name, many = w.name("ruled"), (True,) * len(f.results)
    axes = "in_axes=[0 if o else None for o in on], axis_size=n"
    text = (
        f"{name} = custom_vmap({{f0}})\n"
        f"{name}.def_vmap(lambda n, on, *xs: (jax.vmap({{f0}}, {axes})(*xs), {many}))"
    )
    f.call(w, text, name, [f.block])


FAMILY = ((custom_jvp, 2.5), (custom_vjp, 2.0), (custom_vmap, 0.4))
