"""What tools answer, kept short and in one piece."""


def cut(text: str, most: int) -> str:
    """At most about `most` characters: the beginning, how much is missing at least, and the end."""
    if len(text) <= most:
        return text
    tail = len(text) - most // 2
    return f"{text[: most // 2]}\n[... at least {tail - most // 2} characters cut ...]\n{text[tail:]}"


def with_ends(new: str, around: str) -> str:
    """New text with the first line end of what it goes into; text that has a \\r itself stays as it is."""
    line, end, _ = around.partition("\n")
    return new.replace("\n", "\r\n") if end and line.endswith("\r") and "\r" not in new else new


def name(path: str) -> str:
    """A file's name on one line, whatever it is made of."""
    return path if path.isprintable() else ascii(path)
