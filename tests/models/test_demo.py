"""The demo's table and pictures, on a model that compiles in a second."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from models import demo
from models.memory_table import measure, table
from models.policies import POLICIES
from tests.models.micro import MODEL


def test_memory_table_has_every_policy_in_both_layouts() -> None:
    rows = measure(MODEL, batch=8)
    assert len(rows) == 1 + len(POLICIES)
    everything, nothing = rows[1], rows[-1]
    for layout in ("scanned", "unrolled"):
        assert everything.flops_recomputed[layout] == 0
        assert nothing.flops_recomputed[layout] > 0
    assert nothing.temp_bytes["scanned"] < everything.temp_bytes["scanned"]
    console = Console(file=io.StringIO(), width=120)
    console.print(table(rows, "title"))
    assert "save_dots_with_no_batch_dims" in console.file.getvalue()


def test_demo_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "MODEL", MODEL)
    result = CliRunner().invoke(demo.app, ["--out", str(tmp_path), "--steps", "6"])
    assert result.exit_code == 0, result.output
    results = json.loads((tmp_path / "results.json").read_text())
    bits = results["validation_bits_per_byte"]
    assert bits["last"] < bits["first"]
    for name in ("loss.png", "memory.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
