"""From a file of another program to the first answer of the gateway in its place, in less than a minute."""

from __future__ import annotations

import time
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from gateway.cli.app import app
from tests.support.command import gateway_command
from tests.support.upstream import upstreams_in_thread
from tests.support.waiting import eventually_blocking

BUDGET_S = 60.0
FILES = {
    "litellm": """
model_list:
  - {{model_name: m, litellm_params: {{model: hosted_vllm/m, api_base: "{a}/v1"}}}}
  - {{model_name: m, litellm_params: {{model: hosted_vllm/m, api_base: "{b}/v1"}}}}
""",
    "production-stack": "vllm-router --service-discovery static --static-backends {a},{b} --static-models m,m\n",
    "vllm-router": "vllm-router --worker-urls {a} {b} --policy cache_aware\n",
    "sglang-router": "python -m sglang_router.launch_router --worker-urls {a} {b} --model-path m\n",
    "nginx": """
http {{
  upstream engines {{ least_conn; server {a_host}; server {b_host}; }}
  server {{ listen 80; location / {{ proxy_pass http://engines; }} }}
}}
""",
}
MODEL = {"vllm-router": ("--model", "m"), "nginx": ("--model", "m")}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize("program", FILES)
def test_the_first_answer(program: str, tmp_path: Path) -> None:
    with upstreams_in_thread("ab", "m") as (a, b):
        end_s = time.monotonic() + BUDGET_S
        hosts = {"a_host": a.url.removeprefix("http://"), "b_host": b.url.removeprefix("http://")}
        (tmp_path / "theirs").write_text(FILES[program].format(a=a.url, b=b.url, **hosts))
        pool = tmp_path / "pool.yaml"
        arguments = ["import", program, str(tmp_path / "theirs"), *MODEL.get(program, ()), "--output", str(pool)]
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.stderr
        with gateway_command(pool, tmp_path, env={"XDG_STATE_HOME": str(tmp_path)}) as command:

            def answered() -> bool:
                try:
                    return command.post("/v1/chat/completions", CHAT).status_code == 200
                except httpx.HTTPError:
                    return False

            eventually_blocking(answered, end_s - time.monotonic(), "the first answer")
        assert len(a.seen) + len(b.seen) >= 1
