"""The connections: their largest number, and the choice of the one that ends where another one needs its place.

A connection *waits* while the next move is its client's: it is silent, idle, in the middle of a request, or does not
read its answer. If there are too many, in all or of one client, the one that has waited for longest is cut. A new one
is refused only if none waits. So clients that send nothing keep nobody out.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import sys
from collections import Counter
from functools import lru_cache
from typing import Protocol

from neper.config import ServerConfig
from neper.errors import StartupError

log = logging.getLogger(__name__)

MOST = 4096
"""The default where the limit of open files permits it."""
# Files for the engine's pipes and sockets, the grammars' process, logs, and connections that are about to be closed.
SPARE_FILES = 16
_REPORT_SECONDS = 10.0


class Member(Protocol):
    """A connection of a server."""

    def cut(self) -> None:
        """Close it now."""
        ...


class _Client:
    """The connections of one client, and those of them that wait, the longest first."""

    def __init__(self) -> None:
        self.size = 0
        self.waiting: dict[Member, None] = {}


class Connections:
    """All connections of a server.

    Attributes:
        limit, limit_per_client: most connections, in all and of one client.
        ended: connections that the server has ended or refused, by reason.
    """

    def __init__(self, config: ServerConfig) -> None:
        self.limit, self.limit_per_client = choose_limits(config)
        self.ended: Counter[str] = Counter()
        self._clients: dict[str, _Client] = {}
        self._members: dict[Member, str] = {}
        self._waiting: dict[Member, None] = {}
        self._untold: Counter[str] = Counter()
        self._report: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._members)

    def enter(self, member: Member, address: str) -> bool:
        """Count a new connection, which waits. False where there is no place for it."""
        name = client_of(address)
        client = self._clients.get(name) or _Client()
        if client.size >= self.limit_per_client:
            room = self._cut_oldest(client.waiting)
        else:
            room = len(self) < self.limit or self._cut_oldest(self._waiting)
        if not room:
            self.note("refused")
            return False
        # Cutting may have removed the client's last one.
        client = self._clients.setdefault(name, client)
        client.size += 1
        self._members[member] = name
        self.wait(member)
        return True

    def wait(self, member: Member) -> None:
        """Note that the next move is its client's."""
        name = self._members.get(member)
        if name is not None and member not in self._waiting:
            self._waiting[member] = self._clients[name].waiting[member] = None

    def busy(self, member: Member) -> None:
        """Note that the next move is the server's."""
        name = self._members.get(member)
        if name is not None and member in self._waiting:
            del self._waiting[member], self._clients[name].waiting[member]

    def leave(self, member: Member) -> None:
        """Count a connection no longer. Safe more than once."""
        self.busy(member)
        name = self._members.pop(member, None)
        if name is not None:
            client = self._clients[name]
            client.size -= 1
            if not client.size:
                del self._clients[name]

    def note(self, reason: str) -> None:
        """Count a connection that the server ends. The log has one line for many of them."""
        self.ended[reason] += 1
        self._untold[reason] += 1
        if self._report is None:
            self._tell()

    def _cut_oldest(self, waiting: dict[Member, None]) -> bool:
        member = next(iter(waiting), None)
        if member is None:
            return False
        self.leave(member)
        self.note("cut for another")
        member.cut()
        return True

    def _tell(self) -> None:
        self._report = None
        if self._untold:
            told = ", ".join(f"{count} {reason}" for reason, count in sorted(self._untold.items()))
            log.warning(
                "connections ended: %s (%d open, at most %d, %d of a client)",
                told,
                len(self),
                self.limit,
                self.limit_per_client,
            )
            self._untold.clear()
            self._report = asyncio.get_running_loop().call_later(_REPORT_SECONDS, self._tell)


@lru_cache(maxsize=1024)
def client_of(address: str) -> str:
    """The key of one client: an IPv4 address, or the 64 bits of an IPv6 address that one is given as a whole."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped is not None:
            return str(ip.ipv4_mapped)
        return str(ipaddress.ip_network((ip, 64), strict=False))
    return str(ip)


def choose_limits(config: ServerConfig) -> tuple[int, int]:
    """The most connections, in all and of one client. Each takes one open file of the process.

    Raises StartupError when the limit of open files is too low for the configuration.
    """
    room = _free_files()
    limit = config.max_connections
    if limit is None:
        limit = MOST if room is None else min(MOST, room)
    if limit < 1 or (room is not None and limit > room):
        raise StartupError(
            f"the limit of open files leaves {max(room or 0, 0)} for connections"
            + (f", max_connections is {limit}" if config.max_connections else "")
            + "; raise it (ulimit -n, or LimitNOFILE= of a unit)"
        )
    per_client = config.max_connections_per_client
    return limit, min(limit, max(1, limit // 2) if per_client is None else per_client)


def _free_files() -> int | None:
    """Open files that connections may take; None where no limit is known."""
    if sys.platform == "win32":
        return None
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        used = len(os.listdir("/dev/fd"))
    except OSError:
        used = 64
    wanted = used + SPARE_FILES + MOST
    if soft != resource.RLIM_INFINITY and soft < wanted:
        # The usual soft limit of 1024 is for programs that use select().
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return None if soft == resource.RLIM_INFINITY else soft - used - SPARE_FILES
