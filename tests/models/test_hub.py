"""Hub ids against a hub on loopback, with the real client: what is downloaded, and what a model is refused by."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file

from neper.errors import ModelLoadError
from neper.models.registry import load
from neper.models.source import resolve

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    """Serves the files of one repository, `acme/tiny`.

    Attributes:
        files: name → content.
        fetched: names of files that were downloaded, in order.
    """

    files: dict[str, bytes]
    fetched: list[str]


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        if self.path.startswith("/api/models/acme/tiny"):
            siblings = [{"rfilename": name, "size": len(data)} for name, data in self.server.files.items()]
            tree = [{"type": "file", "path": s["rfilename"], "size": s["size"], "oid": "0" * 40} for s in siblings]
            body = tree if "/tree/" in self.path else {"id": "acme/tiny", "sha": COMMIT, "siblings": siblings}
            return self.answer(json.dumps(body).encode())
        match = re.fullmatch(r"/acme/tiny/resolve/[^/]+/(.+)", self.path)
        if match is None or match[1] not in self.server.files:
            return self.answer(b"", status=404)
        if self.command == "GET":
            self.server.fetched.append(match[1])
        self.answer(self.server.files[match[1]])

    do_HEAD = do_GET

    def answer(self, data: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()[:40]}"')
        self.send_header("X-Repo-Commit", COMMIT)
        if status == 404:
            self.send_header("X-Error-Code", "EntryNotFound")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hub(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub(("127.0.0.1", 0), Handler) as server:
        server.files = {path.name: path.read_bytes() for path in tiny_llama.iterdir()}
        server.fetched = []
        url = f"http://127.0.0.1:{server.server_address[1]}"
        monkeypatch.setattr(constants, "ENDPOINT", url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_a_model_is_downloaded_once(hub: Hub, tiny_llama: Path) -> None:
    source = resolve("acme/tiny")
    assert (source.name, source.eos_token_ids) == ("acme/tiny", (2,))
    assert load_file(source.path / "model.safetensors").keys() == load_file(tiny_llama / "model.safetensors").keys()
    first = list(hub.fetched)
    assert first[-1] == "model.safetensors"
    assert sorted(first) == sorted(set(first))
    assert resolve("acme/tiny") == source
    assert hub.fetched == first


def test_case_97_another_family_is_refused_before_its_weights_are_downloaded(hub: Hub) -> None:
    hub.files["config.json"] = json.dumps({"model_type": "gpt_neox"}).encode()
    with pytest.raises(ModelLoadError, match="acme/tiny: model type 'gpt_neox' is not supported"):
        resolve("acme/tiny")
    assert "config.json" in hub.fetched
    assert not any(name.endswith((".safetensors", ".bin")) for name in hub.fetched)


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (("adapter_config.json", "adapter_model.safetensors"), "is an adapter .LoRA., not a model"),
        (("tiny.Q4_0.gguf", "tiny.Q8_0.gguf"), "has no config.json, .*if it holds .gguf files, download one"),
    ],
)
def test_case_98_what_is_no_model_is_told_without_its_weights(names: tuple[str, ...], says: str, hub: Hub) -> None:
    hub.files = dict.fromkeys(names, b"{}")
    with pytest.raises(ModelLoadError, match=says):
        resolve("acme/tiny")
    assert set(hub.fetched) <= {"adapter_config.json"}


def test_case_98_pytorch_weights_are_downloaded_where_there_are_no_others(
    hub: Hub, tiny_llama: Path, tmp_path: Path
) -> None:
    torch.save(load_file(tiny_llama / "model.safetensors"), tmp_path / "weights")
    del hub.files["model.safetensors"]
    hub.files["pytorch_model.bin"] = (tmp_path / "weights").read_bytes()
    load(resolve("acme/tiny"), dtype=torch.float32, device=torch.device("cpu"))
    assert hub.fetched[-1] == "pytorch_model.bin"
