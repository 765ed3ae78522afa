"""The description of a training run: one tree of settings, in a file beside the run."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from models.data.corpus import rows_dtype
from models.data.sources import vocabulary
from models.errors import InputError
from models.nets.decoder import DecoderConfig
from models.nets.presets import TRAINED
from models.settings import from_toml, nearest, parse_toml, setting
from models.train.optim import OptimConfig

LARGEST_SEED = 2**32 - 1


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """A training run. `batch` sequences are held at once, `accumulate` times in each step."""

    model: DecoderConfig
    optim: OptimConfig = dataclasses.field(default_factory=OptimConfig)
    preset: str = setting(
        "tiny", "The model to start from.", choices=tuple(TRAINED), change="never"
    )
    out: Path = setting(Path("runs/tiny"), "Folder of the run.", change="free")
    data: tuple[str, ...] = setting(
        (),
        "Text, JSON lines, Parquet, Arrow, or a folder of them or of `python -m models data`; =0.7"
        " behind it is its share among several. Without it, Python's own standard library.",
        change="free",
    )
    tokenizer: str | None = setting(
        None, "bytes, bpe:8192 to train one, or a tokenizer.json; bytes without.", change="never"
    )
    vocab_multiple: int = setting(
        1,
        "What a vocabulary that is as large as the tokenizer's is rounded up to a multiple of, such"
        " as 128.",
        least=1,
        most=2**20,
        change="free",
    )
    column: str = setting("text", "Where tables and JSON have the text.", change="never")
    policy: str = setting(
        "default",
        "What the backward pass keeps: default, save_dots, save_nothing, auto (what the device"
        " has), budget:6GiB (of the step's peak), saved:2GiB, plan:FILE.",
    )
    mesh: str = setting(
        "",
        "Devices along each axis, of data, fsdp (which shards the state too), expert, tensor: such"
        " as data=4,fsdp=2. One device without.",
        change="free",
    )
    batch: int = setting(16, "Sequences held at once.", least=1, change="never")
    accumulate: int = setting(1, "Batches summed into one update.", least=1, change="never")
    seed: int = setting(
        0, "Of initial values and data order.", least=0, most=LARGEST_SEED, change="never"
    )
    eval_every: int = setting(100, "Updates between validations.", least=1, change="free")
    eval_windows: int = setting(64, "Windows in one validation.", least=1, change="free")
    save_every: int = setting(100, "Updates between checkpoints.", least=1, change="free")
    keep: int = setting(3, "Newest checkpoints to keep.", least=1, change="free")
    keep_best: int = setting(
        1, "Checkpoints of the best validations to keep besides.", least=0, change="free"
    )
    background_saves: bool = setting(True, "Train on while a checkpoint is written.", change="free")
    log_every: int = setting(
        25, "Updates between lines without a terminal.", least=1, change="free"
    )
    tensorboard: bool = setting(
        False, "Write the numbers of the log as TensorBoard's events too.", change="free"
    )
    health: int = setting(
        0,
        "Updates between looks at the health of each layer, in health.jsonl; none if 0. Such a step"
        " keeps what the default policy does.",
        least=0,
        change="free",
    )
    profile: str = setting(
        "", "Steps to trace for a profiler, such as 10:13 for 10, 11 and 12.", change="free"
    )
    max_seconds: float = setting(math.inf, "Save and stop after this time.", least=0, change="free")
    cache: Path | None = setting(
        None, "Folder that keeps what was compiled, for the next command.", change="free"
    )

    def with_words(self) -> RunConfig:
        """The run whose model has as many tokens as its tokenizer; the same where text is bytes.

        Raises:
          InputError: there is no such tokenizer.
        """
        size = vocabulary(self.data, self.tokenizer)
        if size is None:
            return self
        size += -size % self.vocab_multiple
        return dataclasses.replace(self, model=dataclasses.replace(self.model, vocab=size))

    def tokens_type(self) -> jax.ShapeDtypeStruct:
        """Of what a step reads, on all devices: `[accumulate, batch, window + 1]`.

        Their type is uint8, or int32 where documents are marked.
        """
        shape = (self.accumulate, self.batch, self.model.context + 1)
        return jax.ShapeDtypeStruct(shape, rows_dtype(self.data, self.tokenizer, self.out))


def of_preset(name: Any) -> RunConfig:
    """A run of a preset, with the defaults of all else."""
    if name not in TRAINED:
        raise InputError(f"there is no preset {name!r}{nearest(str(name), TRAINED)}")
    return RunConfig(model=TRAINED[name], preset=name)


def of_model(model: DecoderConfig) -> RunConfig:
    """A run of a model of any size; its preset is the smallest of its kind."""
    kinds = {type(config): name for name, config in reversed(TRAINED.items())}
    return RunConfig(model=model, preset=kinds[type(model)])


def every_setting() -> list[RunConfig]:
    """A run of each kind of model: among them they have all settings that there are."""
    return [of_preset(name) for name in ("tiny", "tiny-llama")]


def read_config(text: str, where: str, base: RunConfig | None = None) -> RunConfig:
    """A run as a TOML document says, on `base`, or on the preset that it names."""
    data: Mapping[str, Any] = parse_toml(text, where)
    if base is None or "preset" in data:
        base = of_preset(data.get("preset", "tiny"))
    return from_toml(base, data, where)
