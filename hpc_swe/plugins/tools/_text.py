"""Write text as a file and an answer need it."""


def with_ends(new: str, text: str, at: int) -> str:
    """Return `new` with the line ends of `text` at its place: the one after it, or where none is, before it.

    New text that has a \\r itself stays as it is.
    """
    end = max(text.find("\n", at), text.rfind("\n", 0, at)) + 1
    return new.replace("\n", "\r\n") if text.endswith("\r\n", 0, end) and "\r" not in new else new


def name(path: str) -> str:
    """Return a file's name on one line, whatever characters it has."""
    return path if path.isprintable() else ascii(path)
