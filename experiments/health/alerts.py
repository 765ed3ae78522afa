"""Do the limits of a stream of health reports stay silent while models train, and alert otherwise?

python -m experiments.health.alerts [--again]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from experiments.health.healthy import STEPS, compiled
from experiments.health.presets import PRESETS
from experiments.report import keep, known, write_table
from xform.diagnosis import Alert, HealthStream
from xform.diagnosis.alerts import sizes_of
from xform.diagnosis.row import LayerHealth

HERE = Path(__file__).parent
FILE = HERE / "alerts.json"
SEED, EVERY, PLANTED_AT, FACTOR = 2000, 10, 75, 1000.0


def train(name: str, factor: float) -> tuple[list[Alert], list[list[LayerHealth]]]:
    """Train a preset with updates times `factor` from step 75 on; return alerts and reports."""
    preset, diagnosis, step, adam = compiled(name)
    key = jax.random.key(SEED)
    params = preset.init(key)
    state, alerts, reports = adam.init(params), list[Alert](), list[list[LayerHealth]]()
    stream = HealthStream(diagnosis, every=EVERY, on_alert=alerts.append)
    for i in range(STEPS):
        batch = preset.batch(jax.random.fold_in(key, i))
        now = factor if i >= PLANTED_AT else 1.0
        params, state, value, readings = step(params, state, batch, now)
        if stream.due(i):
            stream.write(i, value, readings)
            reports.append(diagnosis.with_verdicts(jax.device_get(readings)))
    return alerts, reports


def largest_growth(reports: Sequence[Sequence[LayerHealth]], index: int, window: int = 10) -> float:
    """Return the largest factor of a size from its median in the reports before."""
    most = 0.0
    for i in range(1, len(reports)):
        sizes = [sizes_of(rows) for rows in reports[max(0, i - window) : i]]
        for key, now in sizes_of(reports[i]).items():
            before = sorted(s[key][index] for s in sizes if key in s)
            middle = before[len(before) // 2] if before else 0.0
            most = max(most, now[index] / middle) if middle else most
    return most


def measure(name: str) -> dict[str, Any]:
    """Measure a model without a fault, and with a learning rate that is suddenly too high."""
    alerts, reports = train(name, 1.0)
    ratios = [row.update_to_weight for rows in reports for row in rows]
    planted, _ = train(name, FACTOR)
    return {
        "alerts": list(map(str, alerts)),
        "update": max(x for x in ratios if x is not None),
        "activation": largest_growth(reports, 0),
        "gradient": largest_growth(reports, 1),
        "planted": sorted({alert.cause for alert in planted if alert.step == 80}),
        "too_early": [str(alert) for alert in planted if alert.step < PLANTED_AT],
    }


def main() -> None:
    """Measure what is missing, keep the results, and print the table."""
    again = "--again" in sys.argv
    for name in PRESETS:
        if again or name not in known(FILE):
            print(name, keep(FILE, name, measure(name))[name], flush=True)
    rows = [[name, "; ".join(x["alerts"]) or "none", *(f"{x[n]:.2g}" for n in
             ("update", "activation", "gradient")), ", ".join(x["planted"]) or "none"]
            for name, x in known(FILE).items()]  # fmt: skip
    head = ["model", "alerts", "largest update / weight", "activation growth", "gradient growth",
            "alerts with 1000 times the updates"]  # fmt: skip
    write_table(HERE, head, rows, "alerts")


if __name__ == "__main__":
    main()
