"""Five networks in plain JAX, in each of which one layer can be made to fail.

Faults are part of the parameters and data, so one compiled program covers them all. The exception
is the missing residual path (`bare`), which needs a program of its own. In the recurrent network a
layer is a step, and that fault is in the data too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

FAULTS = ("up", "down", "dead", "flat", "bare", "nan")
SAID = {
    "up": "weights times 10 to 100",
    "down": "weights by 10 to 100",
    "dead": "bias of a ReLU at -100",
    "flat": "a saturated sigmoid",
    "bare": "no residual path",
    "nan": "a division 0 / 0",
}


@dataclasses.dataclass(frozen=True)
class Network:
    """A network.

    Attributes:
      init: makes parameters from a key.
      loss: a function of parameters, batch, and the block without a residual path (-1 for none).
      batch: makes a batch from a key.
      first, last: layers or blocks `first` to `last - 1` may fail.
      break_: returns parameters and batch with a fault at a layer, with a given strength.
      there: whether a row of a report belongs to a layer.
      faults: the faults that it can have.
    """

    init: Callable[[Any], Any]
    loss: Callable[[Any, Any, int], Any]
    batch: Callable[[Any], Any]
    first: int
    last: int
    break_: Callable[[Any, Any, str, int, float], Any]
    there: Callable[[Any, int], bool]
    faults: tuple[str, ...] = FAULTS


def normal(key: Any, shape: tuple[int, ...], gain: float = 1.0) -> Any:
    """Return weights of variance gain^2 / fan-in; all axes except the last are inputs."""
    fan = 1
    for n in shape[:-1]:
        fan *= n
    return jax.random.normal(key, shape) * gain * fan**-0.5


def activated(z: Any, fault: Any) -> Any:
    """Apply a ReLU, or what `fault` replaces it by: a saturated sigmoid, or a division by zero."""
    flat, divisor = fault
    steep = jax.nn.sigmoid(40 * z + 20 * jnp.sign(z))
    return jnp.where(flat > 0, steep, jax.nn.relu(z)) / divisor


def sound(n: int) -> Any:
    """Return the arguments of `activated` for `n` layers without a fault."""
    return jnp.stack([jnp.zeros(n), jnp.ones(n)], 1)


def with_fault(faults: Any, fault: str, at: int) -> Any:
    """Return these arguments with a fault at one layer."""
    return faults.at[at].set({"flat": (1.0, 1.0), "nan": (0.0, 0.0)}[fault])


def entropy(logits: Any, labels: Any) -> Any:
    """Compute the mean cross-entropy."""
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1))


def _broken(params: Any, batch: Any, layers: str, fault: str, at: int, by: float,
            names: tuple[str, str]) -> Any:  # fmt: skip
    """Return parameters and batch with a fault at a layer; `names` are its weight and bias."""
    if fault == "bare":
        return params, batch
    if fault in ("flat", "nan"):
        data, faults = batch
        return params, (data, with_fault(faults, fault, at))
    layer, (weight, bias) = dict(params[layers][at]), names
    if fault == "dead":
        layer[bias] = layer[bias] - 100
    else:
        layer[weight] = layer[weight] * (by if fault == "up" else 1 / by)
    return {**params, layers: [*params[layers][:at], layer, *params[layers][at + 1 :]]}, batch


# A perceptron of 50 layers, without and with residual paths.

WIDTH, DEPTH, CLASSES, EXAMPLES = 64, 50, 10, 32


def _orthogonal(key: Any, n: int, gain: float) -> Any:
    return jnp.linalg.qr(jax.random.normal(key, (n, n)))[0] * gain


def _mlp_init(key: Any, gain: float) -> Any:
    keys = jax.random.split(key, DEPTH + 1)
    layers = [{"w": _orthogonal(k, WIDTH, gain), "b": jnp.zeros(WIDTH)} for k in keys[:-1]]
    return {"layers": layers, "head": normal(keys[-1], (WIDTH, CLASSES))}


def _mlp_loss(params: Any, batch: Any, bare: int) -> Any:
    (h, labels), faults = batch
    for i, layer in enumerate(params["layers"]):
        h = activated(h @ layer["w"] + layer["b"], faults[i])
    return entropy(h @ params["head"], labels)


def _residual_loss(params: Any, batch: Any, bare: int) -> Any:
    (h, labels), faults = batch
    for i, layer in enumerate(params["layers"]):
        new = activated(h @ layer["w"] + layer["b"], faults[i])
        h = new if i == bare else h + new
    return entropy(h @ params["head"], labels)


def _vectors(key: Any) -> Any:
    a, b = jax.random.split(key)
    labels = jax.random.randint(a, (EXAMPLES,), 0, CLASSES)
    means = jax.random.normal(jax.random.key(7), (CLASSES, WIDTH))
    return (means[labels] + 0.5 * jax.random.normal(b, (EXAMPLES, WIDTH)), labels), sound(DEPTH)


def _mlp_break(params: Any, batch: Any, fault: str, at: int, by: float) -> Any:
    return _broken(params, batch, "layers", fault, at, by, ("w", "b"))


def _mlp(loss: Any, gain: float, faults: tuple[str, ...]) -> Network:
    there = lambda row, i: row.name == f"layers.{i}"
    return Network(lambda key: _mlp_init(key, gain), loss, _vectors, 1, DEPTH - 1, _mlp_break,
                   there, faults)  # fmt: skip


# A residual network of convolutions, three stages of three blocks.

WIDTHS, BLOCKS, PIXELS = (8, 16, 32), 3, 16


def _conv(x: Any, w: Any, stride: int = 1) -> Any:
    sides = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=sides)


def _normed(x: Any, scale: Any, bias: Any) -> Any:
    mean = x.mean((0, 1, 2))
    return (x - mean) * jax.lax.rsqrt(x.var((0, 1, 2)) + 1e-5) * scale + bias


def _resnet_init(key: Any) -> Any:
    keys = iter(jax.random.split(key, 64))
    conv = lambda n, a, b: normal(next(keys), (n, n, a, b), 2**0.5)
    norm = lambda n: {"scale": jnp.ones(n), "bias": jnp.zeros(n)}
    blocks: list[Any] = []
    width = WIDTHS[0]
    for out in WIDTHS:
        for _ in range(BLOCKS):
            one = {f"{k}_{i}": v for i in (1, 2) for k, v in norm(out).items()}
            one |= {"conv_1": conv(3, width, out), "conv_2": conv(3, out, out)}
            if out != width:
                one["shortcut"] = conv(1, width, out)
            blocks.append(one)
            width = out
    head = normal(next(keys), (width, CLASSES))
    return {"stem": conv(3, 3, WIDTHS[0]), "blocks": blocks, "head": head}


def _resnet_loss(params: Any, batch: Any, bare: int) -> Any:
    (x, labels), faults = batch
    x = jax.nn.relu(_conv(x, params["stem"]))
    for i, p in enumerate(params["blocks"]):
        stride = 2 if "shortcut" in p else 1
        y = _normed(_conv(x, p["conv_1"], stride), p["scale_1"], p["bias_1"])
        y = _normed(_conv(activated(y, faults[i]), p["conv_2"]), p["scale_2"], p["bias_2"])
        if "shortcut" in p:
            x = _conv(x, p["shortcut"], stride)
        x = jax.nn.relu(y if i == bare else x + y)
    return entropy(x.mean((1, 2)) @ params["head"], labels)


def _images(key: Any) -> Any:
    a, b = jax.random.split(key)
    labels = jax.random.randint(a, (16,), 0, CLASSES)
    means = jax.random.normal(jax.random.key(8), (CLASSES, PIXELS, PIXELS, 3))
    images = means[labels] + 0.5 * jax.random.normal(b, (16, PIXELS, PIXELS, 3))
    return (images, labels), sound(len(WIDTHS) * BLOCKS)


def _resnet_break(params: Any, batch: Any, fault: str, at: int, by: float) -> Any:
    return _broken(params, batch, "blocks", fault, at, by, ("conv_1", "bias_1"))


RESNET = Network(
    _resnet_init, _resnet_loss, _images, 1, len(WIDTHS) * BLOCKS - 1, _resnet_break,
    lambda row, i: row.name.startswith(f"blocks.{i}."),
)  # fmt: skip

# A recurrent network of 200 steps, judged at each.

STEPS, STATE, SEEN = 200, 32, 8


def _rnn_init(key: Any) -> Any:
    a, b, c = jax.random.split(key, 3)
    return {"seen": normal(a, (SEEN, STATE)), "state": normal(b, (STATE, STATE)),
            "bias": jnp.zeros(STATE), "out": normal(c, (STATE, 1))}  # fmt: skip


def _rnn_loss(params: Any, batch: Any, bare: int) -> Any:
    def step(h: Any, x: Any) -> Any:
        scale, bias, keep, *fault = x["faults"]
        z = scale * (x["seen"] @ params["seen"] + h @ params["state"] + params["bias"]) + bias
        h = keep * 0.8 * h + 0.2 * activated(z, fault)
        return h, h

    series, aim = batch
    _, states = jax.lax.scan(step, jnp.zeros((EXAMPLES, STATE)), series)
    return jnp.mean((states @ params["out"] - aim) ** 2)


def _series(key: Any) -> Any:
    seen = jax.random.normal(key, (STEPS, EXAMPLES, SEEN))
    aim = jnp.cumsum(seen[..., :1], 0) * 0.1
    ones, zeros = jnp.ones(STEPS), jnp.zeros(STEPS)
    return {"seen": seen, "faults": jnp.stack([ones, zeros, ones, zeros, ones], 1)}, aim


def _rnn_break(params: Any, batch: Any, fault: str, at: int, by: float) -> Any:
    series, aim = batch
    column, value = {"up": (0, by), "down": (0, 1 / by), "dead": (1, -100.0), "bare": (2, 0.0),
                     "flat": (3, 1.0), "nan": (4, 0.0)}[fault]  # fmt: skip
    faults = series["faults"].at[at, column].set(value)
    return params, ({**series, "faults": faults}, aim)


RNN = Network(_rnn_init, _rnn_loss, _series, 20, STEPS - 1, _rnn_break,
              lambda row, i: row.trip == (i,))  # fmt: skip

# A decoder of 6 layers.

VOCAB, CONTEXT, EMBED, HEADS, LAYERS = 64, 32, 64, 4, 6


def _decoder_init(key: Any) -> Any:
    keys = iter(jax.random.split(key, 8 * LAYERS + 3))
    small = (2 * LAYERS) ** -0.5
    make = lambda *shape, gain=1.0: normal(next(keys), shape, gain)
    layers = [
        {"q": make(EMBED, EMBED), "k": make(EMBED, EMBED), "v": make(EMBED, EMBED),
         "mix": make(EMBED, EMBED, gain=small), "up": make(EMBED, 4 * EMBED, gain=2**0.5),
         "bias": jnp.zeros(4 * EMBED), "down": make(4 * EMBED, EMBED, gain=small)}
        for _ in range(LAYERS)
    ]  # fmt: skip
    table = jax.random.normal(next(keys), (VOCAB, EMBED)) * 0.1
    places = jax.random.normal(next(keys), (CONTEXT, EMBED)) * 0.1
    return {"table": table, "places": places, "layers": layers, "head": make(EMBED, VOCAB)}


def _layer_norm(x: Any) -> Any:
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


def _attention(p: Any, x: Any) -> Any:
    apart = lambda y: y.reshape(*y.shape[:2], HEADS, -1).swapaxes(1, 2)
    q, k, v = (apart(x @ p[name]) for name in "qkv")
    scores = q @ k.swapaxes(2, 3) * (EMBED // HEADS) ** -0.5
    scores = jnp.where(jnp.tril(jnp.ones((CONTEXT, CONTEXT), bool)), scores, -jnp.inf)
    return (jax.nn.softmax(scores) @ v).swapaxes(1, 2).reshape(x.shape)


def _decoder_loss(params: Any, batch: Any, bare: int) -> Any:
    tokens, faults = batch
    x = params["table"][tokens[:, :-1]] + params["places"]
    for i, p in enumerate(params["layers"]):
        mixed = _attention(p, _layer_norm(x)) @ p["mix"]
        x = mixed if i == bare else x + mixed
        hidden = activated(_layer_norm(x) @ p["up"] + p["bias"], faults[i])
        x = x + hidden @ p["down"]
    return entropy(_layer_norm(x) @ params["head"], tokens[:, 1:])


def _tokens(key: Any) -> Any:
    a, b = jax.random.split(key)
    start = jax.random.randint(a, (16, 1), 0, VOCAB)
    tokens = (start + jax.random.randint(b, (16, 1), 1, 5) * jnp.arange(CONTEXT + 1)) % VOCAB
    return tokens, sound(LAYERS)


def _decoder_break(params: Any, batch: Any, fault: str, at: int, by: float) -> Any:
    return _broken(params, batch, "layers", fault, at, by, ("up", "bias"))


DECODER = Network(_decoder_init, _decoder_loss, _tokens, 1, LAYERS - 1, _decoder_break,
                  lambda row, i: row.name.startswith(f"layers.{i}."))  # fmt: skip

PLAIN_FAULTS = tuple(f for f in FAULTS if f != "bare")
NETWORKS = {
    "MLP-50": _mlp(_mlp_loss, 2**0.5, PLAIN_FAULTS),
    "MLP-50, residual": _mlp(_residual_loss, 0.2, FAULTS),
    "ResNet": RESNET,
    "RNN-200": RNN,
    "transformer": DECODER,
}
