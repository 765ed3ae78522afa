"""The command that writes tokens, and training on what it wrote."""

import re
from pathlib import Path

import pytest

from models.__main__ import main
from models.data.shards import open_prepared
from tests.models.data.texts import TEXTS, write
from tests.models.micro import FLAGS


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "parquet", [text * 5 for text in TEXTS], column="body")
    return tmp_path


def test_data_command_reports_token_counts_and_train_reads_its_output(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ["--data", "data.parquet", "--column", "body", "--tokenizer", "bpe:280"]
    assert main(["data", *flags, "--out", "tokens"]) == 0
    said = capsys.readouterr().out
    sizes = re.findall(r"(train|validation)\D+(\d+)\D+([\d,]+)\D+([\d,]+)\D+([\d.]+)", said)
    data = open_prepared(Path("tokens"))
    for part, count, tokens, size, ratio in sizes:
        (shard,) = data.parts[part]
        assert int(count) == len(shard.ends)
        assert int(tokens.replace(",", "")) == len(shard.tokens)
        total = data.token_bytes[shard.tokens].sum()
        assert int(size.replace(",", "")) == total
        assert float(ratio) == round(total / len(shard.tokens), 2)
    assert [part for part, *_ in sizes] == ["train", "validation"]
    assert main(["train", *FLAGS, "--data", "tokens", "--steps", "1", "--out", "run"]) == 0


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ([], "--out is missing: name the folder to create"),
        (["--out", "a", "--data", "none"], "no such file or folder: none"),
        (["--out", "a", "--data", "data.parquet"], "no column 'text' in data.parquet"),
        (["--out", "x" * 5000, "--data", "data.parquet"], "File name too long"),
        (["--out", "a", "--data", "x" * 5000 + "=1"], "File name too long"),
        (["--out", "a", "--data", ""], "--data is '', which is not a path"),
        (["--out", ".", "--data", "data.parquet"], ". already exists"),
        (["--out", "a", "--column", "bodi", "--data", "data.parquet"], "did you mean body?"),
        (
            ["--out", "a", "--validation-share", "0"],
            "--validation-share is 0.0, but must be above 0",
        ),
        (["--out", "a", "--tokeniser", "bytes"], "did you mean --tokenizer?"),
    ],
)
def test_mistakes_are_one_line(
    flags: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", *flags]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    assert complaint in said
    assert [path.name for path in Path().iterdir()] == ["data.parquet"]
