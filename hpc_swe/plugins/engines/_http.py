"""One kept-alive connection per thread and engine: a client library costs more than the tokens.

A request that samples may take hours, so silence alone ends no wait: after each `timeout_s` of silence the
caller's `patience` says whether to wait on.
"""

import http.client
import select
import socket
import ssl
import threading
from collections.abc import Callable
from urllib.parse import urlsplit

from hpc_swe.errors import EngineError, NoAnswer

JSON = "application/json"
SECURE_S = 3600.0
Patience = Callable[[], bool]
_LOST = (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError)
KEEPALIVE = {socket.TCP_KEEPIDLE: 20, socket.TCP_KEEPINTVL: 10, socket.TCP_KEEPCNT: 3}
_local = threading.local()


class _Plain(http.client.HTTPConnection):
    """Fails within a minute when the engine's node is gone: a machine without power refuses nothing."""

    def connect(self) -> None:
        super().connect()
        _keep_alive(self.sock)


class _Secure(http.client.HTTPSConnection):
    """The same by TLS; the engine's certificate must be one that this machine trusts."""

    def connect(self) -> None:
        super().connect()
        _keep_alive(self.sock)


def _keep_alive(connected: socket.socket) -> None:
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEPALIVE.items():
        connected.setsockopt(socket.IPPROTO_TCP, option, value)


class Refused(EngineError):
    """The engine answered with another status than 200."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def never() -> bool:
    """The patience of a request that is due at its time-out."""
    return False


def call(
    url: str, token: str, path: str, body: bytes | None, timeout_s: float, patience: Patience = never
) -> bytes:
    """POST a JSON body, or GET where it is None; returns the body of the answer.

    Raises:
        Refused: A status other than 200; the message carries the answer's beginning.
        NoAnswer: None within the time, and `patience` was False, or the connection broke.
    """
    try:
        status, data = _exchange(url, token, path, body, timeout_s, patience)
    except (OSError, http.client.HTTPException) as error:
        _connections().pop(url).close()
        raise NoAnswer(
            f"{url}{path}: no answer in {timeout_s:g} s: {type(error).__name__}: {error}"
        ) from error
    except EngineError:
        _connections().pop(url).close()  # the answer may still come, and would be taken for another's
        raise
    if status != 200:
        raise Refused(f"{url}{path}: HTTP {status}: {data[:600].decode(errors='replace')}", status)
    return data


def ask_apart(url: str, token: str, path: str, body: bytes | None, timeout_s: float) -> bytes:
    """`call` over a connection of its own, as while this thread's other one waits.

    Raises:
        EngineError: As `call`.
    """
    kept, _local.connections = _connections(), {}
    try:
        return call(url, token, path, body, timeout_s)
    finally:
        for connection in _connections().values():
            connection.close()
        _local.connections = kept


def _connections() -> dict[str, http.client.HTTPConnection]:
    if not hasattr(_local, "connections"):
        _local.connections = {}
    found: dict[str, http.client.HTTPConnection] = _local.connections
    return found


def _exchange(
    url: str, token: str, path: str, body: bytes | None, timeout_s: float, patience: Patience
) -> tuple[int, bytes]:
    parts = urlsplit(url)
    kind = _Secure if parts.scheme == "https" else _Plain
    connection = _connections().setdefault(url, kind(parts.netloc))
    connection.timeout, path = timeout_s, parts.path + path
    is_reused = connection.sock is not None
    headers = {"Authorization": f"Bearer {token}", "Content-Type": JSON}
    request = ("GET" if body is None else "POST", path, body, headers)
    try:
        return _send(connection, request, patience)
    except _LOST:
        connection.close()
        if not is_reused:
            raise
        return _send(connection, request, patience)  # the server had closed an idle connection


def _send(
    connection: http.client.HTTPConnection,
    request: tuple[str, str, bytes | None, dict[str, str]],
    patience: Patience,
) -> tuple[int, bytes]:
    if connection.sock is not None:
        connection.sock.settimeout(connection.timeout)
    connection.request(*request)
    look = select.poll()
    look.register(connection.sock, select.POLLIN)
    while not look.poll(1000 * (connection.timeout or 0.0)):
        if not patience():
            raise TimeoutError("silence")
    if isinstance(connection.sock, ssl.SSLSocket) and patience is not never:
        connection.sock.settimeout(SECURE_S)  # what made it readable may be a session ticket, and no answer
    response = connection.getresponse()
    return response.status, response.read()
