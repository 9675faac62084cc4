"""Connections, hosts, bodies and errors: HTTP before any meaning."""
