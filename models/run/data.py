"""Tokens of documents, written once: `python -m models data --data TEXT --out FOLDER`."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from rich.table import Table

from models.data.documents import COLUMN
from models.data.prepare import SHARD, VALIDATION, prepare
from models.errors import InputError
from models.run.flags import Parser
from models.settings import replaced, setting
from models.train.display import Output


@dataclasses.dataclass(frozen=True)
class Preparing:
    """What to prepare, and how."""

    data: Path | None = setting(
        None, "Text, JSON lines (.gz, .zst), Parquet, Arrow, or a folder of them; without it, the"
        " sources of Python's own standard library.",
    )  # fmt: skip
    out: Path | None = setting(None, "Folder to make.")
    tokenizer: str = setting("bytes", "bytes, bpe:8192 to train one, or a tokenizer.json.")
    column: str = setting(COLUMN, "Where tables and JSON have the text.")
    validation: float = setting(VALIDATION, "Share of documents held back.", above=0, most=0.5)
    shard: int = setting(SHARD, "Tokens in a file.", least=1)


def main(arguments: list[str]) -> int:
    """Write the tokens of documents to a folder that `train --data` takes."""
    parser = Parser(prog="python -m models data", description=main.__doc__)
    parser.add_settings(Preparing())
    asked = replaced(Preparing(), parser.parse(arguments), by_flag=True)
    if asked.out is None:
        raise InputError("--out is missing: name the folder to make")
    counts = prepare(
        asked.data,
        asked.out,
        tokenizer=asked.tokenizer,
        column=asked.column,
        validation=asked.validation,
        shard=asked.shard,
        without=asked.out,
    )
    table = Table(title=str(asked.out), title_justify="left")
    for heading in ("", "documents", "tokens", "bytes", "bytes per token"):
        table.add_column(heading, justify="right" if heading else "left")
    for part, count in counts.items():
        numbers = f"{count.documents:,}", f"{count.tokens:,}", f"{count.bytes:,}"
        table.add_row(part, *numbers, f"{count.bytes / count.tokens:.2f}")
    console = Output()
    console.print(table)
    console.print(f"train on it: python -m models train --data {asked.out}", markup=False)
    return 0
