"""The explorer's files over HTTP: what is served, with which headers, and that nothing of them leads elsewhere."""

from __future__ import annotations

import re

import pytest

from neper.config import ServerConfig
from neper.server.explorer.files import FILES, FOLDER
from neper.server.run import allowed_hosts
from neper.text.tokenizer import Tokenizer
from tests.server.conftest import Client, running
from tests.server.test_errors import check

TYPES = {"css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8", "svg": "image/svg+xml"}
TEXTS = {path: file.body.decode() for path, file in FILES.items()}
SCRIPTS = {path: text for path, text in TEXTS.items() if path.endswith(".js")}


@pytest.mark.parametrize("path", FILES)
def test_a_file_has_its_type_and_is_sent_once(client: Client, path: str) -> None:
    reply = client.http.get(path)
    assert (reply.status_code, reply.content) == (200, FILES[path].body)
    assert reply.headers["content-type"] == TYPES.get(path.rpartition(".")[2], "text/html; charset=utf-8")
    assert reply.headers["cache-control"] == "no-cache"
    assert reply.headers["x-content-type-options"] == "nosniff"
    etag = reply.headers["etag"]
    for known in (etag, f'"other", W/{etag}'):
        again = client.http.get(path, headers={"if-none-match": known})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", etag)
    assert client.http.get(path, headers={"if-none-match": '"other"'}).status_code == 200
    head = client.http.head(path)
    assert (head.status_code, head.content, head.headers["etag"]) == (200, b"", etag)


def test_tags_differ_with_the_content() -> None:
    assert len({file.etag for file in FILES.values()}) == len(FILES)


def test_the_policy_allows_the_page_s_own_files_alone(client: Client) -> None:
    policy = client.http.get("/").headers["content-security-policy"]
    found = dict(directive.split(" ", 1) for directive in policy.split("; "))
    assert found == {
        "default-src": "'none'",
        "script-src": "'self'",
        "style-src": "'self'",
        "img-src": "'self'",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }


def test_files_lead_to_no_other_host() -> None:
    # The namespace of SVG is a name that nobody asks for.
    found = {url for text in TEXTS.values() for url in re.findall(r"(?:\w+:)?//[\w.-]+[^\s\"'`)>]*", text)}
    assert found == {"http://www.w3.org/2000/svg"}
    assert not [path for path, text in TEXTS.items() if re.search(r"@import|\burl\(", text)]


def test_files_name_files_that_are_there() -> None:
    names = re.findall(r'(?:href|src)="([^"]+)"', TEXTS["/"])
    assert {f"/{name}" for name in names} <= set(FILES)
    for path, text in SCRIPTS.items():
        imported = re.findall(r'from "\./([^"]+)"', text)
        assert {FOLDER + name for name in imported} <= set(FILES), path
    used = {FOLDER + name for text in SCRIPTS.values() for name in re.findall(r'from "\./([^"]+)"', text)}
    assert set(SCRIPTS) - used == {f"{FOLDER}main.js"}


def test_nothing_becomes_markup_or_code() -> None:
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]* src=)", TEXTS["/"])
    sinks = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|setHTML|DOMParser|srcdoc"
    assert not [path for path, text in SCRIPTS.items() if re.search(sinks, text)]


def test_the_page_needs_no_key_and_what_it_calls_does(tokenizer: Tokenizer) -> None:
    with running(tokenizer, ServerConfig(api_key="sesam")) as client:
        for path in FILES:
            assert client.http.get(path).status_code == 200
        for path in ("/v1/models", "/tokenizer_info", "/explorer/", "/explorer/nothing.js"):
            check(client.http.get(path), 401, None, "invalid_api_key")


def test_there_are_no_other_files(client: Client) -> None:
    for path in ("/explorer", "/explorer/", "/explorer/nothing.js", "/explorer/index.html", "/explorer/..%2ffiles.py"):
        check(client.http.get(path), 404, None, "not_found")
    check(client.http.post("/", json={}), 405, None, "method_not_allowed")


def test_hosts_and_origins_are_those_of_the_api(tokenizer: Tokenizer) -> None:
    hosts = allowed_hosts(ServerConfig(), "127.0.0.1")
    with running(tokenizer, ServerConfig(allowed_hosts=hosts)) as client:
        for path in FILES:
            check(client.http.get(path, headers={"host": "evil.example"}), 403, None, "host_not_allowed")
        reply = client.http.get("/", headers={"origin": "https://evil.example"})
        assert not [name for name in reply.headers if name.startswith("access-control-")]
        assert reply.headers["cross-origin-resource-policy"] == "same-origin"


def test_it_can_be_left_out(tokenizer: Tokenizer) -> None:
    with running(tokenizer, ServerConfig(explorer=False)) as client:
        for path in FILES:
            check(client.http.get(path), 404, None, "not_found")
        assert client.http.get("/v1/models").status_code == 200


def test_the_text_of_each_id(client: Client) -> None:
    ids = client.tokenizer.encode("Hello, 日本", add_special_tokens=False)
    strs = client.http.post("/detokenize", json={"tokens": ids, "return_token_strs": True}).json()["token_strs"]
    assert strs == [client.tokenizer.token_text(token_id) for token_id in ids]
    assert "token_strs" not in client.http.post("/detokenize", json={"tokens": ids}).json()
