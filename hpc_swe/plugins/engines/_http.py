"""One kept-alive connection per thread and engine: a client library costs more than the tokens."""

import http.client
import socket
import threading
from urllib.parse import urlsplit

from hpc_swe.errors import EngineError

JSON = "application/json"
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


def call(url: str, token: str, path: str, body: bytes | None, timeout_s: float) -> bytes:
    """POST a JSON body, or GET where it is None; returns the body of the answer.

    Raises:
        Refused: A status other than 200; the message carries the answer's beginning.
        EngineError: No answer within the time.
    """
    try:
        status, data = _exchange(url, token, path, body, timeout_s)
    except (OSError, http.client.HTTPException) as error:
        _connections().pop(url).close()
        raise EngineError(
            f"{url}{path}: no answer in {timeout_s:g} s: {type(error).__name__}: {error}"
        ) from error
    if status != 200:
        raise Refused(f"{url}{path}: HTTP {status}: {data[:600].decode(errors='replace')}", status)
    return data


def _connections() -> dict[str, http.client.HTTPConnection]:
    if not hasattr(_local, "connections"):
        _local.connections = {}
    found: dict[str, http.client.HTTPConnection] = _local.connections
    return found


def _exchange(url: str, token: str, path: str, body: bytes | None, timeout_s: float) -> tuple[int, bytes]:
    parts = urlsplit(url)
    kind = _Secure if parts.scheme == "https" else _Plain
    connection = _connections().setdefault(url, kind(parts.netloc))
    connection.timeout, path = timeout_s, parts.path + path
    is_reused = connection.sock is not None
    try:
        return _send(connection, token, path, body)
    except _LOST:
        connection.close()
        if not is_reused:
            raise
        return _send(connection, token, path, body)  # the server had closed an idle connection


def _send(
    connection: http.client.HTTPConnection, token: str, path: str, body: bytes | None
) -> tuple[int, bytes]:
    if connection.sock is not None:
        connection.sock.settimeout(connection.timeout)
    headers = {"Authorization": f"Bearer {token}", "Content-Type": JSON}
    connection.request("GET" if body is None else "POST", path, body, headers)
    response = connection.getresponse()
    return response.status, response.read()
