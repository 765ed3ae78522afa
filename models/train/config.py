"""The settings of a training run, as one tree. They are saved as a file in the run's folder."""

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

import xform
from models import program
from models.data.batches import Share
from models.nets.presets import TRAINED
from models.settings import setting
from models.train.optim import OptimConfig

LARGEST_SEED = 2**32 - 1


@dataclasses.dataclass(frozen=True)
class Validation:
    """The result of a validation.

    Attributes:
      numbers: the metrics by their names in the log.
      text: the same metrics as one line of text.
    """

    numbers: dict[str, float]
    text: str


@dataclasses.dataclass(frozen=True)
class RunConfig(abc.ABC):
    """Settings of a training run. Each kind of data has a subclass.

    A step reads `accumulate` batches of `batch` examples, one after the other. An example is a
    window of tokens, a picture, or a window of a series. Its units are tokens, one picture, or
    moments (time steps of the series).

    Attributes:
      on: the kind of data ("text", "pictures" or "series"), for messages.
      unit: the unit of throughput, such as "tokens".
      length_name: the setting with the number of units per example; "" if an example is one unit.
      metric: the metric in the log that compares validations; lower is better.
    """

    on: ClassVar[str]
    unit: ClassVar[str]
    length_name: ClassVar[str] = ""
    metric: ClassVar[str] = "validation_loss"

    model: Any
    optim: OptimConfig = dataclasses.field(default_factory=OptimConfig)
    preset: str = setting(
        "tiny",
        "Model and its sizes; other flags change single sizes.",
        choices=tuple(TRAINED),
        change="never",
    )
    out: Path = setting(
        Path("runs/tiny"), "Folder of the run: settings, log, plan and checkpoints.", change="free"
    )
    data: tuple[str, ...] = setting(
        (),
        "Data to train on. For text: a text, JSON lines, Parquet or Arrow file, a folder of them,"
        f" or a folder of `{program.NAME} data`; repeat the flag for several, with PATH=0.7 to"
        " set a weight. For pictures: a folder. For series: a .npy file. The default is the source"
        " of Python's standard library, or generated pictures or series.",
        change="free",
    )
    policy: str = setting(
        "min_cut",
        f"Which values the backward pass of the step saves: {xform.policies.TEXTS}.",
    )
    mesh: str = setting(
        "",
        "Number of devices along each mesh axis, such as data=4,fsdp=2; the axes are data, fsdp,"
        " expert, context and tensor. fsdp and context also shard parameters and optimizer state."
        " context shards the tokens of each sequence. The default is one device.",
        change="free",
    )
    batch: int = setting(
        16, "Examples per batch: sequences, pictures or series.", least=1, change="never"
    )
    accumulate: int = setting(
        1, "Number of batches in a step; their gradients are averaged.", least=1, change="never"
    )
    seed: int = setting(
        0,
        "Random seed of initial parameters, data order and dropout.",
        least=0,
        most=LARGEST_SEED,
        change="never",
    )
    validate_every: int = setting(
        100, "Number of steps between validations.", least=1, change="free"
    )
    validation_examples: int = setting(
        64, "Number of examples in a validation.", least=1, change="free"
    )
    save_every: int = setting(100, "Number of steps between checkpoints.", least=1, change="free")
    keep_newest: int = setting(3, "Number of newest checkpoints to keep.", least=1, change="free")
    keep_best: int = setting(
        1, "Number of checkpoints with the best validations to keep too.", least=0,
        change="free",
    )  # fmt: skip
    background_saves: bool = setting(
        True, "Continue training while a checkpoint is written.", change="free"
    )
    print_every: int = setting(
        25,
        "Number of steps between printed lines, if the output is not a terminal.",
        least=1,
        change="free",
    )
    tensorboard: bool = setting(
        False, "Also write the numbers of the log as TensorBoard events.", change="free"
    )
    health_every: int = setting(
        0,
        "Number of steps between health reports (statistics of each layer's activations, gradients"
        " and updates, in health.jsonl), which also alert; 0 for none. A step with a report uses"
        " the default policy.",
        least=0,
        change="free",
    )
    profile_steps: str = setting(
        "", "Steps to trace for a profiler, such as 10:13 for 10, 11 and 12.", change="free"
    )
    max_seconds: float = setting(
        math.inf, "Save and stop after this many seconds.", least=0, change="free"
    )
    compilation_cache: Path | None = setting(
        None, "Folder for JAX's compilation cache, which later commands can use too.", change="free"
    )

    @property
    def length(self) -> int:
        """Number of units in an example."""
        return getattr(self.model, self.length_name) if self.length_name else 1

    def with_length(self, length: int) -> RunConfig:
        """Return the same run with examples of `length` units."""
        return dataclasses.replace(
            self, model=dataclasses.replace(self.model, **{self.length_name: length})
        )

    def amount(self) -> str:
        """Describe the amount of data that a step reads, such as "16 x 128 tokens"."""
        examples = f"{self.batch * self.accumulate}"
        return (
            f"{examples} x {self.length} {self.unit}"
            if self.length_name
            else (f"{examples} {self.unit}")
        )

    def smaller(self) -> str:
        """Name the flags that make a batch smaller, for messages."""
        return "--batch" + (f" or --{self.length_name}" if self.length_name else "")

    @abc.abstractmethod
    def fit_to_data(self, fixed: Collection[str]) -> RunConfig:
        """Return the run with the model's sizes taken from the data.

        Args:
          fixed: names of settings that the user set; they stay unchanged.

        Raises:
          InputError: the data cannot be read.
        """

    @abc.abstractmethod
    def batch_type(self) -> Any:
        """Return the types of the arrays `[accumulate, batch, ...]` that a step reads."""

    @abc.abstractmethod
    def reads(self) -> jax.ShapeDtypeStruct:
        """Return the type of the model's input for one example, without its target."""

    @abc.abstractmethod
    def load(self) -> Any:
        """Load the data for `batches` and `validation`. It has a `fingerprint`.

        Raises:
          InputError: the data cannot be read, or does not suit the model.
        """

    def beside(self, data: Any) -> dict[str, str]:
        """Return additional files for the run's folder, as texts by file name."""
        return {}

    @abc.abstractmethod
    def batches(self, data: Any, share: Share, sharding: Sharding) -> grain.DatasetIterator[Any]:
        """Iterate without end over the batches of steps. The iterator's state can be saved."""

    @abc.abstractmethod
    def validation(self, data: Any) -> list[Any]:
        """Return the validation batches: arrays `[<= batch, ...]`."""

    @abc.abstractmethod
    def validation_result(self, data: Any, metrics: Sequence[dict[str, float]],
                          batches: Sequence[Any]) -> Validation:  # fmt: skip
        """Combine the `metrics` of each of the validation `batches`."""

    @abc.abstractmethod
    def metrics_text(self, metrics: dict[str, float]) -> str:
        """Format the metrics of a step as text."""
