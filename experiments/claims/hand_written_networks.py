"""Backward passes written by hand in NumPy, of an MLP, a ResNet and an RNN, against `grad`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

import xform
from experiments.claims.claim import Claim, Finding, verdict
from experiments.claims.programs import normal

ROWS, WIDTH, DEPTH, CLASSES, SIZE, STEPS = 32, 48, 4, 10, 8, 20
EPSILON = 1e-5
Params = dict[str, Any]


def draws(seed: int, **shapes: tuple[int, ...]) -> Params:
    """Return parameters of these shapes."""
    return {n: np.asarray(normal(*s, seed=seed + i)) for i, (n, s) in enumerate(shapes.items())}


def entropy(logits: jax.Array, labels: Any) -> jax.Array:
    """Compute the mean cross-entropy."""
    rows = jax.nn.log_softmax(logits)
    return -jnp.mean(jnp.take_along_axis(rows, labels[:, None], 1))


def entropy_back(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return the gradient of the cross-entropy by its logits: (softmax - one hot) / rows."""
    e = np.exp(logits - logits.max(1, keepdims=True))
    return (e / e.sum(1, keepdims=True) - np.eye(CLASSES)[labels]) / len(labels)


def mlp(p: Params, x: Any, labels: Any) -> jax.Array:
    """Compute the loss of dense layers of tanh."""
    for w, b in zip(p["w"], p["b"], strict=True):
        x = jnp.tanh(x @ w + b)
    return entropy(x @ p["head"], labels)


def mlp_back(p: Params, x: np.ndarray, labels: np.ndarray) -> Params:
    """Compute its gradient."""
    inputs = [x]
    for w, b in zip(p["w"], p["b"], strict=True):
        inputs.append(np.tanh(inputs[-1] @ w + b))
    back = entropy_back(inputs[-1] @ p["head"], labels)
    g: Params = {"head": inputs[-1].T @ back, "w": [], "b": []}
    back = back @ p["head"].T
    for w, h, out in zip(p["w"][::-1], inputs[-2::-1], inputs[::-1], strict=False):
        back = back * (1 - out**2)
        g["w"].insert(0, h.T @ back)
        g["b"].insert(0, back.sum(0))
        back = back @ w.T
    return g | {"w": np.stack(g["w"]), "b": np.stack(g["b"])}


def resnet(p: Params, x: Any, labels: Any) -> jax.Array:
    """Compute the loss of residual blocks: convolution, batch norm, ReLU, convolution."""
    names = ("NHWC", "HWIO", "NHWC")
    conv = lambda x, w: jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=names)
    for a, b, scale, shift in zip(p["a"], p["b"], p["scale"], p["shift"], strict=True):
        y = conv(x, a)
        y = (y - y.mean((0, 1, 2))) / jnp.sqrt(y.var((0, 1, 2)) + EPSILON)
        x = x + conv(jax.nn.relu(y * scale + shift), b)
    return entropy(x.mean((1, 2)) @ p["head"], labels)


def patches(x: np.ndarray) -> np.ndarray:
    """Return the three by three patch of each pixel, `[B, H, W, 3, 3, C]`."""
    wide = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    view = np.lib.stride_tricks.sliding_window_view(wide, (3, 3), (1, 2))
    return np.moveaxis(view, 3, 5)


def conv_back(x: np.ndarray, w: np.ndarray, ct: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the cotangents of a convolution's input and of its kernel."""
    turned = np.swapaxes(w[::-1, ::-1], 2, 3)
    of_x = np.einsum("bhwijo,ijoc->bhwc", patches(ct), turned, optimize=True)
    return of_x, np.einsum("bhwijc,bhwo->ijco", patches(x), ct, optimize=True)


def resnet_back(p: Params, x: np.ndarray, labels: np.ndarray) -> Params:
    """Compute its gradient."""
    over, kept = (0, 1, 2), []
    forward = lambda x, w: np.einsum("bhwijc,ijco->bhwo", patches(x), w, optimize=True)
    for a, b, scale, shift in zip(p["a"], p["b"], p["scale"], p["shift"], strict=True):
        y = forward(x, a)
        root = np.sqrt(y.var(over) + EPSILON)
        normed = (y - y.mean(over)) / root
        hidden = np.maximum(normed * scale + shift, 0)
        kept.append((x, a, b, scale, root, normed, hidden))
        x = x + forward(hidden, b)
    pooled = x.mean((1, 2))
    back = entropy_back(pooled @ p["head"], labels)
    rows: Params = {"a": [], "b": [], "scale": [], "shift": []}
    g: Params = {"head": pooled.T @ back}
    back = np.broadcast_to((back @ p["head"].T)[:, None, None] / SIZE**2, x.shape)
    for x, a, b, scale, root, normed, hidden in reversed(kept):
        ct, of_b = conv_back(hidden, b, back)
        ct = ct * (hidden > 0)
        of_scale, of_shift = (ct * normed).sum(over), ct.sum(over)
        ct = ct * scale
        ct = (ct - ct.mean(over) - normed * (ct * normed).mean(over)) / root
        of_x, of_a = conv_back(x, a, ct)
        back = back + of_x  # the path around the block, and the path through it
        for name, value in (("a", of_a), ("b", of_b), ("scale", of_scale), ("shift", of_shift)):
            rows[name].insert(0, value)
    return g | {name: np.stack(values) for name, values in rows.items()}


def rnn(p: Params, x: Any, labels: Any) -> jax.Array:
    """Compute the loss of a recurrent network at its last step; `w` and `u` may differ by step."""
    step = lambda h, xs: (jnp.tanh(xs[0] @ xs[1] + h @ xs[2]), None)
    each = lambda w: w if w.ndim == 3 else jnp.broadcast_to(w, (STEPS, *w.shape))
    h, _ = jax.lax.scan(step, jnp.zeros((ROWS, WIDTH)), (x, each(p["w"]), each(p["u"])))
    return entropy(h @ p["head"], labels)


def rnn_back(p: Params, x: np.ndarray, labels: np.ndarray) -> Params:
    """Compute its gradient. The gradients of all steps add up, because the steps share weights."""
    states = [np.zeros((ROWS, WIDTH))]
    for xs in x:
        states.append(np.tanh(xs @ p["w"] + states[-1] @ p["u"]))
    back = entropy_back(states[-1] @ p["head"], labels)
    g: Params = {"head": states[-1].T @ back, "w": 0.0, "u": 0.0}
    back = back @ p["head"].T
    for xs, before, after in zip(x[::-1], states[-2::-1], states[:0:-1], strict=True):
        back = back * (1 - after**2)
        g["w"], g["u"] = g["w"] + xs.T @ back, g["u"] + before.T @ back
        back = back @ p["u"].T
    return g


def cases() -> dict[str, tuple[Callable[..., Any], Callable[..., Params], Params, np.ndarray]]:
    """Return a loss, its gradient by hand, parameters and inputs of each network."""
    square, kernel = (DEPTH, WIDTH, WIDTH), (DEPTH, 3, 3, CLASSES, CLASSES)
    dense = draws(0, w=square, b=(DEPTH, WIDTH), head=(WIDTH, CLASSES))
    blocks = draws(9, a=kernel, b=kernel, scale=(DEPTH, CLASSES), shift=(DEPTH, CLASSES),
                   head=(CLASSES, CLASSES))  # fmt: skip
    shared = draws(20, w=(WIDTH, WIDTH), u=(WIDTH, WIDTH), head=(WIDTH, CLASSES))
    draw = lambda *shape: np.asarray(jax.random.normal(jax.random.key(7), shape))
    return {
        "MLP": (mlp, mlp_back, dense, draw(ROWS, WIDTH)),
        "ResNet": (resnet, resnet_back, blocks, draw(ROWS, SIZE, SIZE, CLASSES)),
        "RNN": (rnn, rnn_back, shared, draw(STEPS, ROWS, WIDTH)),
    }


def apart(ours: Params, theirs: Params) -> float:
    """Return the largest relative distance of a parameter's gradients."""
    return max(float(np.linalg.norm(ours[n] - theirs[n]) / np.linalg.norm(theirs[n]))
               for n in theirs)  # fmt: skip


def measure(quick: bool) -> Finding:
    """Measure in float64."""
    labels = np.arange(ROWS) % CLASSES
    with jax.enable_x64():
        made = cases()
        found = {n: apart(jax.jit(xform.grad(loss))(p, x, labels), back(p, x, labels))
                 for n, (loss, back, p, x) in made.items()}  # fmt: skip
        loss, _, p, x = made["RNN"]
        together = xform.grad(loss)(p, x, labels)
        tiled = {n: np.broadcast_to(p[n], (STEPS, *p[n].shape)) for n in ("w", "u")}
        each = xform.grad(loss)(p | tiled, x, labels)
        sums = apart(
            {n: np.asarray(together[n]) for n in tiled}, {n: each[n].sum(0) for n in tiled}
        )
        last = [float(np.linalg.norm(step) / np.linalg.norm(together["w"])) for step in each["w"]]
    return Finding(
        [
            Claim(
                "Backward passes written by hand of an MLP, a ResNet and an RNN equal grad",
                "exercise sheets; Griewank and Walther, Evaluating Derivatives, chapter 3",
                "the same gradient to rounding, in float64",
                "norm of the difference over the norm, the worst parameter: "
                + ", ".join(f"{n} {d:.0e}" for n, d in found.items()),
                verdict(max(found.values()) < 1e-12, "wrong"),
            ),
            Claim(
                "The gradient of an RNN's weights is the sum over its steps",
                "Werbos, Backpropagation through time, 1990",
                f"weights of {STEPS} steps that are equal but apart: their gradients add up to that"
                " of shared weights",
                f"{sums:.0e} apart, relative; the first step's part of the norm is {last[0]:.0e},"
                f" the last one's {last[-1]:.0e}",
                verdict(sums < 1e-12, "wrong"),
            ),
        ],
        lambda figure: draw(figure, found, last),
    )


def draw(figure: Figure, found: dict[str, float], last: list[float]) -> None:
    """Draw the distances, and the part of each step in the gradient of the RNN."""
    left, right = figure.subplots(1, 2)
    left.bar([*found], [*found.values()], color="#2b6cb0")
    left.axhline(1e-12, color="#c53030", linestyle="--", label="the bound")
    left.set(yscale="log", ylabel="relative distance of gradients, float64")
    left.legend(frameon=False)
    right.semilogy(range(1, len(last) + 1), last, "o-")
    right.set(xlabel="step of the RNN", ylabel="norm of its part / norm of the sum")
