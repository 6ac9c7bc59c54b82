"""What tools answer, kept short and in one piece."""


def cut(text: str, most: int) -> str:
    """At most about `most` characters: the beginning, how much is missing at least, and the end."""
    if len(text) <= most:
        return text
    tail = len(text) - most // 2
    return f"{text[: most // 2]}\n[... at least {tail - most // 2} characters cut ...]\n{text[tail:]}"


def with_ends(new: str, text: str, at: int) -> str:
    """New text with the line end next to where it goes: that after it, or where none is, the one before it.

    New text that has a \\r itself stays as it is.
    """
    end = max(text.find("\n", at), text.rfind("\n", 0, at)) + 1
    return new.replace("\n", "\r\n") if text.endswith("\r\n", 0, end) and "\r" not in new else new


def name(path: str) -> str:
    """A file's name on one line, whatever it is made of."""
    return path if path.isprintable() else ascii(path)
