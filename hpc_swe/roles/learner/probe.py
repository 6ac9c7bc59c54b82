"""Choose the text whose log-probabilities learner and engines compare after each swap of weights."""

from pathlib import Path

from hpc_swe.agents.chat.tokens import Tokens

FIRST_IDS = tuple(range(32))
"""What is compared of a model that has no tokenizer."""
LENGTH = 48
"""Most tokens: an engine computes them while it keeps the answers of all requests back."""
WORDS = (
    "The sun rises in the east and sets in the west. There are seven days in a week and twelve months in a"
    " year. Water boils at 100 degrees Celsius."
)


def probe_ids(model: Path, vocabulary: int) -> tuple[int, ...]:
    """Return the ids of plain English in the model's tokenizer.

    A language model predicts such a text. On one that it does not predict, as on control tokens in a row,
    which are the first ids of some vocabularies, rounding in bfloat16 changes log-probabilities by several
    nats, and engines would refuse the right weights.
    """
    has_words = (model / "tokenizer.json").exists()
    ids = Tokens(model).encode(WORDS)[:LENGTH] if has_words else FIRST_IDS
    return tuple(token for token in ids if token < vocabulary)
