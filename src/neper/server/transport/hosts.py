"""The hosts that requests may name.

A page of another origin can give its own host name this machine's address (DNS rebinding). A browser then takes both
for one origin, and the page can read a server's answers. Such requests still carry that page's host name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from starlette.types import Scope

from neper.errors import HostNotAllowedError, InvalidRequestError
from neper.server.transport.listener import is_loopback

# A name or an address, IPv6 in brackets, perhaps with a port.
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9_.-]+)(?::\d*)?")
LOOPBACK = "localhost"
"""The name that stands for itself, names below it, and all loopback addresses."""


class AllowedHosts:
    """Names and addresses, without ports. With none at all, or `*`, every host is allowed.

    `*.example.com` allows all names below example.com, and `localhost` loopback addresses too.
    """

    def __init__(self, hosts: Iterable[str]) -> None:
        plain = {host.lower().strip("[]").rstrip(".") for host in hosts}
        self._all = not plain or "*" in plain
        self._names = {host for host in plain if not host.startswith("*.")}
        self._below = tuple(host[1:] for host in plain if host.startswith("*."))
        if LOOPBACK in plain:
            self._below += (f".{LOOPBACK}",)

    def check(self, scope: Scope) -> None:
        """Check the host that a request names. Raises HostNotAllowedError where it is not one of these."""
        if self._all:
            return
        named = [value for name, value in scope["headers"] if name == b"host"]
        if len(named) > 1 or (not named and scope["http_version"] != "1.0"):
            raise InvalidRequestError("the request needs one header Host")
        for value in named:
            text = value.decode("latin-1")
            if not self.allows(text):
                raise HostNotAllowedError(
                    f"the host {text!r} is not served here; start the server with --allowed-hosts to allow it"
                )

    def allows(self, host: str) -> bool:
        """True for a Host header that is allowed; its port does not matter."""
        match = _HOST.fullmatch(host.strip().lower())
        if match is None:
            return self._all
        name = match[1].strip("[]").rstrip(".")
        loopback = LOOPBACK in self._names and is_loopback(name)
        return self._all or name in self._names or name.endswith(self._below) or loopback
