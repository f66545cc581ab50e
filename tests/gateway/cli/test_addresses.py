"""Files of other programs: which engines they name, and which are refused."""

from __future__ import annotations

import pytest

from backends.validation import UsageError
from gateway.cli.addresses import Addresses

ONE, TWO = "http://10.0.0.1:8000", "http://10.0.0.2:8000"
NAMED = {
    "a script with variables": f"""
WORKERS="{ONE} {TWO}" # http://10.0.0.3:8000
PORT=8080
exec python3 -m sglang_router.launch_router --worker-urls $WORKERS \\
  --port ${{PORT}} --host 0.0.0.0 --policy round_robin 2>&1 | tee router.log
""",
    "a loop": 'for i in {1..2}; do\n  W="$W http://10.0.0.$i:$((7990 + 5*2))"\ndone\nexec router --worker-urls $W',
    "a list": f"WORKERS=(\n  {ONE}\n  {TWO}\n)\nrouter --worker-urls ${{WORKERS[@]}}",
    "defaults": "router --worker-urls http://${A:-10.0.0.1}:8000 http://${B-10.0.0.2}:${P:=8000}",
    "flags": f"vllm-router --service-discovery static --static-backends {ONE},10.0.0.2:8000 --enable-chunked-prefill",
    "nginx": "upstream e { server 10.0.0.1:8000 weight=3; server 10.0.0.2:8000; }\nserver { proxy_pass http://e; }",
    "haproxy": "backend e\n  server a 10.0.0.1:8000 check\n  server b 10.0.0.2:8000",
    "LiteLLM": f"- litellm_params:\n    api_base: {ONE}/v1\n- litellm_params: {{api_base: os.environ/SECOND}}",
    "pairs": "a:\n  host: 10.0.0.1\n  port: 8000\nb:\n  port: 8000\n  host: 10.0.0.2\nc: {host: 0.0.0.0, port: 80}",
    "JSON": '{"x": [{"host": "10.0.0.1", "port": 8000}, {"ip":"10.0.0.2","port":"8000"}], "listen_port": 80}',
    "Endpoints": "addresses:\n- ip: 10.0.0.1\n- ip: 10.0.0.2\nports:\n- port: 8000\n",
    "Envoy": f"socket_address: {{address: 10.0.0.1, port_value: 8000}}\nx: {TWO}\nat: 12:30:45\nimage: v:0.6\n",
}


def searched(text: str) -> Addresses:
    found = Addresses()
    found.search(text, "file")
    return found


@pytest.mark.parametrize("kind", NAMED)
def test_the_engines_of_a_file(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECOND", TWO)
    found = searched(NAMED[kind])
    assert (list(found.places), found.unset) == ([ONE, TWO], {})


@pytest.mark.parametrize(
    "text",
    [
        "--routing-logic disaggregated_prefill_orchestrated --prefill-model-labels p --decode-model-labels d",
        f"--prefill {ONE} --decode {TWO}",
        f"prefillUrls: [{ONE}]",
        'kv-transfer-config: {"kv_role":"kv_producer"}',
        "enablePD: true",
        "topology: 1p1d",
        "http://vllm-prefill-0:8000",
    ],
)
def test_replicas_that_only_prefill_are_none(text: str) -> None:
    with pytest.raises(UsageError, match=r"^file, line 2: .+ tells prefill and decode apart"):
        searched(f"\n{text}\n")


def test_options_of_engines_that_do_both_are_no_prefill() -> None:
    text = "enableChunkedPrefill: true\n--max-num-partial-prefills 2\nlong_prefill_token_threshold: 0\ndisk: pd-ssd\n"
    text += f"--prefill-attention-backend fa3\n--chunked-prefill-size 4096\npd: false\n# --prefill http://a\nurl: {ONE}"
    assert list(searched(text).places) == [ONE]


def test_what_is_not_understood_or_not_taken_over_is_named() -> None:
    found = searched(
        f"api_key: sk-1\nrpm: 5\nserver {ONE} weight=3 max_tokens=9\n--worker-urls $NO_SUCH http://$(hostname):1"
    )
    assert list(found.places) == [ONE]
    assert found.settings == {"api_key": "file, line 1", "rpm": "file, line 2", "weight": "file, line 3"}
    assert found.unset == {"file, line 4": "NO_SUCH"}


def test_what_only_looks_like_an_address_is_none() -> None:
    nines, odd = (
        "9" * 5000,
        ("url: http://[1.2]:80", "a: {host: h, port: \u00b2}", "host: h\nport: $((N))", "W=http://h:$((N))"),
    )
    for text in (*odd, "for i in {1..N}; do W=http://$i; done"):
        assert searched(text.replace("N", nines)).places == {}, text
