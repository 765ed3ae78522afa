"""Tokenize documents once: `python -m models data --data TEXT --out FOLDER`."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from rich.table import Table

from models import program
from models.data.documents import COLUMN
from models.data.prepare import SHARD, VALIDATION, prepare
from models.errors import InputError
from models.run.flags import Parser
from models.settings import replaced, setting
from models.train.display import Output


@dataclasses.dataclass(frozen=True)
class DataOptions:
    """Settings of the command `data`."""

    data: Path | None = setting(
        None, "Text, JSON lines, Parquet or Arrow file (.gz and .zst too), or a folder of them."
        " The default is the source of Python's standard library.",
    )  # fmt: skip
    out: Path | None = setting(None, "Folder to create.")
    tokenizer: str = setting(
        "bytes",
        "bytes, bpe:8192 to train a tokenizer of that size, or the path of a tokenizer.json.",
    )
    column: str = setting(COLUMN, "Column of tables, or field of JSON lines, that holds the text.")
    validation_share: float = setting(
        VALIDATION, "Share of documents for validation.", above=0, most=0.5
    )
    shard_tokens: int = setting(
        SHARD, "Approximate number of tokens in each file of the folder.", least=1
    )


def main(arguments: list[str]) -> int:
    """Tokenize documents into a folder for `train --data`."""
    parser = Parser(prog=f"{program.NAME} data", description=main.__doc__)
    parser.add_settings(DataOptions())
    options = replaced(DataOptions(), parser.parse(arguments), by_flag=True)
    if options.out is None:
        raise InputError("--out is missing: name the folder to create")
    counts = prepare(
        options.data,
        options.out,
        tokenizer=options.tokenizer,
        column=options.column,
        validation_share=options.validation_share,
        shard_tokens=options.shard_tokens,
        without=options.out,
    )
    table = Table(title=str(options.out), title_justify="left")
    for heading in ("", "documents", "tokens", "bytes", "bytes per token"):
        table.add_column(heading, justify="right" if heading else "left")
    for part, count in counts.items():
        numbers = f"{count.documents:,}", f"{count.tokens:,}", f"{count.bytes:,}"
        table.add_row(part, *numbers, f"{count.bytes / count.tokens:.2f}")
    console = Output()
    console.print(table)
    console.print(f"train on it: {program.NAME} train --data {options.out}", markup=False)
    return 0
