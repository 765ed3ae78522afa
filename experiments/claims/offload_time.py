"""Offload against recompute, and the time of checkpointing, by the roofline of two chips."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from matplotlib.figure import Figure

import xform
from experiments.claims.claim import Claim, Finding, spread, verdict
from experiments.claims.programs import scanned, scanned_inputs
from experiments.timing import paired
from xform.interpret.cost import program_flops
from xform.memory.targets import missing, parse_target
from xform.planner.hardware import GPUS, TPUS, Hardware

CHIPS: dict[str, Hardware] = {"v5e": TPUS["v5e"], "h100": GPUS["h100"]}
TARGETS = {"v5e": "tpu:v5e:1x1", "h100": "gpu:h100"}
WIDTHS = (1024, 4096, 16_384, 65_536)
LENGTH, DEPTH = 2048, 8
COMPILED = (512,)
KEEP = xform.policies.save_everything


def per_byte(width: int, device: Hardware) -> dict[str, float]:
    """Return the seconds for each saved byte, in bfloat16: to recompute it, or to send it and back.

    A result of a product takes 2 w FLOPs for 2 bytes; of an elementwise operation, a read and a
    write; of attention, 4 n FLOPs for 2 bytes. Sending takes the link in both directions.
    """
    speed = device.flops_per_second or 1
    return {
        "product": width / speed,
        "attention": 2 * LENGTH / speed,
        "elementwise": 2 / (device.bytes_per_second or 1),
        "offload": 2 / (device.host_bytes_per_second or 1),
    }


def args(width: int, batch: int, length: int, depth: int) -> tuple[Any, Any]:
    """Return the types of a transformer's weights and batch in bfloat16."""
    half = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    parts = {"qkv": (width, 3 * width), "out": (width, width),
             "up": (width, 4 * width), "down": (4 * width, width)}  # fmt: skip
    return {n: half(depth, *s) for n, s in parts.items()}, half(batch, length, width)


def hidden(width: int) -> dict[str, float]:
    """Return the part of a transformer's saved bytes that the link takes while a step computes."""
    made = args(width, 1, LENGTH, 2)
    saved = xform.plan(scanned(), *made, policy=KEEP, verify=False).saved_bytes
    work = program_flops(xform.grad(scanned(), policy=KEEP), *made)
    return {n: (d.host_bytes_per_second or 1) * work / (d.flops_per_second or 1) / (2 * saved)
            for n, d in CHIPS.items()}  # fmt: skip


def checkpointed(name: str, width: int) -> float | None:
    """Return the time of a step with `jax.checkpoint` around blocks over that of one without.

    It is the roofline of the compiled programs: FLOPs, or the bytes that they move. None without
    the chip's compiler.
    """
    if missing(parse_target(TARGETS[name])):
        return None
    made = args(width, 4, 1024, DEPTH)
    times = [
        xform.memory_analysis(jax.grad(scanned(mark)), *made, target=TARGETS[name]).seconds
        for mark in ("block", "none")
    ]
    return times[0] / times[1] if times[0] and times[1] else None


def here() -> tuple[float, float]:
    """Return the time of the same on this CPU, median of paired ratios, and its FLOPs."""
    made = scanned_inputs(128, 4, 4, 128)
    runs: Any = [jax.jit(jax.grad(scanned(mark))) for mark in ("block", "none")]
    work = [program_flops(jax.grad(scanned(mark)), *made) for mark in ("block", "none")]
    return paired(*runs, made)[0], work[0] / work[1]


def measure(quick: bool) -> Finding:
    """Compute the roofline, and measure the time on this CPU."""
    widths = WIDTHS[:3] if quick else WIDTHS
    costs = {n: {w: per_byte(w, d) for w in widths} for n, d in CHIPS.items()}
    kinds = [k for k in costs["v5e"][widths[0]] if k != "offload"]
    ratio = {n: {k: {w: c["offload"] / c[k] for w, c in by.items()} for k in kinds}
             for n, by in costs.items()}  # fmt: skip
    least = {n: 2 * (d.flops_per_second or 1) / (d.host_bytes_per_second or 1)
             for n, d in CHIPS.items()}  # fmt: skip
    shares = {w: hidden(w) for w in widths}
    full = {n: next((w for w in widths if shares[w][n] >= 1), None) for n in CHIPS}
    chips = {n: {w: r for w in COMPILED if (r := checkpointed(n, w))} for n in TARGETS}
    time, work = here()
    absent = [TARGETS[n] for n, by in chips.items() if not by]
    found = [time, *(r for by in chips.values() for r in by.values())]
    near = all(1.2 <= r <= 1.4 for r in found)
    return Finding(
        [
            Claim(
                "Offloading a value takes less time than recomputing it",
                "Rhu et al., vDNN, arXiv:1602.08124; Beaumont et al., Efficient combination of"
                " rematerialization and offloading, 2021",
                "there and back without overlap: products of more columns than 2 FLOPs per second"
                " / bytes per second of the link: "
                + ", ".join(f"{n} {w:,.0f}" for n, w in least.items()),
                f"seconds to send over seconds to recompute, width {widths[0]:,} to"
                f" {widths[-1]:,}, by the roofline: "
                + "; ".join(
                    f"{n}: "
                    + ", ".join(f"{k} {spread([*by.values()], 1)}" for k, by in kinds_.items())
                    for n, kinds_ in ratio.items()
                ),
                verdict(
                    all(r < 1 for by in ratio.values() for k in by.values() for r in k.values()),
                    "wrong, except for products of more than "
                    + ", ".join(f"{w:,.0f} columns on {n}" for n, w in least.items()),
                ),
            ),
            Claim(
                "... and it is free while the device computes",
                "Rhu et al., vDNN, arXiv:1602.08124",
                "the link moves its bytes per second times the time of a step",
                "part of a transformer's saved bytes, all scores among them, that the link takes"
                " there and back in a step: "
                + "; ".join(
                    f"{n} " + ", ".join(f"{min(by[n], 1):.0%} at {w:,}" for w, by in shares.items())
                    for n in CHIPS
                ),
                verdict(
                    all(s >= 1 for by in shares.values() for s in by.values()),
                    "holds if layers are wide: from "
                    + ", ".join(f"{w:,} on {n}" for n, w in full.items() if w)
                    if any(full.values())
                    else f"wrong up to a width of {widths[-1]:,}",
                ),
            ),
            Claim(
                "Checkpointing costs 30% of wall-clock time",
                "Chen et al., arXiv:1604.06174; practitioners' guides",
                "one more forward pass: FLOPs 4 / 3, less what attention's backward pass reads"
                " anyway; less time where memory traffic bounds a step",
                f"jax.checkpoint around the blocks of a transformer: FLOPs {work:.2f}, time on a"
                f" CPU {time:.2f}; roofline of the compiled step in bfloat16: "
                + "; ".join(
                    f"{n} " + ", ".join(f"{r:.2f} at width {w}" for w, r in by.items())
                    for n, by in chips.items() if by
                )
                + (f"; not compiled here: {', '.join(absent)}" if absent else ""),
                verdict(
                    near,
                    f"holds in FLOPs ({work:.2f}); in time it is {spread(found)} of that without",
                ),
            ),
        ],
        lambda figure: draw(figure, ratio, shares, chips, time),
    )  # fmt: skip


def draw(figure: Figure, ratio: Any, shares: Any, chips: Any, time: float) -> None:
    """Draw the ratios, the part that the link takes, and the time of checkpointing."""
    left, middle, right = figure.subplots(1, 3)
    for i, (name, kinds) in enumerate(ratio.items()):
        for (kind, by), style in zip(kinds.items(), ("o-", "s--", "^:"), strict=True):
            left.loglog([*by], [*by.values()], style, color=f"C{i}", label=f"{name}, {kind}")
        middle.semilogx([*shares], [min(100 * by[name], 100) for by in shares.values()], "o-",
                        label=name)  # fmt: skip
    left.axhline(1, color="gray")
    left.set(xlabel="width", ylabel="offload / recompute, seconds")
    left.legend(frameon=False, fontsize=6)
    middle.set(xlabel="width", ylabel="offload hidden by the step, %", ylim=(0, 105))
    middle.legend(frameon=False, fontsize=7)
    bars = {"CPU": time} | {f"{n}\n{w}": r for n, by in chips.items() for w, r in by.items()}
    right.bar([*bars], [*bars.values()], color="#2b6cb0")
    right.axhline(1.3, color="gray", linestyle="--")
    right.tick_params(axis="x", labelsize=6)
    right.set(ylabel="time with checkpoint / without")
