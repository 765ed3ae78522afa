"""Buffers in the user's words."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import xform
from tests.memory.dumps import PROGRAMS, dumped
from tests.memory.test_buffers import message
from tests.memory.test_capacity import f32
from xform.interpret.emit import pass_name
from xform.memory.attribute import Argument, BufferRow, buffer_rows, role, saving_reason, scope
from xform.memory.buffers import Assignment, read


def of(name: str, *args: Any, **options: Any) -> list[BufferRow]:
    return buffer_rows(read(dumped(name)[0]), *args, **options)


def count(found: list[BufferRow]) -> Counter[str]:
    total: Counter[str] = Counter()
    for row in found:
        total[row.category] += row.bytes if row.at_peak else 0
    return total


@pytest.mark.parametrize("name", PROGRAMS)
def test_rows_add_up_to_the_headline(name: str) -> None:
    assignment = read(dumped(name)[0])
    peak = [row for row in buffer_rows(assignment) if row.at_peak]
    assert sum(row.bytes for row in peak) == assignment.total_bytes
    assert sum(row.bytes for row in peak if row.where) >= 0.95 * assignment.total_bytes
    assert all(row.born <= assignment.peak_step <= row.dies for row in peak)


@pytest.mark.parametrize("name", ["scan", "scan, JAX"])
def test_residuals_stacked_by_a_scan_are_activations(name: str) -> None:
    found = of(name)
    stack = next(row for row in found if row.category == "activation")
    assert stack.shape[0] == 4
    assert stack.bytes == 4 * 32 * 64 * 4
    assert (stack.dtype, stack.scope) == ("f32", "layer")
    assert stack.operation in ("tanh", "mul", "dot_general", "sub")
    assert stack.where.endswith("(layer)")
    grads = [row for row in found if row.category == "gradient" and row.at_peak]
    assert (4, 64, 64) in {row.shape for row in grads}


def test_recompute() -> None:
    found = of("recompute")
    assert "recompute" in {row.category for row in found}
    names = {row.operation for row in found if row.category == "recompute"}
    assert names & {"exp", "dot_general", "cos", "sin"}


def program_of(*lines: tuple[str, str, tuple[int, ...]]) -> Assignment:
    """Return a program of one computation whose instructions are `(opcode, op_name, operands)`.

    Each makes f32[8], which has a place of its own in one block.
    """
    numbers = range(1, len(lines) + 1)
    f32 = message(f2=11, f3=8)
    instructions = [
        message(f1=b"i%d" % n, f2=opcode.encode(), f3=f32, f7=message(f2=op_name.encode()), f35=n,
                f36=list(operands))
        for n, (opcode, op_name, operands) in zip(numbers, lines, strict=True)
    ]  # fmt: skip
    module = message(f1=b"m", f6=99, f3=message(f1=b"main", f2=instructions, f5=99, f6=len(lines)))
    placed = [message(f1=n, f2=32 * n, f3=32) for n in numbers]
    block = message(f1=0, f2=32 * (len(lines) + 1), f9=placed)
    buffers = [message(f1=n, f2=32, f3=message(f4=n)) for n in numbers]
    return read(message(f1=module, f3=message(f1=buffers, f3=block)))


FORWARD, BACKWARD = "jit(f)/sin", "jit(f)/xform(backward)/mul"
AGAIN = "jit(f)/xform(backward)/xform(recompute)/sin"


@pytest.mark.parametrize(
    ("lines", "categories"),
    [
        (  # the compiler recomputes before it has run the forward pass
            [("sine", AGAIN, ()), ("sine", FORWARD, ()), ("sine", FORWARD, (2,)),
             ("multiply", BACKWARD, (1, 3)), ("multiply", BACKWARD, (4,))],
            ["activation", "temporary", "activation", "temporary", "temporary"],
        ),
        (  # and after it
            [("sine", FORWARD, ()), ("sine", FORWARD, (1,)), ("sine", AGAIN, (2,)),
             ("multiply", BACKWARD, (3,)), ("multiply", BACKWARD, (4,))],
            ["temporary", "activation", "recompute", "temporary", "temporary"],
        ),
        (  # one operation for both passes has the name of the recompute
            [("sine", AGAIN, ()), ("sine", FORWARD, (1,)), ("sine", FORWARD, (2,)),
             ("multiply", BACKWARD, (3,)), ("multiply", BACKWARD, (4,))],
            ["temporary", "temporary", "activation", "temporary", "temporary"],
        ),
        (  # the backward pass copies a saved value
            [("sine", FORWARD, ()), ("multiply", BACKWARD, ()), ("copy", "", (1,)),
             ("multiply", BACKWARD, (2, 3)), ("multiply", BACKWARD, (4,))],
            ["activation", "temporary", "temporary", "temporary", "temporary"],
        ),
    ],
)  # fmt: skip
def test_a_category_agrees_with_the_pass_in_which_the_operation_runs(
    lines: Any, categories: list[str]
) -> None:
    found = {row.name: row.category for row in buffer_rows(program_of(*lines))}
    assert [found[f"i{n}"] for n in range(1, len(lines) + 1)] == categories


def passes_agree(report: Any) -> bool:
    """Return whether recomputed values are made in the backward pass, and saved ones before."""
    module = report.assignment.module
    step = {i.name: module.order.get(number, 0) for number, i in module.instructions.items()}
    first, end = next(phase[1:] for phase in report.phases if phase.name == "backward")
    in_backward = {
        category: {
            first <= step[row.name.partition("{")[0]] < end
            for row in report.buffers
            if row.category == category
        }
        for category in ("recompute", "activation")
    }
    return in_backward["recompute"] <= {True} and in_backward["activation"] <= {False}


def attention(w: Any, x: jax.Array) -> jax.Array:
    q, k, v = (x @ w[i] for i in range(3))
    return x + jax.nn.softmax(q @ k.T) @ v


def unrolled_attention(ws: Any, x: jax.Array, layer: Any = attention) -> jax.Array:
    for i in range(4):
        x = layer(ws[i], x)
    return jnp.mean(x**2)


def scanned_attention(ws: Any, x: jax.Array) -> jax.Array:
    return jnp.mean(jax.lax.scan(lambda x, w: (attention(w, x) * x, None), x, ws)[0] ** 2)


@pytest.mark.parametrize(
    "gradient",
    [
        xform.grad(unrolled_attention, policy="save_dots"),
        xform.grad(unrolled_attention, policy="save_nothing"),
        xform.grad(scanned_attention),
        xform.grad(scanned_attention, policy="save_nothing"),
        jax.grad(lambda ws, x: unrolled_attention(ws, x, jax.checkpoint(attention))),
    ],
)
def test_passes_of_compiled_steps(gradient: Any) -> None:
    types = [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((4, 3, 32, 32), (64, 32))]
    report = xform.memory_analysis(lambda ws, x: ws - gradient(ws, x), *types)
    assert passes_agree(report)


def test_arguments_have_names_and_the_callers_categories() -> None:
    known = [Argument("params/w", "parameter"), Argument(category="optimizer state")]
    found = {row.name: row for row in of("recompute", known)}
    assert found["params/w"].category == "parameter"
    assert found["x"].category == "optimizer state"
    assert found["params/w"].where.endswith("(unrolled)")
    assert {row.name for row in of("recompute", {}) if row.category == "argument"} == {
        "p['w']",
        "x",
    }


def test_a_gradient_has_the_type_of_a_parameter() -> None:
    known = {0: Argument(category="optimizer state"), 1: Argument(category="parameter")}
    assert "gradient" not in count(of("scan", known))
    assert count(of("scan"))["gradient"] >= 4 * 64 * 64 * 4


def test_a_donated_argument_is_one_row() -> None:
    found = [row for row in of("donated") if row.at_peak]
    (mine,) = (row for row in found if row.name == "p")
    assert mine.category == "argument"
    assert not [row for row in found if row.category == "output" and row.bytes == mine.bytes]


def test_scalar_and_empty_arguments_have_exact_bytes() -> None:
    found = of("odd")
    assert {row.name: row.bytes for row in found if row.category == "argument"} == {
        "x": 256, "none": 0, "scale": 4
    }  # fmt: skip
    assert count(found)["output"] >= 256 + 4


@pytest.mark.parametrize(
    ("name", "why", "within"),
    [
        ("jit(f)/mlp/sin", "", "mlp"),
        ("jit(f)/xform(saved: on the cheapest cut)/mlp/sin", "on the cheapest cut", "mlp"),
        ("jit(f)/xform(saved: names('a/b') saves a/b)/mlp/sin", "names('a/b') saves a/b", "mlp"),
        ("jit(f)/while/body/xform(saved: has effects: never recomputed)/sin",
         "has effects: never recomputed", ""),
        ("jit(f)/xform(backward)/mlp/sin", "", "mlp"),
    ],
)  # fmt: skip
def test_reasons(name: str, why: str, within: str) -> None:
    assert (saving_reason(name), scope(name)) == (why, within)


def test_plain_data() -> None:
    data = of("odd")[0].to_dict()
    assert {"name", "bytes", "dtype", "shape", "operation", "where", "scope", "category", "why",
            "born", "dies", "at_peak"} <= data.keys()  # fmt: skip
    assert isinstance(data["shape"], list)


@pytest.mark.parametrize(
    ("name", "is_of"),
    [
        ("jit(f)/dot_general", ""),
        ("jit(f)/transpose", ""),
        ("jit(f)/jvp(mlp)/mul", ""),
        ("jit(f)/transpose(jvp(mlp))/while/body/mul", "backward"),
        ("jit(f)/transpose(jvp(checkpoint))/rematted_computation/sin", "recompute"),
        ("jit(f)/xform(backward)/while/body/closed_call/xform(backward)/xform(recompute)/sin",
         "recompute"),
        ("jit(f)/xform(backward)/xform(recompute)/while/body/xform(backward)/mul", "backward"),
        ("", ""),
    ],
)  # fmt: skip
def test_parts(name: str, is_of: str) -> None:
    assert pass_name(name) == is_of


@pytest.mark.parametrize(
    ("name", "scopes"),
    [
        ("jit(f)/dot_general", ""),
        ("jit(f)/jvp(layers)/jit(silu)/mul", "layers"),
        ("jit(f)/layers/layers/dot_general", "layers"),
        ("jit(f)/a/b/a/b/dot_general", "a/b"),
        ("jit(f)/while/body/bkg,kg->bk/dot_general", ""),
        ("jit(f)/transpose(jvp(a))/shard_map/vmap(b)/mul", "a/b"),
        ("jit(f)/xform(backward)/branch_1_fun/attention/mul", "attention"),
    ],
)
def test_scopes(name: str, scopes: str) -> None:
    assert scope(name) == scopes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("donated", [(), (0,)])
def test_gradients_at_the_peak_are_found_in_another_dtype_and_in_outputs(dtype, donated) -> None:
    def loss(params, x):
        layer = lambda h, w: (jnp.tanh(h @ w.astype(dtype)), None)
        return jnp.sum(jax.lax.scan(layer, x.astype(dtype), params["w"])[0].astype(float) ** 2)

    def step(params, x):
        g = xform.grad(loss, policy=xform.policies.save_nothing)(params, x)
        return {"w": params["w"] - g["w"] / jnp.sqrt(jnp.sum(g["w"] ** 2))}

    args = {"w": f32(6, 64, 64)}, f32(8, 64)
    report = xform.memory_analysis(step, *args, donate_argnums=donated)
    sizes = {group.name: group.bytes for group in report.group_by("category")}
    assert sizes["gradient"] >= 6 * 64 * 64 * 4
    assert sizes["gradient"] + sizes["parameter"] < 2.2 * 6 * 64 * 64 * 4


def test_unnamed_fusions_take_names_from_their_instructions() -> None:
    def step(w, x):
        g = xform.grad(lambda w: jnp.sum(jnp.tanh(x.astype("bfloat16") @ w.astype("bfloat16"))))(w)
        return w - g

    module = xform.memory_analysis(step, f32(64, 64), f32(8, 64)).assignment.module
    nameless = [i for i in module.instructions.values() if i.opcode == "fusion" and not i.op_name]
    assert all(module.named(i) == "" or "/" in module.named(i) for i in nameless)


def test_gradients_of_layers_whose_axis_is_not_the_first_are_gradients() -> None:
    """MaxText's parameters have the axis of layers second. Its loop needs that axis first."""

    def loss(w, x):
        layer = lambda h, w: (jnp.tanh(h @ w["a"]) @ w["b"], None)
        layers = jax.tree.map(lambda v: jnp.moveaxis(v, 1, 0), w)
        return jnp.sum(jax.lax.scan(layer, x, layers)[0] ** 2)

    def step(w, x):
        grads = xform.grad(loss)(w, x)
        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
        return jax.tree.map(lambda w, g: w - g / norm, w, grads)

    report = xform.memory_analysis(step, {"a": f32(64, 6, 96), "b": f32(96, 6, 64)}, f32(8, 64))
    gradients = [row for row in report.peak if row.category == "gradient"]
    assert sum(row.bytes for row in gradients) >= 2 * 4 * 64 * 6 * 96


@pytest.mark.parametrize(
    ("name", "is_for"),
    [
        ("params['w']", "parameter"),
        ("state.params['dense']['kernel'].value", "parameter"),
        ("state.opt_state[0].mu['dense']['kernel']", "optimizer state"),
        ("opt_state.nu.params.w", "optimizer state"),
        ("params_0", "parameter"),
        ("opt_state_1[0].count", "optimizer state"),
        ("state[0].trace['w']", "optimizer state"),
        ("opt_state[1].trace.w", "optimizer state"),
        ("trace", "argument"),
        ("trace['w']", "argument"),
        ("tokens", "argument"),
        ("", "argument"),
        ("x", "argument"),
    ],
)
def test_roles(name: str, is_for: str) -> None:
    assert role(name) == is_for
