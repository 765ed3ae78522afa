"""Documents in each form are the same documents; what is damaged is named in a line."""

import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from models.data import documents as module
from models.data.documents import documents
from models.errors import InputError
from models.machine import machine_memory
from tests.models.data.texts import FORMS, TEXTS, compressed, write


def read(path: Path, **options: Any) -> list[str]:
    return [document.content.decode() for document in documents(path, **options)]


@pytest.mark.parametrize("form", FORMS)
def test_each_form_gives_the_same_documents(form: str, tmp_path: Path) -> None:
    assert read(write(tmp_path, form)) == TEXTS
    assert read(tmp_path) == TEXTS


def test_a_file_of_text_is_one_document_compressed_or_not(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXTS[0])
    compressed(TEXTS[0].encode() * 2, tmp_path / "a.txt.zst")
    assert read(tmp_path / "a.txt") == [TEXTS[0]]
    assert read(tmp_path / "a.txt.zst") == [TEXTS[0] * 2]
    assert sorted(read(tmp_path)) == sorted([TEXTS[0], TEXTS[0] * 2])


def test_dataset_info_json_beside_arrow_tables_is_not_read(tmp_path: Path) -> None:
    write(tmp_path, "arrow")
    (tmp_path / "dataset_info.json").write_text("{}")
    assert read(tmp_path) == TEXTS


def test_another_column_and_nothing_in_a_row(tmp_path: Path) -> None:
    path = write(tmp_path, "parquet", ["a", None, "", "b"], column="body")
    assert read(path, column="body") == ["a", "b"]


@pytest.mark.parametrize("form", FORMS)
def test_an_unknown_column_names_the_nearest(form: str, tmp_path: Path) -> None:
    path = write(tmp_path, form)
    with pytest.raises(InputError, match=r"no column 'txt' in .*: did you mean text\?; choose ano"):
        read(path, column="txt")
    with pytest.raises(InputError, match=r"no column 'q' in .*, which has 'n', 'text'; choose ano"):
        read(path, column="q")


@pytest.mark.parametrize("form", FORMS)
def test_a_column_that_is_no_text_is_refused(form: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"(holds int64, not text|holds a int where text)"):
        read(write(tmp_path, form), column="n")


@pytest.mark.parametrize("form", [f for f in FORMS if f != "jsonl"])
def test_a_file_that_was_cut_is_one_line(form: str, tmp_path: Path) -> None:
    path = write(tmp_path, form)
    content = path.read_bytes()
    for size in (len(content) // 2, 3):
        path.write_bytes(content[:size])
        with pytest.raises(
            InputError, match=r"data\.\S+ is (damaged|not a valid \w+ file)"
        ) as caught:
            read(path)
        assert "\n" not in str(caught.value)


def test_a_file_of_another_kind_is_one_line(tmp_path: Path) -> None:
    for name in ("a.txt.gz", "a.txt.zst", "a.parquet", "a.arrow"):
        (tmp_path / name).write_bytes(b"no such thing at all" * 10)
        with pytest.raises(
            InputError, match=rf"{name} is (damaged|not a valid \w+ file)"
        ) as caught:
            read(tmp_path / name)
        assert "\n" not in str(caught.value)


LINES = {
    b'{"text": "a"}\n{"text": ': r":2 is not valid JSON",
    b'{"text": "\xff"}': r":1 is not valid JSON: 'utf-8' codec",
    b'["text"]': r":1 is not a JSON object with a field 'text'",
    b'{"text": "\\ud800"}': r":1 is not UTF-8",
    b'{"text": ["a"]}': r":1 holds a list where text was expected",
    b"[" * 100_000: r":1 is not valid JSON",
}


@pytest.mark.parametrize("line", LINES, ids=list(LINES.values()))
def test_a_line_that_is_wrong_is_named(line: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(line)
    with pytest.raises(InputError, match=rf"a\.jsonl{LINES[line]}"):
        read(tmp_path / "a.jsonl")


def test_lines_of_any_length_within_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ["a" * n for n in (1, 500, 20)]
    content = "\n\n".join(json.dumps({"text": t}) for t in texts)
    (tmp_path / "a.jsonl").write_text(content)
    monkeypatch.setattr(module, "BLOCK", 7)
    assert read(tmp_path / "a.jsonl") == texts
    monkeypatch.setattr(module, "LONGEST_LINE", 400)
    with pytest.raises(InputError, match=r"a\.jsonl:3: the line has more than 400 bytes"):
        read(tmp_path / "a.jsonl")


def test_a_document_beyond_memory_is_refused_unread(tmp_path: Path) -> None:
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(machine_memory())  # it takes no room
    with pytest.raises(InputError, match=r"huge is one document of more than \d+ bytes: split it"):
        read(tmp_path / "huge")


def test_missing_pyarrow_error_names_the_pip_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, "parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(InputError, match=r'is not installed, run: pip install "jax-xform\[data\]"'):
        read(path)


def test_large_strings_and_bytes_are_text(tmp_path: Path) -> None:
    for kind in (pa.large_string(), pa.binary(), pa.large_binary()):
        values = [t.encode() if "binary" in str(kind) else t for t in TEXTS]
        table = pa.table({"text": pa.array(values, kind)})
        with pa.ipc.new_stream(str(tmp_path / "a.arrow"), table.schema) as writer:
            writer.write_table(table)
        assert read(tmp_path / "a.arrow") == TEXTS
