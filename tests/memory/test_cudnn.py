"""Programs that call cuDNN, for GPUs that are not attached."""

import importlib.util
from unittest import mock

import jax
import jax.numpy as jnp
import pytest

import xform
from xform import errors
from xform.memory import cudnn
from xform.memory.hlo import Shape
from xform.memory.lowering import jitted_with_arguments, lower
from xform.memory.sharding import on_mesh
from xform.memory.targets import parse_target

GPU = parse_target("gpu:h100")
Q = jax.ShapeDtypeStruct((2, 128, 4, 64), jnp.bfloat16)


def loss(q):
    return jnp.sum(jax.nn.dot_product_attention(q, q, q, implementation="cudnn"), dtype=jnp.float32)


def lowered(f, *args):
    return lower(jitted_with_arguments(f, args, {})[0], on_mesh(args, {}, GPU, None, None), GPU)


@pytest.mark.skipif(bool(importlib.util.find_spec("jax_cuda12_plugin")), reason="may find cuDNN")
@pytest.mark.parametrize(
    "ask",
    [
        lambda: lowered(loss, Q),
        lambda: lowered(xform.grad(loss), Q),
        lambda: xform.plan(loss, Q, policy="budget:4MiB", target="gpu:h100"),
        lambda: xform.jit(xform.grad(loss), "budget:4MiB", target="gpu:h100").lower(Q),
    ],
    ids=["loss", "gradient", "plan", "jit"],
)
def test_an_absent_library_is_named(ask) -> None:
    with pytest.raises(errors.MissingExtra) as caught:
        ask()
    line = loss.__code__.co_firstlineno + 1
    assert str(caught.value) == (
        "target='gpu:h100'\n"
        "  problem: the function calls cuDNN (dot_product_attention with implementation='cudnn'), "
        "whose library is not installed\n"
        f"  where:   {__file__}:{line} (loss)\n"
        "  remedy:  pip install nvidia-cudnn-cu12, which needs no GPU; or pass implementation='xla'"
    )


def test_the_library_is_that_of_the_plugin() -> None:
    plugin = mock.patch.object(cudnn.importlib.util, "find_spec", lambda name: "13" in name)
    with pytest.raises(errors.MissingExtra, match="nvidia-cudnn-cu13"), plugin, GPU.planned_for():
        raise RuntimeError("cuDNN not found.")


def test_other_errors_and_other_targets_stay() -> None:
    with pytest.raises(RuntimeError, match=r"^other"), GPU.planned_for():
        raise RuntimeError("other")
    with pytest.raises(RuntimeError, match=r"^cuDNN"), parse_target("cpu:1").planned_for():
        raise RuntimeError("cuDNN not found.")


@pytest.mark.parametrize(
    "name",
    ["__cudnn$fmhaSoftmax", "__cudnn$fmhaScaleBiasSoftmaxDropoutBackward", "__cudnn$fmhaSoftmaxF8",
     "__op$block_scaled_dot"],
)  # fmt: skip
def test_calls_that_the_compiler_knows_are_lowered(name: str) -> None:
    lowered(lambda q: jax.ffi.ffi_call(name, q)(q), Q)


def test_a_foreign_call_is_refused_by_its_whole_name() -> None:
    with pytest.raises(errors.XformError, match=r"\(__their\$sum\)"):
        lowered(lambda q: jax.ffi.ffi_call("__their$sum", q)(q), Q)


@pytest.mark.parametrize(
    ("workspaces", "text"),
    [
        ([], ""),
        ([64], ""),
        ([0, 64], "not counted: the workspace of cuDNN in 1 call, which only the device can tell"),
        ([0, 0], "not counted: the workspace of cuDNN in 2 calls, which only the device can tell"),
    ],
)
def test_workspaces_that_are_not_known(workspaces: list[int], text: str) -> None:
    result = Shape("f32", (4,))
    call = lambda n: Shape("tuple", elements=(result, Shape("u8", (n,))))
    shapes = [("__cudnn$convForward", call(n)) for n in workspaces] + [("", result), ("f", call(0))]
    instructions = dict(enumerate(mock.Mock(target=target, shape=s) for target, s in shapes))
    assert cudnn.uncounted(mock.Mock(instructions=instructions)) == text
