"""The output of a run, on a terminal and elsewhere."""

import pytest

from models.train.display import Output


def test_a_notebook_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jupyter sets FORCE_COLOR for commands whose output it shows."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert not Output().is_terminal
