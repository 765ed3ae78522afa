"""Losses and metrics against their formulas in NumPy."""

from typing import Any

import jax
import numpy as np
import pytest

from models.nets.objectives import OBJECTIVES
from tests.models.examples import CLASSES, FEATURES, MODELS, SIDE
from tests.models.nets.sizes import drawn

RNG = np.random.default_rng(0)
IMAGE = RNG.integers(0, 256, (4, SIDE, SIDE, 3), np.uint8)


@pytest.mark.parametrize(("name", "labels"), [("resnet", (4,)), ("unet", (4, SIDE, SIDE))])
def test_the_loss_of_classes_is_that_of_the_right_ones(name: str, labels: Any) -> None:
    label = RNG.integers(0, CLASSES, labels).astype(np.int32)
    model = drawn(MODELS[name])
    model.eval()
    of = OBJECTIVES[type(MODELS[name])]
    logits = np.asarray(model(IMAGE.astype(np.float32) / 127.5 - 1), np.float64)
    exponentials = np.exp(logits)
    shares = exponentials / exponentials.sum(-1, keepdims=True)
    right = np.take_along_axis(shares, label[..., None], -1)
    loss, measures = of.loss(model, {"image": IMAGE, "label": label}, None, False)
    np.testing.assert_allclose(loss, -np.log(right).mean(), rtol=1e-5)
    np.testing.assert_allclose(measures["accuracy"], (logits.argmax(-1) == label).mean(), rtol=1e-6)
    np.testing.assert_allclose(of.output(model, IMAGE), logits, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["lstm", "ode"])
def test_the_loss_of_series_is_of_the_next_moment(name: str) -> None:
    series = RNG.normal(size=(3, 7, FEATURES)).astype(np.float32)
    model, of = drawn(MODELS[name]), OBJECTIVES[type(MODELS[name])]
    said = np.asarray(model(series[:, :-1]), np.float64)
    loss, measures = of.loss(model, series, None, True)
    np.testing.assert_allclose(loss, np.mean((said - series[:, 1:]) ** 2), rtol=1e-5)
    assert not measures
    assert said.shape == (3, 6, FEATURES)


def test_dropout_is_by_the_key() -> None:
    config = MODELS["vit"].__class__(SIDE, 4, 16, 2, 2, 32, CLASSES, dropout=0.5)
    model, of = drawn(config), OBJECTIVES[type(config)]
    batch = {"image": IMAGE, "label": np.zeros(4, np.int32)}
    keys = [None, jax.random.key(0), jax.random.key(1)]
    assert len({float(of.loss(model, batch, key, True)[0]) for key in keys}) == 3
