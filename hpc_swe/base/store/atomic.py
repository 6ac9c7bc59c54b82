"""Publish cells: small files that a reader sees whole or not at all."""

import contextlib
import errno
import io
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from hpc_swe.base.errors import CorruptRecord, StorageError
from hpc_swe.base.records import Record

if TYPE_CHECKING:
    import pyarrow as pa

R = TypeVar("R", bound=Record)
REFUSALS = {
    errno.ENOSPC: "no space is left; free some, or lower the limits of [retention]",
    errno.EDQUOT: "the quota is used up; see `lfs quota` or `quota`",
    errno.EFBIG: "`ulimit -f` allows no larger file; raise it",
    errno.EIO: "an I/O error; the file system may be failing over",
    errno.ESHUTDOWN: "this client was evicted; the file system reconnects by itself",
    errno.ENOTCONN: "the server is not connected; the file system may be failing over",
    errno.ETIMEDOUT: "the server did not answer; the file system may be failing over",
    errno.ESTALE: "a stale handle; the file system was remounted",
    errno.EROFS: "it is mounted read-only",
    errno.EACCES: "permission is denied; is the run yours? see `ls -ld`",
    errno.EPERM: "permission is denied; is the run yours? see `ls -ld`",
}

STALE_TRIES = 5
MODE = 0o640
"""Mode of what is published, less the umask of the process, which `sharing.take_umask` sets for a run."""


@lru_cache(maxsize=1)
def _identity(pid: int) -> str:
    return os.urandom(4).hex()


def identity() -> str:
    """Return eight random hex digits of this process. They never repeat, unlike a Slurm job's id."""
    return _identity(os.getpid())


def temporary(final: Path, prefix: str = "") -> Path:
    """Name a hidden file beside `final`, unique to this call; the name ends in this process's identity."""
    return final.with_name(f".{prefix}{final.name}~{os.urandom(3).hex()}-{identity()}")


@contextlib.contextmanager
def storage(path: Path) -> Iterator[None]:
    """Turn `REFUSALS` of the file system (full, quota, I/O) into StorageError; the caller tries again."""
    try:
        yield
    except OSError as error:
        if error.errno in REFUSALS:
            raise StorageError(f"{path}: {REFUSALS[error.errno]}") from error
        raise


def write(path: Path, data: bytes, *, durable: bool = True, check: Callable[[], None] = lambda: None) -> None:
    """Publish `data` at `path` so that no reader on any node sees part of it; an existing file is replaced.

    `check` is called just before that, and prevents it by an error. After an error nothing was published,
    and no temporary file is left.
    """
    with _written(path, data, durable) as name:
        check()
        try:
            os.replace(name, path)
        except IsADirectoryError:  # not ours: move it aside for its owner
            os.rename(path, path.with_name(f"{path.name}.broken-{os.urandom(4).hex()}"))
            os.replace(name, path)


def write_secret(path: Path, data: bytes) -> None:
    """Publish `data` as `write` does, for the owner alone, also in a run that a group may read."""
    with _written(path, data, True, 0o600) as name:
        os.replace(name, path)


def write_new(path: Path, data: bytes) -> None:
    """Publish `data` at `path`, or raise FileExistsError if that exists.

    A link does that on every file system; a rename cannot.
    """
    with _written(path, data, True) as name:
        os.link(name, path)
        with contextlib.suppress(OSError):  # it is published; the coordinator removes leftover temporaries
            os.unlink(name)


@contextlib.contextmanager
def _written(path: Path, data: bytes, durable: bool, mode: int = MODE) -> Iterator[Path]:
    """Write `data` to a temporary file beside `path`, which is removed when the block fails.

    The fsync is not for power cuts: a Lustre client that dies with dirty pages would leave a renamed
    but empty file behind, since names and data are on different servers. Heartbeats do without it.
    """
    name = temporary(path)
    with storage(path):
        try:
            with os.fdopen(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
                file.write(data)
                file.flush()
                if durable:
                    os.fsync(file.fileno())
            yield name
        except BaseException:  # SystemExit and KeyboardInterrupt too
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise


def encode(path: Path, record: Record) -> bytes:
    """Encode a record as JSON for names that end in .json, as MessagePack for all others."""
    return msgspec.json.encode(record) if path.suffix == ".json" else msgspec.msgpack.encode(record)


def decode(path: Path, data: bytes, kind: type[R]) -> R:
    """Decode what `encode` wrote; raise CorruptRecord, with the file's name, for anything else."""
    try:
        if path.suffix == ".json":
            return msgspec.json.decode(data, type=kind)
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CorruptRecord(f"{path}: not a {kind.__name__}: {error}; move it away") from error


def put(
    path: Path, record: Record, *, durable: bool = True, check: Callable[[], None] = lambda: None
) -> None:
    """Publish a record as a cell."""
    write(path, encode(path, record), durable=durable, check=check)


def put_table(path: Path, table: "pa.Table", publish: Callable[[Path, bytes], None] = write) -> None:
    """Publish a table as a parquet file with checksums, which any tool can open."""
    import pyarrow.parquet as pq  # slow to load, and most processes write no table

    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd", write_page_checksum=True)
    publish(path, sink.getvalue())


def get_table(path: Path, columns: Sequence[str]) -> "pa.Table":
    """Read columns of a table; raise CorruptRecord if it is damaged, FileNotFoundError if there is none."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with storage(path):
            return pq.read_table(path, columns=list(columns), page_checksum_verification=True).select(columns)
    except FileNotFoundError:
        raise
    except (pa.ArrowException, OSError, KeyError) as error:
        raise CorruptRecord(f"{path}: not the table that was published: {error}; put it back") from error


def get(path: Path, kind: type[R]) -> R:
    """Read a cell; raise FileNotFoundError if there is none, and CorruptRecord if it is of another kind."""
    return decode(path, read(path), kind)


def read(path: Path) -> bytes:
    """Read a file; open it again when another client has replaced it meanwhile, which NFS calls stale."""
    with storage(path):
        for tries_left in reversed(range(STALE_TRIES)):
            try:
                with opened(path) as file:
                    return file.read()
            except OSError as error:
                if error.errno != errno.ESTALE or not tries_left:
                    raise
    raise AssertionError("unreachable")


def opened(path: Path) -> io.BufferedReader:
    """Open a regular file; raise CorruptRecord if something else has this name.

    Reading a pipe could block for ever, and a device may have no end.
    """
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        if stat.S_ISREG(os.fstat(file).st_mode):
            return os.fdopen(file, "rb")
        os.close(file)
    except OSError as error:
        if error.errno not in (errno.ENOTDIR, errno.ELOOP, errno.ENXIO):  # below a file, a loop, a socket
            raise
    raise CorruptRecord(f"{path}: not a regular file; move it away")


def names(folder: Path) -> list[str]:
    """List the published names of a folder, sorted; hidden names are skipped."""
    with storage(folder):
        return sorted(name for name in os.listdir(folder) if not name.startswith("."))
