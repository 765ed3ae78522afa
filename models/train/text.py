"""Runs on text: language models, validated by bits per byte."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence
from typing import Any, ClassVar

import grain
import jax
import jax.numpy as jnp
from jax.sharding import Sharding

from models import program
from models.data.batches import Share
from models.data.corpus import Corpus, load_corpus, rows_dtype
from models.data.sources import vocabulary
from models.nets.axes import CONTEXT
from models.settings import setting
from models.train.config import RunConfig, Validation
from models.train.folder import DATA, TOKENIZER
from models.train.mesh import sizes


@dataclasses.dataclass(frozen=True)
class TextRun(RunConfig):
    """A run of a decoder."""

    on: ClassVar[str] = "text"
    unit: ClassVar[str] = "tokens"
    length_name: ClassVar[str] = "context"
    metric: ClassVar[str] = "validation_bits_per_byte"

    tokenizer: str | None = setting(
        None,
        "bytes, bpe:8192 to train a tokenizer of that size, or the path of a tokenizer.json. The"
        f" default is the tokenizer of a folder of `{program.NAME} data`, else bytes.",
        change="never",
    )
    vocab_multiple: int = setting(
        1,
        "Round the tokenizer's vocabulary size up to a multiple of this, such as 128.",
        least=1,
        most=2**20,
        change="free",
    )
    column: str = setting(
        "text", "Column of tables, or field of JSON lines, that holds the text.", change="never"
    )

    def fit_to_data(self, fixed: Collection[str]) -> RunConfig:
        """Return the run with the vocabulary size of its tokenizer; unchanged for bytes."""
        size = None if "vocab" in fixed else vocabulary(self.data, self.tokenizer)
        if size is None:
            return self
        size += -size % self.vocab_multiple
        return dataclasses.replace(self, model=dataclasses.replace(self.model, vocab=size))

    def batch_type(self) -> jax.ShapeDtypeStruct:
        """Return the type of tokens `[accumulate, batch, context + 1]`.

        They are uint8 for plain bytes, and int32 for marked documents. If devices share each
        sequence, it is cut into blocks: `[accumulate, batch, 2n, context / 2n + 1]`.
        """
        n, length = self.sequence_devices(), self.model.context
        row = (2 * n, length // (2 * n) + 1) if n > 1 else (length + 1,)
        dtype = rows_dtype(self.data, self.tokenizer, self.out)
        return jax.ShapeDtypeStruct((self.accumulate, self.batch, *row), dtype)

    def sequence_devices(self) -> int:
        """Return the number of devices that share each sequence."""
        return sizes(self.mesh)[CONTEXT]

    def reads(self) -> jax.ShapeDtypeStruct:
        """Return the type of tokens `[context]`."""
        return jax.ShapeDtypeStruct((self.model.context,), jnp.int32)

    def load(self) -> Corpus:
        """Load the tokenized text. It is tokenized first, if necessary."""
        return load_corpus(
            self.data, self.model.context, vocab=self.model.vocab, tokenizer=self.tokenizer,
            column=self.column, work=self.out / DATA, without=self.out,
        )  # fmt: skip

    def beside(self, data: Corpus) -> dict[str, str]:
        """Return the tokenizer's file, if there is one."""
        return {} if data.tokenizer_json is None else {TOKENIZER: data.tokenizer_json.decode()}

    def batches(self, data: Corpus, share: Share, sharding: Sharding
                ) -> grain.DatasetIterator[Any]:  # fmt: skip
        """Iterate without end over batches of windows of tokens, in shuffled order."""
        return data.batches(
            window=self.model.context,
            batch=self.batch,
            slices=self.accumulate,
            seed=self.seed,
            share=share,
            sharding=sharding,
            devices=self.sequence_devices(),
        )

    def validation(self, data: Corpus) -> list[Any]:
        """Return batches of validation windows, `[<= batch, context + 1]`, or of their blocks."""
        return data.validation(
            window=self.model.context,
            batch=self.batch,
            windows=self.validation_examples,
            devices=self.sequence_devices(),
        )

    def validation_result(self, data: Corpus, metrics: Sequence[dict[str, float]],
                          batches: Sequence[Any]) -> Validation:  # fmt: skip
        """Compute bits per byte, and the perplexity per token."""
        losses = [one["loss"] for one in metrics]
        bits, perplexity = data.bits_per_byte(losses, batches), data.perplexity(losses, batches)
        return Validation(
            {self.metric: bits, "validation_perplexity": perplexity},
            f"{bits:.3f} bits per byte, perplexity {perplexity:.4g}",
        )

    def metrics_text(self, metrics: dict[str, float]) -> str:
        """Format the loss, in nats and in bits per token."""
        return f"loss {metrics['loss']:.3f} ({metrics['loss'] / math.log(2):.2f} bits)"
