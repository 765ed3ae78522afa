"""Tokens give back their text; a tokenizer of a file is the same as one that was trained."""

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from models.data import tokenizer as module
from models.data.documents import Document
from models.data.tokenizer import Bytes, load_tokenizer, tokenizer_of, train_bpe
from models.errors import InputError
from tests.models.data.texts import TEXTS

SOME = [Document(text.encode(), f"text {i}") for i, text in enumerate(TEXTS)]
CODE = Document(b"".join(b"def f%d(x):\n\n    return x\n" % i for i in range(99)), "code")


@pytest.mark.parametrize("name", ["bytes", "bpe:300"])
def test_tokens_give_back_their_text(name: str) -> None:
    tokenizer = tokenizer_of(name, SOME)
    for document, tokens in zip(SOME, tokenizer.encode(SOME), strict=True):
        assert tokenizer.decode([*map(int, tokens)]) == document.content
        assert tokens.max() < tokenizer.vocab
        sizes = tokenizer.token_bytes
        assert sizes is not None
        assert sizes[tokens].sum() == len(document.content)
        np.testing.assert_array_equal(
            tokenizer.prompt(document.content.decode()), [t for t in tokens if t != tokenizer.end]
        )
    assert tokenizer_of(name, SOME).fingerprint == tokenizer.fingerprint


def test_words_are_fewer_than_bytes_and_end_with_the_end() -> None:
    words = train_bpe(400, SOME)
    tokens = words.encode(SOME)
    assert words.vocab <= 400
    assert sum(map(len, tokens)) < 0.5 * sum(len(document.content) for document in SOME)
    assert {int(some[-1]) for some in tokens} == {words.end} == {0}


def test_end_token_spelled_in_a_document_is_encoded_as_text() -> None:
    words = train_bpe(300, SOME)
    (tokens,) = words.encode([Document(b"a<|endoftext|>b", "here")])
    assert list(tokens).count(0) == 1
    assert words.decode(list(map(int, tokens))) == b"a<|endoftext|>b"


def test_pieces_of_a_long_document_have_the_tokens_of_the_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = train_bpe(300, [CODE])
    whole = words.encode([CODE])[0]
    monkeypatch.setattr(module, "_PIECE", 100)
    assert len(list(module._pieces(CODE))) > 20
    np.testing.assert_array_equal(words.encode([CODE])[0], whole)
    solid = Document(b"x" * 1001, "solid")
    assert "".join(module._pieces(solid)) == "x" * 1001


def test_a_file_gives_the_same_tokenizer(tmp_path: Path) -> None:
    words = train_bpe(300, SOME)
    (tmp_path / "tokenizer.json").write_text(words.to_json())
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        again = load_tokenizer(path)
        assert (again.end, again.fingerprint) == (0, words.fingerprint)
        np.testing.assert_array_equal(again.encode(SOME)[3], words.encode(SOME)[3])


@pytest.mark.parametrize("said", ['{"eos_token": "gradient"}', '{"eos_token": {"content": "cut"}}'])
def test_tokenizer_config_sets_the_end_token(said: str, tmp_path: Path) -> None:
    inner = Tokenizer(models.WordLevel({"[UNK]": 0, "gradient": 1, "cut": 2, "</s>": 3}, "[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.decoder = decoders.WordPiece()
    inner.enable_truncation(2)
    inner.enable_padding(length=9)
    inner.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).end == 3
    (tmp_path / "tokenizer_config.json").write_text(said)
    words = load_tokenizer(tmp_path)
    assert words.end == (1 if "gradient" in said else 2)
    assert words.token_bytes is None
    (tokens,) = words.encode([Document(b"cut cut cut cut", "here")])
    assert list(tokens) == [2, 2, 2, 2, words.end]


@pytest.mark.parametrize(
    ("wanted", "complaint"),
    [
        ("bpe:many", r"'bpe:many' has no valid vocabulary size: use for example bpe:8192"),
        ("bpe:256", r"bpe:256: the vocabulary must have 257"),
        ("bpe:999999999", r"the vocabulary must have 257 .* to 16777216 tokens"),
        ("x" * 5000, "File name too long"),
        ("", "'' is not a tokenizer"),
        ("gpt2", r"'gpt2' is not a tokenizer: use bytes, bpe:8192, or the path of"),
    ],
)
def test_invalid_tokenizer_names_and_vocabulary_sizes_raise(wanted: str, complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        tokenizer_of(wanted, SOME)


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff", b'{"model": 3}', b"[]"])
def test_a_damaged_file_is_one_line(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(
        InputError, match=r"tokenizer\.json is not a tokenizer of the package"
    ) as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def test_damaged_tokenizer_config_raises_an_error_naming_it(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(train_bpe(300, SOME).to_json())
    for content in ("[]", "{", json.dumps({"eos_token": ["a"]})):
        (tmp_path / "tokenizer_config.json").write_text(content)
        with pytest.raises(InputError, match=r"tokenizer_config\.json"):
            load_tokenizer(tmp_path)


def test_no_utf8_has_bytes_but_no_words() -> None:
    document = Document(b"ab\xffcd", "FILE")
    assert Bytes().decode([*map(int, Bytes().encode([document])[0])]) == document.content
    with pytest.raises(InputError, match=r"FILE is not UTF-8 \(byte 2\): convert it, or train on"):
        train_bpe(300, [document])
