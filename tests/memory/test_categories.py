"""The colours of categories can be told apart, also with colour vision deficiencies."""

import itertools

import numpy as np
import pytest

from xform.memory.categories import CATEGORIES, REST, category

# Linear red, green and blue as seen without one kind of cone.
# Source: Machado, Oliveira, Fernandes, "A physiologically-based model for simulation of color
# vision deficiency", 2009, table 1, severity 1.
EYES = {
    "all cones": np.eye(3),
    "no red": [[0.1523, 1.0526, -0.2049], [0.1145, 0.7863, 0.0992], [-0.0039, -0.0481, 1.0520]],
    "no green": [[0.3673, 0.8606, -0.2280], [0.2801, 0.6725, 0.0474], [-0.0118, 0.0429, 0.9689]],
    "no blue": [[1.2555, -0.0767, -0.1788], [-0.0784, 0.9308, 0.1476], [0.0047, 0.6914, 0.3039]],
}
TO_XYZ = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
GROUND = {"light": "#ffffff", "dark": "#17191e"}


def lab(color: str, eye: str) -> np.ndarray:
    """Return CIE L*a*b* of a colour as an eye sees it."""
    rgb = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    xyz = TO_XYZ @ np.clip(EYES[eye] @ linear, 0, 1) / [0.9505, 1, 1.089]
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("eye", EYES)
@pytest.mark.parametrize("theme", GROUND)
def test_colours_differ(theme: str, eye: str) -> None:
    colors = {c.name: getattr(c, theme) for c in (*CATEGORIES, REST)} | {"ground": GROUND[theme]}
    seen = {name: lab(color, eye) for name, color in colors.items()}
    for (a, x), (b, y) in itertools.combinations(seen.items(), 2):
        assert np.linalg.norm(x - y) > 14, (a, b)


def test_a_category_that_is_not_known_is_the_rest() -> None:
    assert category("activation").name == "activation"
    assert category("") is category("mystery") is REST
