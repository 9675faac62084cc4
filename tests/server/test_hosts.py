"""The hosts that requests may name: without a key, a server on a loopback address answers for no other."""

from __future__ import annotations

import socket

import pytest

from neper.config import ServerConfig
from neper.errors import StartupError
from neper.server.run import allowed_hosts
from neper.server.transport.hosts import AllowedHosts
from neper.text.tokenizer import Tokenizer
from tests.server.conftest import Client, running
from tests.server.test_errors import check

LOOPBACK = allowed_hosts(ServerConfig(), "127.0.0.1")


OURS = (
    *("127.0.0.1", "127.0.0.1:8000", "127.8.9.10:5", "localhost", "LocalHost:80", "localhost.", "a.localhost:1"),
    *("[::1]", "[::1]:8000", "[0:0:0:0:0:0:0:1]:9"),
)
OTHERS = (
    *("evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example", "notlocalhost", ""),
    *("localhost@evil.example", "evil.example#[::1]", "localhost:x", "localhost\0", "127.0.0.1/", ":80", "::1:8000"),
    *("10.0.0.1", "0.0.0.0", "2130706433", "0x7f.0.0.1", "[::2]", "[::]", "[::ffff:10.0.0.1]"),
)


@pytest.mark.parametrize("host", OURS)
def test_case_115_this_machine_s_names(host: str) -> None:
    assert AllowedHosts(LOOPBACK).allows(host)


@pytest.mark.parametrize("host", OTHERS)
def test_case_115_names_of_others(host: str) -> None:
    assert not AllowedHosts(LOOPBACK).allows(host)


def test_case_115_hosts_that_are_named() -> None:
    hosts = AllowedHosts(("llm.example.com", "*.Example.org", "[2001:db8::1]"))
    for host in ("llm.example.com:443", "LLM.example.com", "a.example.org", "a.b.example.org", "[2001:db8::1]:1"):
        assert hosts.allows(host)
    for host in ("example.com", "example.org", "xexample.org", "localhost", "127.0.0.1", "[2001:db8::2]"):
        assert not hosts.allows(host)
    assert AllowedHosts(()).allows("evil.example")
    assert AllowedHosts(("*",)).allows("evil.example")


def test_case_115_the_default_checks_only_where_loopback_alone_protects() -> None:
    assert set(LOOPBACK) == {"localhost", "127.0.0.1"}
    assert "my.name" in allowed_hosts(ServerConfig(host="my.name"), "127.0.1.1")
    assert allowed_hosts(ServerConfig(api_key="secret"), "127.0.0.1") == ()
    assert allowed_hosts(ServerConfig(host="0.0.0.0"), "0.0.0.0") == ()
    assert allowed_hosts(ServerConfig(allowed_hosts=("a.example",)), "127.0.0.1") == ("a.example",)
    for wrong in ("https://a.example", "a.example/", "a example", "", "*.*", "a*"):
        with pytest.raises(StartupError, match="allowed_hosts"):
            ServerConfig(allowed_hosts=(wrong,))


def status(client: Client, head: str) -> int:
    with socket.create_connection(client.server._socket.getsockname(), timeout=60) as raw:
        raw.sendall(head.replace("\n", "\r\n").encode() + b"\r\n\r\n")
        return int(raw.recv(1000).split()[1])


def test_case_115_over_the_wire(tokenizer: Tokenizer) -> None:
    with running(tokenizer, ServerConfig(allowed_hosts=LOOPBACK)) as client:
        for path in ("/v1/models", "/health", "/metrics", "/nowhere"):
            message = check(client.http.get(path, headers={"host": "evil.example"}), 403, None, "host_not_allowed")
            assert "'evil.example'" in message
            assert "--allowed-hosts" in message
        assert client.http.get("/v1/models").status_code == 200
        assert status(client, "GET /health HTTP/1.1\nHost: localhost") == 200
        assert status(client, "GET /health HTTP/1.1") == 400
        assert status(client, "GET /health HTTP/1.1\nHost: localhost\nHost: evil.example") == 400
        assert status(client, "GET /health HTTP/1.0") == 200  # no browser speaks that
