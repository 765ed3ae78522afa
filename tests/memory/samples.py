"""Synthetic reports to draw: steps of a transformer of any depth, always the same."""

from __future__ import annotations

from typing import Any

GIB = 2**30
WIDTH, HEADS, TOKENS = 1024, 16, 8192
DENSE = {"q": (WIDTH, WIDTH), "k": (WIDTH, WIDTH), "v": (WIDTH, WIDTH), "out": (WIDTH, WIDTH)}
DENSE |= {"up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
ITEM = {"bf16": 2, "f32": 4, "s32": 4, "pred": 1}


class Step:
    """Buffers, in the order of the program, and the current step."""

    def __init__(self) -> None:
        self.now = 0
        self.buffers: list[dict[str, Any]] = []

    def add(self, operation: str, dtype: str, shape: tuple[int, ...], category: str, **more: Any):
        size = ITEM[dtype]
        for n in shape:
            size *= n
        made = {"name": f"{operation}.{len(self.buffers)}", "bytes": size, "dtype": dtype}
        made |= {"shape": list(shape), "operation": operation, "where": "", "scope": ""}
        made |= {"category": category, "why": "", "born": self.now, "dies": self.now, **more}
        made |= {"counted": category != "constant", "space": 0}
        self.buffers.append(made)
        return made


def transformer(layers: int, capacity: int | None = 16 * GIB, saves: bool = True) -> dict[str, Any]:
    """A training step of `layers` layers: about 48 buffers each; `saves` keeps attention scores."""
    step = Step()
    weights = [
        (f"layers/{i}/{'attention' if name in 'q k v out' else 'mlp'}/{name}", shape)
        for i in range(layers)
        for name, shape in DENSE.items()
    ]
    weights += [("embedding", (32000, WIDTH)), ("head", (WIDTH, 32000))]
    held = []  # buffers that live to the end
    for scope, shape in weights:
        at = {"scope": scope, "where": "train.py:88 (init)"}
        held.append(step.add("parameter", "bf16", shape, "parameter", **at))
        for moment in ("mu", "nu"):
            at = {"scope": f"{moment}/{scope}", "where": "optim.py:31 (adamw)"}
            held.append(step.add("parameter", "f32", shape, "optimizer state", **at))
    at = {"scope": "batch", "where": "train.py:104 (batches)"}
    held.append(step.add("parameter", "s32", (8, TOKENS // 8), "argument", **at))
    held.append(step.add("constant", "pred", (1024, 1024), "constant", where="model.py:58 (mask)"))

    saved: list[list[dict[str, Any]]] = []
    for i in range(layers):
        saved.append(_forward(step, f"layers/{i}", saves))
    step.now += 1
    loss = step.add("log_softmax", "f32", (TOKENS, 32000), "activation", scope="head")
    loss |= {"where": "model.py:141 (loss)", "why": "saved by min_cut"}
    step.now += 1
    loss["dies"] = step.now
    grads = []
    for i in reversed(range(layers)):
        grads += _backward(step, f"layers/{i}", saved[i], saves)
    for scope, shape in weights[-2:]:
        step.now += 1
        made = step.add("dot_general", "bf16", shape, "gradient", scope=scope)
        grads.append(made | {"where": "model.py:133 (logits)"})
        made["where"] = "model.py:133 (logits)"
        grads[-1] = made
    for made in grads:
        step.now += 1
        made["dies"] = step.now
    step.add("log_softmax", "f32", (), "output", where="model.py:141 (loss)", scope="head")
    for made in held:
        made["dies"] = step.now
    return _report(step, capacity)


def _forward(step: Step, scope: str, saves: bool) -> list[dict[str, Any]]:
    kept = []
    for name, line, shape in (
        ("norm", 21, (TOKENS, WIDTH)),
        ("attention/q", 40, (TOKENS, WIDTH)),
        ("attention/k", 41, (TOKENS, WIDTH)),
        ("attention/v", 42, (TOKENS, WIDTH)),
        ("attention/scores", 52, (8, HEADS, 1024, 1024)),
        ("attention/out", 61, (TOKENS, WIDTH)),
        ("mlp/up", 75, (TOKENS, 4 * WIDTH)),
        ("mlp/down", 77, (TOKENS, WIDTH)),
    ):
        step.now += 1
        at = {"scope": f"{scope}/{name}", "where": f"model.py:{line} (layer)"}
        step.add("convert_element_type", "bf16", (TOKENS, WIDTH), "temporary", **at)
        operation = "rsqrt" if name == "norm" else "dot_general"
        made = step.add(operation, "bf16", shape, "activation", **at, why="saved by min_cut")
        if saves or "scores" not in name:
            kept.append(made)
        else:
            made |= {"category": "temporary", "why": "", "dies": step.now + 1}
    return kept


def _backward(step: Step, scope: str, saved: list[dict[str, Any]], saves: bool):
    grads = []
    if not saves:
        step.now += 1
        at = {"scope": f"{scope}/attention/scores", "where": "model.py:52 (layer)"}
        again = step.add("dot_general", "bf16", (8, HEADS, 1024, 1024), "recompute", **at)
        again |= {"why": "run again: min_cut", "dies": step.now + 6}
    for made in reversed(saved):
        step.now += 1
        made["dies"] = step.now
        at = {"scope": made["scope"], "where": made["where"]}
        flow = step.add("dot_general", "bf16", tuple(made["shape"]), "temporary", **at)
        flow["dies"] = step.now + 1
        name = made["scope"].rpartition("/")[2]
        if name in DENSE:
            grads.append(step.add("dot_general", "bf16", DENSE[name], "gradient", **at))
    return grads


def _report(step: Step, capacity: int | None) -> dict[str, Any]:
    end = step.now + 1
    change = [0] * (end + 1)
    for made in step.buffers:
        made["dies"] = min(made["dies"], end - 1)
        change[made["born"]] += made["bytes"] * made["counted"]
        change[made["dies"] + 1] -= made["bytes"] * made["counted"]
    live = [sum(change[:1])]
    for d in change[1:end]:
        live.append(live[-1] + d)
    peak = live.index(max(live))
    for made in step.buffers:
        made["at_peak"] = made["counted"] and made["born"] <= peak <= made["dies"]
    kinds = ("parameter", "optimizer state", "argument")
    arguments = sum(b["bytes"] for b in step.buffers if b["category"] in kinds)
    alias = sum(b["bytes"] for b in step.buffers if b["category"] in kinds[:2])
    device = {"name": "TPU v5e", "capacity_bytes": capacity, "limit_bytes": capacity, "count": 1}
    device |= {"flops_per_second": 197e12, "bytes_per_second": 819e9}
    return {
        "function": "train_step",
        "target": "tpu:v5e:1x1",
        "compiled": "the function as it is, policy save_dots",
        "policy": "save_dots",
        "code": "xform.policies.save_dots",
        "given": "state (3 arrays, 1.0 GiB), tokens u8[8,1025], by inputs()",
        "planned": "0 FLOP of unfused operations recomputed, planned in 12.0 ms",
        "note": "",
        "device": device,
        "argument_bytes": arguments,
        "output_bytes": alias + 4,
        "temp_bytes": max(live) - arguments - 4,
        "alias_bytes": alias,
        "total_bytes": max(live),
        "constant_bytes": 0,
        "host_bytes": 0,
        "vmem_bytes": 0,
        "code_bytes": 21_400_000,
        "flops": 6 * TOKENS * alias // 10,
        "compile_seconds": 14.2,
        "refused": "",
        "added": [
            {
                "kind": "copies",
                "peak_bytes": 2**30,
                "moved_bytes": 2**31,
                "count": 1,
                "where": "model.py:7 (layer)",
            }
        ],
        "recomputed": [
            {
                "operation": "dot_general",
                "where": "model.py:9 (layer)",
                "count": 2,
                "flops": 10**9,
                "bytes": 2**20,
            }
        ],
        "advice": ["donate the state: 1.0 GiB less"],
        "live": live,
        "peak_step": peak,
        "phases": [
            {"name": "forward", "first": 0, "end": peak},
            {"name": "backward", "first": peak, "end": len(live) - 1},
            {"name": "update", "first": len(live) - 1, "end": len(live)},
        ],
        "buffers": step.buffers,
    }


HARM = """</script><img src=x onerror="window.harm=1"><!-- ${'"`\\u2028"""


def harmful() -> dict[str, Any]:
    """Return a report whose every text would do harm in a page that takes it for HTML."""
    report = transformer(1)
    texts = ("name", "dtype", "operation", "where", "scope", "category", "why")
    for made in report["buffers"]:
        made |= dict.fromkeys(texts, HARM)
    report["device"]["name"] = HARM
    said = dict.fromkeys(
        ("function", "target", "compiled", "code", "given", "planned", "note"), HARM
    )
    return report | said | {"advice": [HARM]}
