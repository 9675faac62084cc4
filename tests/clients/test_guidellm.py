"""guidellm: a short benchmark, which asks for usage in every chunk and for replies of a given length."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clients.conftest import TINY


@pytest.mark.parametrize("request_format", ["/v1/chat/completions", "/v1/completions"])
def test_a_benchmark(tiny_url: str, tiny_dir: Path, tmp_path: Path, request_format: str) -> None:
    rows = [{"prompt": f"the quick brown fox {i}", "output_tokens_count": 6} for i in range(16)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = {
        "backend": f"kind=openai_http,target={tiny_url},model={TINY},request_format={request_format}",
        "profile": "kind=concurrent,streams=8",
        "constraint": "kind=max_requests,count=16",
        "data": f"kind=json_file,path={tmp_path / 'prompts.jsonl'}",
        "tokenizer": f"kind=hf_auto,model={tiny_dir}",
        "output": f"kind=json,path={tmp_path / 'report.json'}",
    }
    arguments = [argument for name, value in options.items() for argument in (f"--{name}", value)]
    command = [sys.executable, "-m", "guidellm", "run", *arguments, "--disable-console"]
    made = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert made.returncode == 0, made.stderr
    [benchmark] = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    requests = benchmark["requests"]
    assert (requests["errored"], requests["incomplete"]) == ([], [])
    assert len(requests["successful"]) == 16
    for request in requests["successful"]:
        assert json.loads(request["request_args"])["body"]["stream_options"]["continuous_usage_stats"] is True
        assert request["output_tokens"] == 6
        assert request["prompt_tokens"] > 0
        assert request["time_to_first_token_ms"] > 0
