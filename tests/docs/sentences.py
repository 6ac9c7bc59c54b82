"""List every docstring whose first sentence lacks a verb: python -m tests.docs.sentences.

The check knows words, not grammar. A function's docstring opens with a verb, as a command. That of a module,
a class or a property may also be a statement with a verb. Words that are nouns as often as verbs ("batches",
"runs") count as verbs only where they open the sentence or follow a pronoun.
"""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

PACKAGES = ("hpc_swe", "jobs")
CLAUSES = ("how", "one", "what", "where", "whether", "which", "who", "whose", "why")
"""Words that open a clause and no sentence."""
PRONOUNS = ("and", "each", "it", "that", "which", "who")
_WORDS = tomllib.loads(Path(__file__).with_name("verbs.toml").read_text())
VERBS, IRREGULAR, NOUNS = (frozenset(_WORDS[name].split()) for name in ("verbs", "irregular", "nouns"))


def third_person(verb: str) -> str:
    """Return the form that follows "it"."""
    if verb.endswith(("s", "sh", "ch", "x", "z", "o")):
        return verb + "es"
    return verb[:-1] + "ies" if re.search("[^aeiou]y$", verb) else verb + "s"


THIRDS = frozenset(map(third_person, VERBS))
FORMS = IRREGULAR | THIRDS - NOUNS


def first_sentence(text: str) -> str:
    """Return the text up to its first full stop or blank line, with code as "it"."""
    paragraph = re.sub(r"`+[^`]*`+", "it", " ".join(text.split("\n\n")[0].split()))
    return re.split(r"(?<=\.)\s", paragraph)[0]


def is_sentence(kind: type[ast.AST], text: str) -> bool:
    """Return whether the docstring of a function, class or module opens with a sentence that has a verb."""
    words = re.findall(r"[A-Za-z']+", first_sentence(text).lower())
    opening = words[0] if words else ""
    if not text.split("\n\n")[0].rstrip().endswith((".", ":", "?")):
        return False
    return opening in VERBS or (kind is not ast.FunctionDef and opening not in CLAUSES and _has_verb(words))


def _has_verb(words: list[str]) -> bool:
    pairs = zip(["", *words], words, strict=False)
    return any(word in FORMS or (word in THIRDS and before in PRONOUNS) for before, word in pairs)


def offenders(root: Path) -> Iterator[str]:
    """Yield the place and the first line of every docstring that is no sentence with a verb."""
    for path in sorted(each for package in PACKAGES for each in (root / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text = ast.get_docstring(node)
                if text and not is_sentence(_kind(node), text):
                    line = getattr(node, "lineno", 1)
                    yield f"{path.relative_to(root)}:{line}: {text.splitlines()[0]}"


def _kind(node: ast.AST) -> type[ast.AST]:
    decorators = node.decorator_list if isinstance(node, ast.FunctionDef) else []
    is_property = any("property" in ast.unparse(decorator) for decorator in decorators)
    return ast.ClassDef if is_property else type(node)


if __name__ == "__main__":
    found = list(offenders(Path.cwd()))
    print(*found, sep="\n", end="\n" if found else "")
    sys.exit(bool(found))
