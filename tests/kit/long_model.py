"""A tiny random Qwen3 whose context holds an agent's whole session, and a tokenizer of this repository."""

from pathlib import Path

from hpc_swe.demo.model import TEMPLATE, make_tokenizer, save_model, save_tokenizer
from tests.kit.checkout import ROOT

CONTEXT = 32768
VOCABULARY = 4096
WORDS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # as GPT-2 has them


def make_model(folder: Path) -> Path:
    pages = [
        path
        for where in ("docs/*.md", "hpc_swe/*.py", "hpc_swe/runs/*.py")
        for path in sorted(ROOT.glob(where))
    ]
    texts = [path.read_text() for path in pages]
    folder.mkdir(parents=True)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer = make_tokenizer(texts, VOCABULARY, WORDS)
    save_tokenizer(tokenizer, folder)
    save_model(tokenizer, folder, 0, hidden_size=64, intermediate_size=96, max_position_embeddings=CONTEXT)
    return folder
