"""`own_layout`: an identity that separates the layouts of a stack and of its slices."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType

import xform
from tests.identity import DTYPES, is_the_identity, is_transformed_as_nothing
from tests.sharding import stays_where_it_is
from xform.memory.targets import missing, parse_target
from xform.steering.own_layout import own_layout
from xform.steering.settings import Steering

TARGET = "gpu:h100"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (3,), (3, 4), (0, 2)])
def test_is_the_identity(dtype: str, shape: tuple[int, ...]) -> None:
    is_the_identity(own_layout, dtype, shape)


@pytest.mark.parametrize("x", [None, jax.random.split(jax.random.key(0), (2, 3)), jnp.ones(3), 1.0])
def test_other_values_are_returned_as_they_are(x: object) -> None:
    assert own_layout(x) is x


def test_a_value_on_the_host_stays_there() -> None:
    on_host = lambda x: own_layout(jax.device_put(x, jax.memory.Space.Host))
    assert "xform_own_layout" not in str(jax.make_jaxpr(on_host)(jnp.ones((2, 3))))
    assert "xform_own_layout" in str(jax.make_jaxpr(own_layout)(jnp.ones((2, 3))))


def test_under_every_transform() -> None:
    is_transformed_as_nothing(own_layout, jnp.array([[0.3, -0.7, 1.4]]))


def test_is_an_annotation_on_a_gpu_alone() -> None:
    traced = jax.jit(own_layout).trace(jnp.ones((3, 3)))
    text = {p: traced.lower(lowering_platforms=(p,)).as_text() for p in ("cpu", "cuda", "tpu")}
    assert [p for p in text if "annotate_device_placement" in text[p]] == ["cuda"]


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_sharded_values(kind: AxisType) -> None:
    stays_where_it_is(own_layout, kind)


def attention(tokens: int = 512, layers: int = 8) -> tuple:
    """Return the loss of scanned attention layers with grouped heads, and its arguments."""
    kv_heads, group, size = 2, 4, 32
    width = kv_heads * group * size

    def layer(h, p):
        q = jnp.einsum("tm,mkgd->tkgd", h, p["q"])
        k, v = jnp.einsum("tm,nmkd->ntkd", h, p["kv"])
        weights = jax.nn.softmax(jnp.einsum("tkgd,skd->kgts", q, k))
        return h + jnp.einsum("kgts,skd,kgdm->tm", weights, v, p["o"]), None

    def loss(params, x):
        return jnp.mean(lax.scan(layer, x, params)[0].astype(jnp.float32) ** 2)

    shapes = {
        "q": (width, kv_heads, group, size),
        "kv": (2, width, kv_heads, size),
        "o": (kv_heads, group, size, width),
    }
    params = {n: jax.ShapeDtypeStruct((layers, *s), jnp.bfloat16) for n, s in shapes.items()}
    return loss, (params, jax.ShapeDtypeStruct((tokens, width), jnp.bfloat16))


@pytest.mark.slow
def test_no_stack_is_copied_on_a_gpu() -> None:
    if absent := missing(parse_target(TARGET)):
        pytest.skip(f"needs {', '.join(absent)}")
    loss, args = attention()
    stack = 8 * 8 * 512 * 512 * 2  # the attention weights of all layers

    def report():
        gradient = xform.grad(lambda *args: loss(*args), policy="save_everything")
        return xform.memory_analysis(jax.jit(gradient), *args, target=TARGET)

    copies = lambda report: [
        row for row in report.peak if row.bytes >= stack and row.operation == "transpose"
    ]
    assert not copies(separate := report())
    for annotation in (b"MoveToDevice", b"annotate_device_placement"):
        assert annotation not in separate.module  # nothing of it runs
    with Steering(own_layouts=False).used():
        assert copies(together := report())
    assert separate.temp_bytes <= together.temp_bytes - stack // 2
