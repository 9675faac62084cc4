from __future__ import annotations

import signal
import socket
import sys

import pytest

from neper.errors import StartupError
from neper.server.run import _stop_signals
from neper.server.transport.listener import bind, listen


@pytest.mark.parametrize("other", ["127.0.0.1", "0.0.0.0"])
def test_case_113_a_second_server_fails_while_the_first_one_still_starts(other: str) -> None:
    with bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        for _ in range(2):
            with pytest.raises(StartupError, match=rf"^port {port} on {other} is in use.*another --port$"):
                bind(other, port)
            listen(first, "127.0.0.1", port)  # the second time: it serves


@pytest.mark.skipif(sys.platform == "win32", reason="the other rules of Windows")
def test_case_113_nor_can_two_start_beside_what_an_earlier_server_left() -> None:
    with bind("127.0.0.1", 0) as earlier:
        port = earlier.getsockname()[1]
        listen(earlier, "127.0.0.1", port)
        with socket.create_connection(("127.0.0.1", port)) as client:
            earlier.accept()[0].close()  # the side that closes first keeps the port in TIME_WAIT
            assert client.recv(1) == b""
    with bind("127.0.0.1", port), pytest.raises(StartupError, match="in use"):
        bind("127.0.0.1", port)


def test_case_113_a_port_lost_before_listening_is_one_line() -> None:
    pair = [socket.socket(), socket.socket()]
    with pair[0], pair[1]:
        for sock in pair:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(pair[0].getsockname() if sock is pair[1] else ("127.0.0.1", 0))
        port = pair[0].getsockname()[1]
        listen(pair[0], "127.0.0.1", port)
        with pytest.raises(StartupError, match=rf"^port {port} on 127.0.0.1 is in use"):
            listen(pair[1], "127.0.0.1", port)


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="no terminals that hang up")
def test_case_120_a_closed_terminal_stops_the_server_unless_it_was_told_not_to() -> None:
    before = signal.getsignal(signal.SIGHUP)
    try:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        assert signal.SIGHUP in _stop_signals()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
        assert signal.SIGHUP not in _stop_signals()
    finally:
        signal.signal(signal.SIGHUP, before)
