"""Documents on disk, in every format that is read, for the tests of this folder."""

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

WORDS = [
    "gradient",
    "memory",
    "Jacobian",
    "naïve",
    "日本",
    "\U0001f600",
    "loop",
    "plan",
    "cut",
    "x\n",
]
TEXTS = [" ".join(WORDS[(i * k + k * k) % 10] for k in range(1, 5 + i % 7)) for i in range(40)]


def compressed(content: bytes, path: Path) -> None:
    """Write a file with zstd compression, by Arrow."""
    with pa.OSFile(str(path), "wb") as raw, pa.CompressedOutputStream(raw, "zstd") as stream:
        stream.write(content)


def write(folder: Path, form: str, texts: list[Any] = TEXTS, column: str = "text") -> Path:
    """Write one file with texts, in the format of this name."""
    path = folder / f"data.{form}"
    lines = "".join(json.dumps({"n": i, column: t}) + "\n" for i, t in enumerate(texts)).encode()
    table = pa.table({"n": range(len(texts)), column: texts})
    if form == "jsonl":
        path.write_bytes(lines)
    elif form == "jsonl.gz":
        path.write_bytes(gzip.compress(lines))
    elif form == "jsonl.zst":
        compressed(lines, path)
    elif form == "parquet":
        pq.write_table(table, path, row_group_size=7)
    else:
        opened = {"arrow": pa.ipc.new_stream, "file.arrow": pa.ipc.new_file}[form]
        with pa.OSFile(str(path), "wb") as raw, opened(raw, table.schema) as writer:
            writer.write_table(table, max_chunksize=7)
    return path


FORMS = ["jsonl", "jsonl.gz", "jsonl.zst", "parquet", "arrow", "file.arrow"]
