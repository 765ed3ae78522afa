"""The demo's table and pictures, on a model that compiles in a second."""

import dataclasses
import json
from pathlib import Path

import pytest

from models.run import demo
from models.run.memory_table import POLICIES
from tests.models.micro import MODEL


@pytest.mark.slow
def test_demo_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "MODEL", dataclasses.replace(MODEL, vocab=300))
    monkeypatch.setattr(demo, "BATCH", 4)
    flags = ["--out", str(tmp_path), "--steps", "12", "--policy", "budget:2MiB"]
    assert demo.main(flags) == 0

    results = json.loads((tmp_path / "results.json").read_text())
    bits = results["validation_bits_per_byte"]
    assert bits["last"] < bits["first"]
    peaks = results["peak_bytes_of_a_step"]
    assert peaks["budget:2MiB"] <= 2 * 2**20
    for name in ("loss.png", "memory.png", "peak.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")

    memory = results["memory"]
    policies = [f"xform.grad, {policy}" for policy in POLICIES]
    assert list(memory) == ["jax.grad", "xform.grad", *policies]
    everything, nothing = memory["xform.grad, save_everything"], memory["xform.grad, save_nothing"]
    for layout in ("scanned", "unrolled"):
        assert everything["flops_recomputed"][layout] == 0
        assert nothing["flops_recomputed"][layout] > 0
    assert nothing["temp_bytes"]["scanned"] < everything["temp_bytes"]["scanned"]
