"""`gateway import`: pool files of other routers' configurations, each of which `gateway check` accepts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gateway.cli.app import app
from gateway.config.load import load_pool
from gateway.config.settings import PoolSettings
from gateway.routing.keys import digest

SAMPLES = Path(__file__).parent / "samples"
ENVIRON = {
    "LITELLM_MASTER_KEY": "sk-master",
    "LLAMA_KEY": "sk-llama",
    "API_KEY_10_1_0_2_8000": "sk-clear",
    "QWEN_URL": "https://qwen.example",
    "VLLM_API_KEY": "sk-vllm",
    "VLLM_SERVICE": "engines",
    "CLIENT_KEY": "sk-client",
    "NUM_SPECULATIVE_TOKENS": "7",
}
ROUTER = ("vllm-router", "--model", "llama", "--worker-urls", "http://10.0.0.1:8000", "http://10.0.0.2:8000")


def imported(tmp_path: Path, *arguments: str | Path) -> tuple[PoolSettings, str, str]:
    """Return the settings, the text and the notes of an import that succeeds, after `gateway check`."""
    path = tmp_path / "pool.yaml"
    result = CliRunner().invoke(app, ["import", *map(str, arguments), "--output", str(path)])
    assert result.exit_code == 0, result.stderr
    checked = CliRunner().invoke(app, ["check", "--config", str(path)], env=ENVIRON)
    assert checked.exit_code == 0, checked.output
    return load_pool(path, ENVIRON), path.read_text(), result.stderr


def refused(*arguments: str | Path) -> str:
    """Return the message of an import that fails, and prints nothing else."""
    result = CliRunner().invoke(app, ["import", *map(str, arguments)])
    assert (result.exit_code, result.stdout) == (2, "")
    return result.stderr


def test_litellm(tmp_path: Path) -> None:
    pool, text, notes = imported(tmp_path, "litellm", SAMPLES / "litellm.yaml")
    llama, qwen = pool.models["meta-llama/Llama-3.1-8B-Instruct"], pool.models["Qwen/Qwen3-32B"]
    assert set(llama.aliases) == {"chat", "gpt-4o", "llama-small"}
    assert {name: (b.url, b.weight, b.method) for name, b in llama.backends.items()} == {
        "10.1.0.1:8000": ("http://10.1.0.1:8000", 1.0, "baseline"),
        "10.1.0.2:8000": ("http://10.1.0.2:8000", 2.0, "baseline"),
    }
    keys = [backend.api_key and backend.api_key.get_secret_value() for backend in llama.backends.values()]
    assert keys == ["sk-llama", "sk-clear"]
    assert (qwen.aliases, qwen.backends["QWEN_URL"].url, qwen.backends["QWEN_URL"].api_key) == (
        ["hidden"],
        "https://qwen.example",
        None,
    )
    assert llama.policy.name == qwen.policy.name == "least_loaded"
    assert (pool.server.host, pool.server.port, pool.server.max_in_flight) == ("0.0.0.0", 4000, 500)
    assert (pool.server.max_body_mib, pool.timeouts.first_byte_s, pool.health.eject_s) == (512, 120, 90)
    assert [(key.name, key.admin) for key in pool.keys] == [("master", "write")]
    for secret in ("sk-written-in-clear", "sk-master-in-clear", "password", "secret-value"):
        assert secret not in text + notes
    for lost in ("writer", "embedder", "any is left out", "elsewhere", "fallbacks", "order", "temperature", "lost"):
        assert lost in notes
    comments = " ".join(line.strip().removeprefix("# ") for line in text.splitlines())
    for line in notes.partition("to be checked:\n")[2].splitlines():  # each is also at its place in the file
        parts = line.strip().split(": ")
        assert any(": ".join(parts[start:]) in comments for start in range(len(parts))), line
    assert "Set these variables before you check or serve it: LLAMA_KEY, API_KEY_10_1_0_2_8000, QWEN_URL, LITE" in notes


def test_a_name_of_two_models_of_litellm(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(
        "model_list:\n"
        "  - {model_name: b, litellm_params: {model: openai/a, api_base: 'http://h:1', api_key: sk-one}}\n"
        "  - {model_name: b, litellm_params: {model: openai/b, api_base: 'http://h:2', api_key: sk-one}}\n"
        "  - {model_name: c, litellm_params: {model: openai/c, api_base: 'http://h:2/v1'}}\n"
    )
    path = tmp_path / "made.yaml"
    result = CliRunner().invoke(app, ["import", "litellm", str(config), "--output", str(path)])
    assert result.exit_code == 0, result.stderr
    pool = load_pool(path, {"API_KEY_H_1": "sk-one"})
    assert {name: model.aliases for name, model in pool.models.items()} == {"a": [], "b": ["c"]}
    assert "b was also a name of a" in result.stderr
    assert "c is served by a replica of b" in result.stderr


def test_an_entry_of_litellm_that_cannot_be_kept_is_lost_alone(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(
        "model_list:\n"
        "  - {model_name: claude-*, litellm_params: {model: openai/a, api_base: 'http://h:1'}}\n"
        "  - {model_name: b}\n"
        "  - {model_name: c, litellm_params: {model: 'openai/c c', api_base: 'http://h:2'}}\n"
        "router_settings: {routing_strategy: fastest, model_group_alias: {'d d': a}}\n"
        "general_settings: {custom_auth: auth.check}\n"
    )
    pool, text, notes = imported(tmp_path, "litellm", config)
    assert {name: (model.aliases, model.policy.name) for name, model in pool.models.items()} == {"a": ([], "learned")}
    assert [key.name for key in pool.keys] == ["clients"]
    for lost in ("claude-*: not kept", "model_list[1] is left out", "a deployment of c is left out", "d d: not kept"):
        assert f"# {lost}" in text
        assert lost in notes
    assert "routing_strategy fastest: not kept, so the policy is learned; known are simple-shuffle" in notes


def test_the_chart_of_production_stack(tmp_path: Path) -> None:
    arguments = (SAMPLES / "values.yaml", "--release", "prod")
    pool, text, notes = imported(tmp_path, "production-stack", *arguments)
    assert list(pool.models) == ["llama"]
    llama = pool.models["llama"]
    assert (llama.aliases, llama.policy.name, llama.backends) == (["llama-8b"], "learned", {})
    found: dict[str, Any] = {
        name: (source.method.value, source.kubernetes and source.kubernetes.service, source.speculative_config)
        for name, source in llama.discover.items()
    }
    plain, head, lookup, old = (found[name] for name in ("plain", "head", "lookup", "old"))
    assert plain == ("baseline", "prod-plain-engine-service", None)
    assert (head[0], head[2].num_speculative_tokens, head[2].model) == ("eagle3", 3, "some/EAGLE3-head")
    assert (lookup[0], lookup[2].num_speculative_tokens, lookup[2].prompt_lookup_max) == ("ngram", 5, 4)
    assert (old[0], old[2].num_speculative_tokens) == ("eagle", 7)
    assert all(source.kubernetes and source.kubernetes.port == 8100 for source in llama.discover.values())
    assert "the method follows from the draft's name" in text
    assert "resting" not in text + notes
    assert [key.digest for key in pool.keys] == [digest("sk-vllm")]
    assert "state.redis" in notes


def test_the_router_of_production_stack_with_static_backends(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        "#!/bin/sh\nset -e\n# vllm-router serves two models\n"
        "vllm-router --service-discovery static --port 9000 --routing-logic session --session-key x-user \\\n"
        "  --static-backends http://a:1,http://b:2/v1,http://c:3 --static-models m,m,n --static-aliases gpt:m # two\n"
    )
    pool, _, notes = imported(tmp_path, "production-stack", script)
    assert {name: list(model.backends) for name, model in pool.models.items()} == {"m": ["a:1", "b:2"], "n": ["c:3"]}
    assert pool.models["m"].aliases == ["gpt"]
    assert pool.server.port == 9000
    assert "--session-key: not kept" in notes


def test_replicas_found_by_labels(tmp_path: Path) -> None:
    flags = ("--service-discovery", "k8s", "--k8s-namespace", "ml", "--k8s-label-selector", "app=vllm")
    pool, text, _ = imported(tmp_path, "production-stack", *flags, "--model", "m", "--routing-logic", "roundrobin")
    (source,) = pool.models["m"].discover.values()
    assert source.kubernetes is not None
    assert (source.kubernetes.service, source.kubernetes.namespace, source.kubernetes.port) == ("engines", "ml", 8000)
    assert "app=vllm" in text


def test_vllm_router(tmp_path: Path) -> None:
    flags = (
        *("--policy=power_of_two", "--api-key", "sk-in-clear", "--max-concurrent-requests", "64"),
        *("--request-timeout-secs", "900", "--cb-timeout-duration-secs", "120", "--retry-max-retries", "5"),
        *("--max-payload-size", "1073741824", "--cors-allowed-origins", "https://a.example", "--log-level", "debug"),
    )
    pool, text, notes = imported(tmp_path, *ROUTER, *flags)
    (model,) = pool.models.values()
    assert [backend.url for backend in model.backends.values()] == ["http://10.0.0.1:8000", "http://10.0.0.2:8000"]
    assert model.policy.name == "power_of_two"
    assert (pool.server.port, pool.server.max_in_flight, pool.server.max_body_mib) == (30000, 64, 1024)
    assert (pool.timeouts.total_s, pool.health.eject_s, pool.health.eject_max_s) == (900, 120, 120)
    assert pool.cors is not None
    assert pool.cors.origins == ["https://a.example"]
    assert "sk-in-clear" not in text + notes
    assert [key.digest for key in pool.keys] == [digest("sk-vllm")]  # not open to all who reach it
    assert "--retry-max-retries: not kept; the gateway sends a request a second time at most" in notes


def test_sglang_router(tmp_path: Path) -> None:
    script = tmp_path / "start.sh"
    script.write_text(
        "python -m sglang_router.launch_router --worker-urls http://10.0.0.1:30000 grpc://10.0.0.2:30000 \\\n"
        "  --model-path meta-llama/Llama-3.1-8B-Instruct --policy prefix_hash --max-concurrent-requests -1 \\\n"
        "  --tool-call-parser llama --api-key sk-in-clear --dp-aware --health-failure-threshold 2 \\\n"
        "  --max-payload-size 1048576 &\n"
    )
    pool, text, notes = imported(tmp_path, "sglang-router", script)
    (model,) = pool.models.values()
    assert list(pool.models) == ["meta-llama/Llama-3.1-8B-Instruct"]
    assert [backend.url for backend in model.backends.values()] == ["http://10.0.0.1:30000"]
    assert (model.policy.name, pool.server.port, pool.server.max_body_mib) == ("learned", 30000, 1)
    assert [key.digest for key in pool.keys] == [digest("sk-vllm")]
    assert "sk-in-clear" not in text + notes
    assert "--worker-urls grpc://10.0.0.2:30000 is left out" in notes
    assert "--tool-call-parser: not kept; requests are sent on unchanged: give it to the engines" in notes
    assert "--health-failure-threshold: not kept; a refused connection" in notes


def test_who_may_come_in_is_never_left_open_without_a_word(tmp_path: Path) -> None:
    asked = ("--api-key-validation-urls", "https://auth.example/validate")
    pool, text, notes = imported(tmp_path, *ROUTER, *asked, "--api-key", "sk-in-clear")
    assert [key.digest for key in pool.keys] == [digest("sk-client")]  # not the engines' key
    assert "--api-key-validation-urls decided who may come in" in text
    without = CliRunner().invoke(app, ["check", "--config", str(tmp_path / "pool.yaml")])
    assert without.exit_code == 2
    assert "CLIENT_KEY" in without.output
    (tmp_path / "open").mkdir()
    pool, text, notes = imported(tmp_path / "open", *ROUTER, "--policy", "best")
    assert pool.keys == []
    assert "there are no keys: anyone who reaches the gateway may use it" in notes
    assert "--policy best: not kept, so the policy is learned; known are random, round_robin" in notes


NGINX = r"""
http {
  include /etc/nginx/conf.d/*.conf;
  map $http_upgrade $connection { default upgrade; '' close; } # not ours
  upstream engines {
    least_conn; keepalive 32;
    server 10.0.0.1:8000 weight=2 max_fails=3;
    server vllm.example:8000 backup;
    server 10.0.0.3:8000 down;
    server unix:/run/vllm.sock;
  }
  upstream page { server 10.0.0.9:80; }
  server {
    listen 8443 ssl; client_max_body_size 64m;
    location / { proxy_pass http://page; }
    location ~ "^/v1/{0,2}" {
      proxy_pass http://engines; proxy_read_timeout 10m; proxy_set_header Host "a ${host} \"b\"";
      auth_basic "the engines"; proxy_set_header Authorization "Bearer sk-in-clear";
    }
  }
}
"""


def test_nginx(tmp_path: Path) -> None:
    config = tmp_path / "nginx.conf"
    config.write_text(NGINX)
    pool, text, notes = imported(tmp_path, "nginx", config, "--model", "llama", "--upstream", "engines")
    model = pool.models["llama"]
    assert {backend.url: backend.weight for backend in model.backends.values()} == {
        "http://10.0.0.1:8000": 2,
        "http://vllm.example:8000": 1,
        "unix:/run/vllm.sock": 1,
    }
    keys = [backend.api_key and backend.api_key.get_secret_value() for backend in model.backends.values()]
    assert keys == ["sk-vllm"] * 3
    assert [key.digest for key in pool.keys] == [digest("sk-client")]
    assert "sk-in-clear" not in text + notes
    assert (model.policy.name, pool.server.port, pool.server.max_body_mib) == ("least_loaded", 8443, 64)
    assert (pool.timeouts.idle_s, pool.timeouts.first_byte_s) == (600, 600)
    for lost in (
        "include /etc/nginx",
        "10.0.0.3:8000 is left out",
        "backup: not kept",
        "all addresses of a name",
        "ssl",
    ):
        assert lost in notes
    assert "auth_basic decided who may come in" in notes


@pytest.mark.parametrize(
    ("around", "host", "guard"),
    [
        ("listen 127.0.0.1:8080;", "127.0.0.1", None),
        ("listen [::]:80; auth_basic off;", "::", None),
        ("listen unix:/run/nginx.sock;", "127.0.0.1", None),
        ("if ($request_method = OPTIONS) { return 204; }", "0.0.0.0", None),
        ('if ($http_authorization != "Bearer sk-in-clear") { return 401; }', "0.0.0.0", "if"),
        ("allow 10.0.0.0/8; deny all;", "0.0.0.0", "deny"),
    ],
)
def test_nginx_is_not_opened_to_more_clients(tmp_path: Path, around: str, host: str, guard: str | None) -> None:
    config = tmp_path / "nginx.conf"
    config.write_text(
        "upstream a { server 10.0.0.1:8000; }\n"
        f"server {{ {around} location / {{ proxy_pass http://a$request_uri; proxy_read_timeout 1h30m; }} }}\n"
    )
    pool, text, notes = imported(tmp_path, "nginx", config, "--model", "m")
    assert (pool.models["m"].policy.name, pool.server.host, pool.timeouts.idle_s) == ("round_robin", host, 5400)
    assert [key.name for key in pool.keys] == (["clients"] if guard else [])
    assert (f"{guard} decided who may come in" in notes) == bool(guard)
    assert "sk-in-clear" not in text + notes


def test_names_that_nginx_resolves_are_discovered(tmp_path: Path) -> None:
    config = tmp_path / "nginx.conf"
    config.write_text(
        "http { resolver 10.0.0.2; upstream e { zone e 64k; server vllm.example:8000 resolve; }\n"
        "server { location / { set $where http://e; proxy_pass $where; } } }\n"
    )
    pool, _, _ = imported(tmp_path, "nginx", config, "--model", "m")
    assert [source.dns for source in pool.models["m"].discover.values()] == ["vllm.example:8000"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (NGINX, "found: page, engines"),
        ("http {", "ends within a block"),
        ("a b; }", "line 1: braces or semicolons do not match"),
        ("a\n'b;", "line 2: a quote without its end"),
        ("{" * 100, "line 1: expected a directive before {"),
        ("a {" * 100, "line 1: braces or semicolons do not match"),
        ("events {}", "found: none"),
    ],
)
def test_bad_files_of_nginx(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "nginx.conf"
    path.write_text(text)
    assert message in refused("nginx", path, "--model", "m")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("vllm-router", "--policy", "random"), "neither --worker-urls nor --service-discovery"),
        (("vllm-router", "--vllm-pd-disaggregation", "--prefill", "http://a:1"), "prefill and decode workers only"),
        ((*ROUTER, "--port", "many"), "--port: expected a number"),
        (
            (*ROUTER, "--max-concurrent-requests", "0"),
            "server.max_in_flight: must be greater than or equal to 1",
        ),
        (("vllm-router", "--worker-urls", "http://a:1"), "names no model: add --model NAME"),
        (("vllm-router", "/no/such/file"), "/no/such/file: cannot read it: No such file or directory"),
        (("vllm-router", SAMPLES / "values.yaml"), "no command vllm-router or vllm_router with flags in it"),
        (("production-stack", SAMPLES / "litellm.yaml"), "has neither servingEngineSpec nor routerSpec"),
        (("production-stack", "--static-backends", "http://a", "--static-models", "m,n"), "1 static backends and 2"),
        (("litellm", SAMPLES / "values.yaml"), "has no model_list: expected the config.yaml of LiteLLM's proxy"),
    ],
)
def test_bad_input_is_refused_with_what_would_be_right(arguments: tuple[str, ...], message: str) -> None:
    error = refused(*arguments)
    assert error.startswith(f"gateway import {arguments[0]}: ")
    assert message in error


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model_list: [\n", ":2:1: not YAML"),
        ("- a\n", "expected a mapping"),
        ("model_list: [{model_name: a}]\n", "model_list[0] is left out: expected model_name and litellm_params"),
        (
            "model_list: [{model_name: a, litellm_params: {model: bedrock/b, api_key: sk-x}}]\n",
            "a deployment of a is left out: bedrock is no provider with OpenAI's API at an address",
        ),
    ],
)
def test_bad_files_of_litellm(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    assert message in refused("litellm", path)


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "pool.yaml"
    path.write_text("mine")
    assert f"{path} exists already" in refused(*ROUTER, "--output", path)
    assert path.read_text() == "mine"
