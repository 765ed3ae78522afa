"""Each fact about the compilers of GPUs and TPUs, checked against their buffer assignment."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import xform
from xform.memory.compilation import compile_for
from xform.memory.targets import missing, parse_target
from xform.planner.simulate.liveness import simulate
from xform.planner.simulate.profiles import tiled_elements
from xform.program.ir import trace

GPU, TPU = "gpu:h100", "tpu:v5e:1x1"
SQUARE = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
LARGE = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
NARROW = jax.ShapeDtypeStruct((2**20, 3), jnp.float32)
LONG = jax.ShapeDtypeStruct((128, 65536), jnp.float32)


def chain(x, k=3):
    for _ in range(k):
        x = jnp.tanh(x @ x)
    return x


def stacked(x, length):
    """A loop that stacks values of 4 MiB, which are read after it."""
    step = lambda c, _: (jnp.sin(c @ x), c)
    end, stack = lax.scan(step, x, None, length=length)
    return jnp.sum(lax.scan(lambda c, s: (c @ x * s, None), end, stack, reverse=True)[0])


FACTS = {
    "an operation goes into all of its readers, dear or not":
        (GPU, lambda x: (lambda y: (chain((jnp.tanh(y) + 1) @ x) * jnp.tanh(y)) @ y)(x @ x),
         SQUARE),
    "or into none, where one is no loop":
        (GPU, lambda x: (lambda y: (jnp.sin(y), chain(x) * jnp.sin(y)))(x @ x), SQUARE),
    "products that share an operand are one":
        (GPU, lambda x, y: jnp.tanh(x @ y) @ jnp.sin(x @ (y + 1)), SQUARE, SQUARE),
    "but not large ones": (GPU, lambda x: jnp.tanh(x @ x) @ jnp.sin(x @ (x + 1)), LARGE),
    "a product of few rows and columns is cut": (GPU, lambda x: jnp.tanh(x @ x.T), LONG),
    "operations run in the order that takes least":
        (GPU, lambda *xs: sum(jnp.max(y @ y, 1) for y in [x @ x for x in xs]), *[SQUARE] * 4),
    "values stay on the chip where there is room": (TPU, lambda x: stacked(x, 20), SQUARE),
    "else they are in memory": (TPU, lambda x: stacked(x, 40), SQUARE),
    "a narrow argument is filled up": (TPU, lambda x: jnp.sin(x), NARROW),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("fact", FACTS)
def test_a_fact_holds(fact: str) -> None:
    target, f, *args = FACTS[fact]
    goal = parse_target(target)
    if absent := missing(goal):
        pytest.skip(f"needs {', '.join(absent)}")
    said = compile_for(f, args, target=target)
    seen = simulate(trace(lambda *xs: jax.tree.leaves(f(*xs)), *args), goal.backend)
    assert said.total_bytes is not None
    assert abs(said.total_bytes - seen.total_bytes) <= said.total_bytes // 32


@pytest.mark.slow
def test_logits_are_there_once_on_a_tpu() -> None:
    """Unless they are saved, the compiler also keeps the values that a loss computes from them."""
    if absent := missing(parse_target(TPU)):
        pytest.skip(f"needs {', '.join(absent)}")

    def loss(w, b, x, labels):
        weights = jnp.where(labels > 0, 1.0, 0.0)
        right = jnp.where(labels[..., None] == jnp.arange(8192), 1.0, 0.0)
        losses = -jnp.sum(right * jax.nn.log_softmax(jnp.tanh(x) @ w + b), -1)
        return jnp.sum(losses * weights) / jnp.sum(weights)

    shapes = (256, 8192), (8192,), (16, 256, 256)
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    labels = jax.ShapeDtypeStruct((16, 256), jnp.int32)
    step = xform.grad(loss, argnums=(0, 1, 2))
    temp = xform.memory_analysis(step, *args, labels, target=TPU).temp_bytes
    assert temp <= 1.05 * 4 * 16 * 256 * 8192


def test_tiles() -> None:
    assert [tiled_elements(s) for s in ((), (3,), (5, 3), (1000, 3), (0, 3), (2, 8, 128))] == [
        128, 128, 512, 4096, 0, 2048]  # fmt: skip


def test_values_in_tpu_on_chip_memory_do_not_count_in_the_budget() -> None:
    made = xform.plan(
        lambda x: stacked(x, 4), SQUARE, target=TPU, verify=False,
        policy=xform.policies.budget("13 MiB", of="peak"),
    )  # fmt: skip
    assert made.saved_bytes == 2**26
    assert made.predicted_bytes < 13 * 2**20
