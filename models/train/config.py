"""The description of a training run: one tree of settings, in a file beside the run."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, ClassVar

import grain
import jax
from jax.sharding import Sharding

from models.data.batches import Share
from models.nets.presets import TRAINED
from models.settings import setting
from models.train.optim import OptimConfig

LARGEST_SEED = 2**32 - 1


@dataclasses.dataclass(frozen=True)
class Judgement:
    """What a validation found.

    Attributes:
      numbers: by their names in the log.
      said: the same, for people.
    """

    numbers: dict[str, float]
    said: str


@dataclasses.dataclass(frozen=True)
class RunConfig(abc.ABC):
    """A training run: how it trains. What it trains is said by the classes for each kind of data.

    `batch` examples are held at once, `accumulate` times in each step.

    Attributes:
      on: what the model is trained on.
      unit: what an example is made of, and what is counted by the second.
      length_name: the setting that says of how many; "" if an example is one.
      metric: what a validation is known by in the log; the lowest is the best.
    """

    on: ClassVar[str]
    unit: ClassVar[str]
    length_name: ClassVar[str] = ""
    metric: ClassVar[str] = "validation_loss"

    model: Any
    optim: OptimConfig = dataclasses.field(default_factory=OptimConfig)
    preset: str = setting(
        "tiny", "The model to start from.", choices=tuple(TRAINED), change="never"
    )
    out: Path = setting(Path("runs/tiny"), "Folder of the run.", change="free")
    data: tuple[str, ...] = setting(
        (),
        "Text, JSON lines, Parquet, Arrow, or a folder of them or of `python -m models data`; =0.7"
        " behind it is its share among several. Pictures: a folder of them. Series: a .npy file."
        " Without it, Python's own standard library, or what the seed makes.",
        change="free",
    )
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
    batch: int = setting(
        16, "Examples held at once: sequences, pictures or series.", least=1, change="never"
    )
    accumulate: int = setting(1, "Batches summed into one update.", least=1, change="never")
    seed: int = setting(
        0, "Of initial values and data order.", least=0, most=LARGEST_SEED, change="never"
    )
    eval_every: int = setting(100, "Updates between validations.", least=1, change="free")
    eval_windows: int = setting(64, "Examples in one validation.", least=1, change="free")
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

    @property
    def length(self) -> int:
        """Units in an example."""
        return getattr(self.model, self.length_name) if self.length_name else 1

    def with_length(self, length: int) -> RunConfig:
        """The same with examples of so many units."""
        return dataclasses.replace(
            self, model=dataclasses.replace(self.model, **{self.length_name: length})
        )

    def amount(self) -> str:
        """What a step reads."""
        examples = f"{self.batch * self.accumulate}"
        return (
            f"{examples} x {self.length} {self.unit}"
            if self.length_name
            else (f"{examples} {self.unit}")
        )

    def smaller(self) -> str:
        """The flags that make a batch smaller."""
        return "--batch" + (f" or --{self.length_name}" if self.length_name else "")

    @abc.abstractmethod
    def fitted(self, said: Collection[str]) -> RunConfig:
        """The run whose model has the sizes that its data has, but for those that are `said`.

        Raises:
          InputError: the data cannot be read.
        """

    @abc.abstractmethod
    def batch_type(self) -> Any:
        """Types of what a step reads, on all devices: arrays `[accumulate, batch, ...]`."""

    @abc.abstractmethod
    def reads(self) -> jax.ShapeDtypeStruct:
        """The type of what the model is told of an example."""

    @abc.abstractmethod
    def load(self) -> Any:
        """The data: what `batches` and `validation` take, with a `fingerprint`.

        Raises:
          InputError: it cannot be read, or is not what the model takes.
        """

    def beside(self, data: Any) -> dict[str, str]:
        """Files of the run that say what its data is to the model, by name: their text."""
        return {}

    @abc.abstractmethod
    def batches(self, data: Any, share: Share, sharding: Sharding) -> grain.DatasetIterator[Any]:
        """Iterate for ever over batches of a step, from a state that can be saved."""

    @abc.abstractmethod
    def validation(self, data: Any) -> list[Any]:
        """The batches by which the model is judged: arrays `[<= batch, ...]`."""

    @abc.abstractmethod
    def judgement(self, data: Any, found: Sequence[dict[str, float]], batches: Sequence[Any]
                  ) -> Judgement:  # fmt: skip
        """What was found in each batch of a validation, together."""

    @abc.abstractmethod
    def said(self, metrics: dict[str, float]) -> str:
        """The metrics of a step, for people."""
