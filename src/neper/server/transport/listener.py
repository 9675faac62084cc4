"""The listener: the socket that the server takes connections from, and its address."""

from __future__ import annotations

import errno
import ipaddress
import socket
import sys
from typing import Any

from neper.errors import StartupError

BACKLOG = 2048
"""Connections that wait to be taken."""


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to the address, not yet listening: clients are refused until the model is ready, not kept waiting.

    Raises StartupError, with the port and the remedy, when the port is taken or may not be used.
    """
    if not 0 <= port <= 65535:  # getaddrinfo takes it modulo 65536
        raise StartupError(f"cannot listen on port {port}: choose a --port from 0 (any free one) to 65535")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError) as error:
        raise StartupError(f"cannot listen on {host}:{port}: {error}. Choose another --host or --port") from None
    sock = socket.socket(family, kind, protocol)
    try:
        try:
            # Alone first: two sockets that both allow reuse can be bound to one port until one of them listens.
            sock.bind(address)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or sys.platform == "win32":
                raise
            # Beside connections left of an earlier server, but not beside a server, not even a starting one.
            _allow_reuse(sock, True)
            sock.bind(address)
            _allow_reuse(sock, False)
    except OSError as error:
        sock.close()
        raise _address_error(host, port, error) from None
    return sock


def listen(sock: socket.socket, host: str, port: int) -> None:
    """Take connections from now on.

    The event loop does not do it: if another socket listens on the port, uvloop only logs it and goes on without.

    Raises StartupError when the port was taken since it was bound.
    """
    try:
        if sys.platform != "win32":  # connections that we leave must not keep the next server from the port
            _allow_reuse(sock, True)
        sock.listen(BACKLOG)
    except OSError as error:
        raise _address_error(host, port, error) from None


def _allow_reuse(sock: socket.socket, allowed: bool) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, allowed)


def _address_error(host: str, port: int, error: OSError) -> StartupError:
    if error.errno == errno.EADDRINUSE:
        return StartupError(f"port {port} on {host} is in use. Stop what listens there, or choose another --port")
    if error.errno == errno.EACCES:
        return StartupError(f"port {port} needs more rights than this user has. Choose a --port from 1024 on")
    return StartupError(f"cannot listen on {host}:{port}: {error.strerror}. Choose another --host or --port")


def is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def base_url(address: tuple[Any, ...]) -> str:
    """URL of a bound address, as a client on this machine would write it."""
    host, port = address[0], address[1]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
