"""Send HTTP requests to engines over one kept-alive connection per thread and engine.

A general client library would cost more CPU time than the tokens. A sampling request may take hours, so a
time without data does not end the wait by itself: after each `timeout_s` without data the caller's
`keep_waiting` decides.
"""

import http.client
import select
import socket
import ssl
import threading
from collections.abc import Callable
from urllib.parse import urlsplit

from hpc_swe.base.errors import EngineError, NoAnswer

JSON = "application/json"
TLS_READ_TIMEOUT_S = 3600.0
KeepWaiting = Callable[[], bool]
_DISCONNECTED = (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError)
KEEPALIVE = {socket.TCP_KEEPIDLE: 20, socket.TCP_KEEPINTVL: 10, socket.TCP_KEEPCNT: 3}


class _PerThread(threading.local):
    """Hold the connections of the current thread, by URL."""

    def __init__(self) -> None:
        self.connections: dict[str, http.client.HTTPConnection] = {}


_local = _PerThread()


class Refused(EngineError):
    """Report that the engine answered with a status other than 200."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def call(
    url: str,
    token: str,
    path: str,
    body: bytes | None,
    timeout_s: float,
    keep_waiting: KeepWaiting | None = None,
) -> bytes:
    """Send a POST with a JSON body, or a GET where it is None, and return the body of the answer.

    Raise Refused for a status other than 200, with the answer's beginning; NoAnswer if no data came in
    `timeout_s` and `keep_waiting` did not return True, or if the connection broke.
    """
    try:
        status, data = _exchange(url, token, path, body, timeout_s, keep_waiting)
    except (OSError, http.client.HTTPException) as error:
        _local.connections.pop(url).close()
        raise NoAnswer(
            f"{url}{path}: no answer in {timeout_s:g} s: {type(error).__name__}: {error}"
        ) from error
    except EngineError:
        _local.connections.pop(url).close()  # a late answer would be taken for the next request's
        raise
    if status != 200:
        raise Refused(f"{url}{path}: HTTP {status}: {data[:600].decode(errors='replace')}", status)
    return data


def call_on_new_connection(url: str, token: str, path: str, body: bytes | None, timeout_s: float) -> bytes:
    """Do what `call` does over a new connection, while this thread's own one waits for an answer."""
    kept, _local.connections = _local.connections, {}
    try:
        return call(url, token, path, body, timeout_s)
    finally:
        for connection in _local.connections.values():
            connection.close()
        _local.connections = kept


def _exchange(
    url: str, token: str, path: str, body: bytes | None, timeout_s: float, keep_waiting: KeepWaiting | None
) -> tuple[int, bytes]:
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = _local.connections.setdefault(url, kind(parts.netloc))
    connection.timeout, path = timeout_s, parts.path + path
    is_reused = connection.sock is not None
    headers = {"Authorization": f"Bearer {token}", "Content-Type": JSON}
    request = ("GET" if body is None else "POST", path, body, headers)
    try:
        return _send(connection, request, keep_waiting)
    except _DISCONNECTED:
        connection.close()
        if not is_reused:
            raise
        return _send(connection, request, keep_waiting)  # the server had closed an idle connection


def _send(
    connection: http.client.HTTPConnection,
    request: tuple[str, str, bytes | None, dict[str, str]],
    keep_waiting: KeepWaiting | None,
) -> tuple[int, bytes]:
    is_new = connection.sock is None
    if is_new:
        connection.connect()
        # Fail within a minute when the engine's node is gone: a machine without power closes no connection.
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEPALIVE.items():
            connection.sock.setsockopt(socket.IPPROTO_TCP, option, value)
    connection.sock.settimeout(connection.timeout)
    connection.request(*request)
    readable = select.poll()
    readable.register(connection.sock, select.POLLIN)
    while not readable.poll(1000 * (connection.timeout or 0.0)):
        if keep_waiting is None or not keep_waiting():
            raise TimeoutError("no data")
    if isinstance(connection.sock, ssl.SSLSocket) and keep_waiting is not None:
        # What made the socket readable may be a TLS session ticket, and no answer.
        connection.sock.settimeout(TLS_READ_TIMEOUT_S)
    response = connection.getresponse()
    return response.status, response.read()
