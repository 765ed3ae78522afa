"""Generate text with a trained model: `python -m models generate --run FOLDER --prompt TEXT`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from models import program
from models.data.tokenizer import Bytes, Tokenizer, load_tokenizer
from models.errors import InputError
from models.nets.generate import Draw, generate
from models.run.flags import Parser
from models.run.trained import load_text_model
from models.settings import replaced, setting
from models.train.config import LARGEST_SEED
from models.train.folder import TOKENIZER

BYTES = Bytes()


@dataclasses.dataclass(frozen=True)
class GenerationOptions:
    """Settings of the command `sample`."""

    run: Path = setting(Path("runs/tiny"), f"Folder of a run, the --out of `{program.NAME} train`.")
    prompt: str = setting("def ", "Text to continue.")
    length: int = setting(400, "Number of tokens to generate.", least=1, most=10**9)
    samples: int = setting(1, "Number of continuations, generated together.", least=1, most=10**6)
    temperature: float = setting(
        0.8, "Divisor of the logits in sampling; 0 always takes the most likely token.", least=0
    )
    top_k: int = setting(
        0, "Sample only among this many of the most likely tokens; 0 for all.", least=0
    )
    top_p: float = setting(
        1.0, "Sample only among the most likely tokens that have this total probability.",
        above=0, most=1,
    )  # fmt: skip
    seed: int = setting(0, "Random seed.", least=0, most=LARGEST_SEED)


def texts(model: Any, options: GenerationOptions, tokenizer: Tokenizer = BYTES) -> list[str]:
    """Return the prompt with each of its continuations, which may span several documents."""
    prompt = tokenizer.prompt(options.prompt)
    # The model's vocabulary may be larger than the tokenizer's.
    vocab = min(tokenizer.vocab, model.config.vocab)
    draw = Draw(options.temperature, options.top_k, options.top_p, vocab)
    rows = generate(model, [prompt] * options.samples, options.length, draw, options.seed)
    return [tokenizer.decode(row.tolist()).decode(errors="replace") for row in rows]


def main(arguments: list[str]) -> int:
    """Continue a prompt with the newest checkpoint of a run."""
    parser = Parser(prog=f"{program.NAME} generate", description=main.__doc__)
    parser.add_settings(GenerationOptions())
    options = replaced(GenerationOptions(), parser.parse(arguments), by_flag=True)
    if not options.prompt:
        raise InputError("--prompt needs at least one character")
    file, model = options.run / TOKENIZER, load_text_model(options.run, "generate")
    tokenizer = load_tokenizer(file) if file.exists() else BYTES
    print("\n\n".join(texts(model, options, tokenizer)))
    return 0
