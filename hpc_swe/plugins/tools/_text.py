"""What tools answer, kept short and in one piece."""


def cut(text: str, most: int) -> str:
    """At most about `most` characters: the beginning, how much is missing at least, and the end."""
    if len(text) <= most:
        return text
    tail = len(text) - most // 2
    return f"{text[: most // 2]}\n[... at least {tail - most // 2} characters cut ...]\n{text[tail:]}"


def name(path: str) -> str:
    """A file's name on one line, whatever it is made of."""
    return path if path.isprintable() else ascii(path)
