"""Text from a trained model: `python -m models sample --out FOLDER --prompt TEXT`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from models.data.tokenizer import Bytes, Tokenizer, load_words
from models.errors import InputError
from models.nets.generate import Draw, generate
from models.run.flags import Parser
from models.run.trained import trained_text
from models.settings import replaced, setting
from models.train.config import LARGEST_SEED
from models.train.folder import TOKENIZER

BYTES = Bytes()


@dataclasses.dataclass(frozen=True)
class Sampling:
    """What to draw from a run."""

    out: Path = setting(Path("runs/tiny"), "Folder of the run.")
    prompt: str = setting("def ", "Text to continue.")
    length: int = setting(400, "Tokens to add.", least=1, most=10**9)
    samples: int = setting(1, "Continuations, all at once.", least=1, most=10**6)
    temperature: float = setting(0.8, "0 takes the best token.", least=0)
    top_k: int = setting(0, "Of so many likeliest tokens; of all if 0.", least=0)
    top_p: float = setting(1.0, "Of the likeliest, up to this probability.", above=0, most=1)
    seed: int = setting(0, "Of the draws.", least=0, most=LARGEST_SEED)


def texts(model: Any, asked: Sampling, tokenizer: Tokenizer = BYTES) -> list[str]:
    """The prompt and each of its continuations, which go on over the end of a document."""
    prompt = tokenizer.prompt(asked.prompt)
    # A vocabulary may be larger than that of what it was trained on.
    vocab = min(tokenizer.vocab, model.config.vocab)
    draw = Draw(asked.temperature, asked.top_k, asked.top_p, vocab)
    rows = generate(model, [prompt] * asked.samples, asked.length, draw, asked.seed)
    return [tokenizer.decode(row.tolist()).decode(errors="replace") for row in rows]


def main(arguments: list[str]) -> int:
    """Continue a prompt with the newest checkpoint of a run."""
    parser = Parser(prog="python -m models sample", description=main.__doc__)
    parser.add_settings(Sampling())
    asked = replaced(Sampling(), parser.parse(arguments), by_flag=True)
    if not asked.prompt:
        raise InputError("--prompt needs at least one character")
    words, model = asked.out / TOKENIZER, trained_text(asked.out, "sample")
    print("\n\n".join(texts(model, asked, load_words(words) if words.exists() else BYTES)))
    return 0
