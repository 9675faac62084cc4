"""The end of a request whose client has left."""

from __future__ import annotations


class ClientDisconnected(Exception):
    """The client is gone, so nobody is left to answer."""
