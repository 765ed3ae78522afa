"""The role of an argument, from its name."""

import pytest

from xform.memory.roles import role


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
