"""Files of the explorer: read once, and sent with headers that keep the page to itself."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple

from starlette.types import Scope, Send

from neper.errors import NotFoundError
from neper.server.transport.asgi import Header, header, send_body

PAGE = "/"
FOLDER = "/explorer/"

_TYPES = {
    ".html": b"text/html; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".svg": b"image/svg+xml",
}
# The text of a model is never markup: no script and no style but the files', no string that becomes markup
# (trusted types), no other host, no frame around the page.
_POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    b"form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS: tuple[Header, ...] = (
    # A browser asks each time, and gets a 304 while the content has the same hash.
    (b"cache-control", b"no-cache"),
    (b"content-security-policy", _POLICY),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
)


class File(NamedTuple):
    """A file of the page. `etag` is a hash of its content."""

    body: bytes
    content_type: bytes
    etag: bytes


def _read() -> dict[str, File]:
    """Path → file. The page itself is at `/`, what it loads is below `/explorer/`."""
    files = {}
    for path in sorted((Path(__file__).parent / "static").iterdir()):
        body = path.read_bytes()
        place = PAGE if path.name == "index.html" else FOLDER + path.name
        files[place] = File(body, _TYPES[path.suffix], b'"%b"' % hashlib.sha256(body).hexdigest()[:32].encode())
    return files


FILES = _read()


async def send_file(scope: Scope, send: Send) -> None:
    """Answer with the file of a path. Raises NotFoundError where there is none."""
    file = FILES.get(scope["path"])
    if file is None:
        raise NotFoundError(f"there is no {scope['path']} here")
    headers = [*_HEADERS, (b"etag", file.etag)]
    known = [tag.strip().removeprefix(b"W/") for tag in (header(scope, b"if-none-match") or b"").split(b",")]
    if file.etag in known:
        await send({"type": "http.response.start", "status": 304, "headers": headers})
        await send({"type": "http.response.body", "body": b""})
    else:
        await send_body(send, file.body, file.content_type, headers=headers)
