"""`experiments.unmodified.reports`: three of its programs, and its list."""

import jax
import pytest

from experiments.unmodified.reports.run import REPORTS, measured, row


# With `x.at[i].set(y)`, a scan once stacked masks of `x`: 4.95 and 1.97 of jax.grad's bytes.
@pytest.mark.parametrize(
    "name", ["rows copied in a loop", "rows written if valid", "exponential smoothing"]
)
def test_a_program_takes_no_more_than_under_jax_grad(name: str) -> None:
    found = measured(REPORTS[name].make())
    assert found["xform.grad"] <= 1.05 * found["jax.grad"]
    assert found["differs"] < 1e-5


@pytest.mark.parametrize("name", REPORTS)
def test_a_program_is_a_loss(name: str) -> None:
    loss, args = REPORTS[name].make()
    assert jax.eval_shape(loss, *args).shape == ()


def test_a_row_links_to_the_report() -> None:
    cells = row("waves", {"jax.grad": 2**21, "xform.grad": 2**20, "differs": 1e-7})
    url = "https://github.com/ymahlau/fdtdx/issues/58"
    assert cells == ["waves", f"[ymahlau/fdtdx#58]({url})", "2.00", "0.50", "1e-07"]
