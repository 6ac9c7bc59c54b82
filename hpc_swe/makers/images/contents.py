"""Unpack the files of an image: archives, packages and git packs, which their first bytes show."""

import bz2
import gzip
import io
import logging
import lzma
import os
import re
import subprocess
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from subprocess import DEVNULL, PIPE

import pyarrow as pa

from hpc_swe.base.errors import DeadlineError, HpcSweError, StorageError
from hpc_swe.cluster.processes import completed, printed
from hpc_swe.makers.images.commands import FULL

LARGEST = 256 << 20
"""Bytes that are read of a file. Few files of an image are larger, and they are no source code."""
DEEPEST = 5
"""Layers that are unpacked: a wheel in a compressed archive is three, and its members are the fourth."""
GIT_S = 3600.0
"""Longest wait for git to make a repository, to index a pack in it, or to print more of what it unpacks."""
_ZLIB = (b"\x78\x01", b"\x78\x5e", b"\x78\x9c", b"\x78\xda")
_PACK = (b"PACK\0\0\0", b"# v2 git bundle", b"# v3 git bundle")
_OF_MACHINE = re.compile("unable to create thread|Too many open files|Input/output error")
_BROKEN: tuple[type[Exception], ...]
_BROKEN = (lzma.LZMAError, pa.ArrowException, tarfile.TarError, zipfile.BadZipFile, zlib.error)
_BROKEN += (EOFError, OSError, OverflowError, RuntimeError, ValueError)

Inner = Iterator[tuple[str, bytes]]

log = logging.getLogger(__name__)


def contents(path: str, data: bytes, depth: int = DEEPEST, git_s: float = GIT_S) -> Inner:
    """Yield a file and everything packed in it, with paths; `!` is between archive and member.

    Raise DeadlineError if git takes longer than `git_s` over a pack, StorageError if the disk is full, and
    HpcSweError if the machine cannot unpack a file otherwise: nobody has seen then what is in it.
    """
    yield path, data
    if depth == 0:
        return
    for unpack in _unpackers(data, git_s):
        try:
            for name, inner in unpack(data):
                yield from contents(f"{path}!{name}", inner, depth - 1, git_s)
        except subprocess.TimeoutExpired as error:
            raise DeadlineError(f"{path}: {error}") from None
        except subprocess.CalledProcessError as error:
            said = (error.stderr or b"").decode(errors="replace").strip()[-1000:]
            raise (StorageError if FULL.search(said) else HpcSweError)(f"{path}: {error} {said}") from None
        except _BROKEN as error:  # its first bytes are a coincidence, or it is damaged
            if isinstance(error, OSError) and error.errno:  # those of unpackers have no number
                raise (StorageError if FULL.search(f"{error}") else HpcSweError)(f"{path}: {error}") from None
            log.debug("%s: not unpacked: %s", path, error)


def _unpackers(data: bytes, git_s: float) -> Iterator[Callable[[bytes], Inner]]:
    """Choose by the first bytes, or by the end: a zip may follow a program."""
    for marks, unpack in _BY_MARK.items():
        if data.startswith(marks):
            yield unpack
    if data.startswith(_PACK):
        yield partial(_pack, git_s=git_s)
    if data[257:262] == b"ustar":
        yield _tar
    if b"PK\5\6" in data[-(1 << 16) - 22 :]:
        yield _zip


def _zip(data: bytes) -> Inner:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for info in archive.infolist():
            if not info.filename.endswith("/") and info.file_size <= LARGEST:
                yield info.filename, archive.read(info)


def _tar(data: bytes) -> Inner:
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
        for member in archive:
            if member.size < 0:  # a damaged one: earlier members would come again, without end
                break
            if member.isfile() and member.size <= LARGEST and (file := archive.extractfile(member)):
                yield member.name, file.read()


def _ar(data: bytes) -> Inner:
    at = 8
    while at + 60 <= len(data):
        size = max(0, int(data[at + 48 : at + 58]))  # a damaged file may say less, without end
        yield data[at : at + 16].decode(errors="replace").strip(" /"), data[at + 60 : at + 60 + size]
        at += 60 + size + size % 2


def _stream(open_stream: Callable[[io.BytesIO], io.BufferedIOBase]) -> Callable[[bytes], Inner]:
    def unpack(data: bytes) -> Inner:
        with open_stream(io.BytesIO(data)) as stream:
            yield "", stream.read(LARGEST)

    return unpack


def _zlib(data: bytes) -> Inner:
    """Unpack zlib data, also git's loose objects; their header does no harm."""
    yield "", zlib.decompressobj().decompress(data, LARGEST)


def _pack(data: bytes, git_s: float) -> Inner:
    with tempfile.TemporaryDirectory(prefix="hpc_swe-") as folder:
        git, env = ["git", "-C", folder], {**os.environ, "LC_ALL": "C.UTF-8"}

        def done(*words: str, stdin: bytes = b"") -> "subprocess.CompletedProcess[bytes]":
            job = subprocess.Popen([*git, *words], stdin=PIPE, stdout=DEVNULL, stderr=PIPE, env=env)
            return completed(job, git_s, stdin)

        done("init", "--quiet", "--bare", "--template=").check_returncode()
        index = done("index-pack", "--stdin", stdin=data[data.index(b"PACK") :])
        said = index.stderr.decode(errors="replace")
        if index.returncode < 0 or FULL.search(said) or _OF_MACHINE.search(said):
            index.check_returncode()  # else the pack is damaged, and nothing is left to list
        with printed([*git, "cat-file", "--batch-all-objects", "--batch"], git_s) as objects:
            while (header := objects.readline()).endswith(b"\n"):
                name, kind, size = header.decode().split()
                content, rest = objects.read(min(int(size), LARGEST)), int(size) + 1  # and the end of a line
                rest -= len(content)
                while rest and (more := objects.read(min(rest, 1 << 20))):
                    rest -= len(more)
                if rest:
                    break  # `printed` says why
                if kind == "blob":
                    yield name, content


_BY_MARK: dict[tuple[bytes, ...], Callable[[bytes], Inner]] = {
    (b"\x1f\x8b",): _stream(gzip.open),
    (b"BZh",): _stream(bz2.open),
    (b"\xfd7zXZ\0", b"\x5d\0\0"): _stream(lzma.open),
    (b"\x28\xb5\x2f\xfd",): _stream(partial(pa.input_stream, compression="zstd")),
    _ZLIB: _zlib,
    (b"!<arch>\n",): _ar,
}


def words_only(data: bytes) -> bytes:
    """Keep letters, digits and underscores, so that punctuation, spaces and encodings do not matter."""
    return data.replace(rb"\n", b"").translate(None, _OTHERS)  # the first removes JSON's line ends


def uncoloured(data: bytes) -> bytes:
    """Remove the markup of a page with coloured source code; return any other data unchanged."""
    return _MARKUP.sub(b"", data) if b"<span" in data[:_HEAD] else data


_HEAD = 1 << 16
_MARKUP = re.compile(rb"<[^>]*>|&(?:quot|#39|lt|gt|amp);")
_OTHERS = re.sub(rb"\w", b"", bytes(range(256)))
