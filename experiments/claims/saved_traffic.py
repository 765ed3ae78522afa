"""What saved activations cost in time: written in the forward pass, read in the backward pass."""

from __future__ import annotations

import statistics
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from matplotlib.figure import Figure

import xform
from experiments.claims.claim import Claim, Finding, spread, verdict
from experiments.claims.programs import mlp, normal, transformer
from experiments.claims.relu import loss as normalized
from experiments.timing import paired, seconds
from xform.interpret.cost import program_flops
from xform.planner.hardware import GPUS, TPUS

ROWS, WIDTH, DEPTH = 4096, 256, 4
CHIPS = {"v5e": TPUS["v5e"], "h100": GPUS["h100"]}
KEEP = xform.policies.save_everything
# The saved values of each layer: the input of its ReLU, and the output.
SAVED = {"input and output": ("input", "output"), "input": ("input",), "output": ("output",)}


def layers(ws: list[jax.Array], x: jax.Array) -> jax.Array:
    """Compute layers of a product and a ReLU, with a name on the input and output of each ReLU."""
    for w in ws:
        z = checkpoint_name(x @ w, "input")
        x = checkpoint_name(jax.nn.relu(z), "output")
    return jnp.mean(x**2)


def relus(quick: bool) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
    """Return saved bytes, moved bytes and time of each choice, over those of the first."""
    args = [normal(WIDTH, WIDTH, seed=i) for i in range(DEPTH)], normal(ROWS, WIDTH)
    saved, moved, runs = {}, {}, {}
    for name, names in SAVED.items():
        policy = jax.checkpoint_policies.save_only_these_names(*names)
        gradient = xform.grad(layers, policy=policy)
        saved[name] = xform.plan(layers, *args, policy=policy, verify=False).saved_bytes
        moved[name] = xform.memory_analysis(gradient, *args, target="cpu").moved_bytes
        runs[name] = jax.jit(gradient).lower(*args).compile()
    both, *_ = SAVED
    over = lambda by: {n: by[n] / by[both] for n in SAVED}
    n = 5 if quick else 15
    time = {name: paired(run, runs[both], args, n=n)[0] for name, run in runs.items()}
    return over(saved), over(moved), time


def steps(quick: bool) -> dict[str, tuple[float, float, float]]:
    """Return the time of the default over that of saving everything: median and quartiles."""
    stacked = jnp.stack([normal(256, 256, seed=i) for i in range(8)]), normal(4096, 256)
    programs = {
        "normalized layers": (normalized, stacked),
        "MLP": mlp(256, 8, 2048),
        "transformer": transformer(128, 4, 4, 256),
    }
    found = {}
    for name, (loss, args) in programs.items():
        runs: Any = jax.jit(xform.grad(loss)), jax.jit(xform.grad(loss, policy=KEEP))
        found[name] = paired(*runs, args, n=5 if quick else 9)
    return found


def copied() -> float:
    """Return the bytes per second of a large copy: each byte is read and written."""
    x = jnp.ones(2**25, jnp.float32)
    copy: Any = jax.jit(lambda x: x + 1)
    seconds(copy, (x,))
    return 2 * x.nbytes / statistics.median(seconds(copy, (x,)) for _ in range(5))


def shares() -> tuple[float, dict[str, float], int]:
    """Return the part of a step that saved activations need at full bandwidth, and their bytes.

    A step of a transformer: measured here, and by FLOPs alone on chips that run it in bfloat16.
    """
    loss, args = transformer(768, 2, 8, 1024)
    saved = xform.plan(loss, *args, policy=KEEP, verify=False).saved_bytes
    work = program_flops(xform.grad(loss, policy=KEEP), *args)
    chips = {n: (2 * (saved / 2) / (d.bytes_per_second or 1)) / (work / (d.flops_per_second or 1))
             for n, d in CHIPS.items()}  # fmt: skip
    small, args = transformer(128, 4, 8, 256)
    bytes_ = xform.plan(small, *args, policy=KEEP, verify=False).saved_bytes
    run: Any = jax.jit(xform.grad(small, policy=KEEP))
    seconds(run, args)
    step = statistics.median(seconds(run, args) for _ in range(5))
    return 2 * bytes_ / copied() / step, chips, bytes_


def measure(quick: bool) -> Finding:
    """Measure bytes and times on this CPU, and compute chips by the roofline."""
    saved, moved, time = relus(quick)
    shorter = steps(quick)
    here, chips, small = shares()
    elements = ROWS * WIDTH
    written = {n: 1e6 * 2 * 2 * elements / (d.bytes_per_second or 1) for n, d in CHIPS.items()}
    won = [name for name, (_, _, high) in shorter.items() if high < 1]
    every = [here, *chips.values()]
    return Finding(
        [
            Claim(
                "A ReLU that is recomputed from its saved input takes fewer bytes and less time"
                " than one whose output is saved too",
                "Jain et al., Checkmate, arXiv:1910.02653; NVIDIA's performance guides",
                "half of the saved bytes; the output is neither written for later nor read:"
                f" {ROWS} x {WIDTH} in bfloat16 take "
                + ", ".join(f"{t:.0f} µs on {n}" for n, t in written.items()),
                f"on a CPU: {saved['input']:.2f} of the saved bytes, {moved['input']:.2f} of the"
                f" moved bytes, {time['input']:.2f} of the time; with the output alone, which has"
                f" the sign too: {saved['output']:.2f}, {moved['output']:.2f},"
                f" {time['output']:.2f}",
                verdict(
                    saved["input"] < 0.6 and moved["input"] < 1 and time["input"] < 0.98,
                    ("holds in saved bytes; " if saved["input"] < 0.6 else "wrong; ")
                    + f"the moved bytes are {moved['input']:.2f} and the time"
                    f" {time['input']:.2f} of those with both",
                ),
            ),
            Claim(
                "A recompute can shorten a step",
                "Jain et al., Checkmate, arXiv:1910.02653; JAX's documentation of checkpoint",
                "yes, where reading a value takes longer than the operations that make it",
                "time of xform's default over that of saving everything, on a CPU: "
                + ", ".join(
                    f"{n} {r:.2f} ({low:.2f} to {high:.2f})"
                    for n, (r, low, high) in shorter.items()
                ),
                verdict(
                    len(won) == len(shorter),
                    f"holds for {', '.join(won)}" if won else "wrong for these programs on a CPU",
                ),
            ),
            Claim(
                "Writing and reading saved activations takes much of a step's memory bandwidth",
                "Korthikanti et al., arXiv:2205.05198; Ivanov et al., Data movement is all you"
                " need, arXiv:2007.00072",
                "twice the saved bytes over bandwidth times the seconds of a step",
                f"a transformer of width 128, {small / 2**20:.0f} MiB saved, on a CPU, as a part"
                f" of the bandwidth of a copy: {here:.0%}; of width 768 in bfloat16, if FLOPs"
                " alone took time: " + ", ".join(f"{n} {s:.0%}" for n, s in chips.items()),
                verdict(
                    min(every) > 0.25,
                    f"wrong: {spread([100 * s for s in every], 0)}%"
                    if max(every) < 0.25
                    else "holds if FLOPs are fast: "
                    + ", ".join(f"{n} {s:.0%}" for n, s in {"CPU": here, **chips}.items()),
                ),
            ),
        ],
        lambda figure: draw(figure, (saved, moved, time), shorter, {"CPU": here, **chips}),
    )


def draw(figure: Figure, relu: Any, shorter: Any, shares: dict[str, float]) -> None:
    """Draw the three measurements."""
    left, middle, right = figure.subplots(1, 3)
    for i, (name, by) in enumerate(zip(("saved bytes", "moved bytes", "time"), relu, strict=True)):
        left.bar([x + 0.27 * i for x in range(len(by))], [*by.values()], 0.25, label=name)
    left.set_xticks([x + 0.27 for x in range(len(SAVED))],
                    ["both", *list(SAVED)[1:]], fontsize=8)  # fmt: skip
    left.set(xlabel="what is saved of a ReLU", ylabel="over both saved", ylim=(0, 1.6))
    left.legend(frameon=False, fontsize=7)
    middle.bar([*shorter], [r for r, _, _ in shorter.values()], color="#2b6cb0")
    middle.axhline(1, color="gray")
    middle.tick_params(axis="x", labelrotation=20, labelsize=7)
    middle.set(ylabel="time, default / saving everything")
    right.bar([*shares], [100 * s for s in shares.values()], color="#2b6cb0")
    right.set(ylabel="bandwidth for saved activations, %")
