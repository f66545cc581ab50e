"""The lines that tell what a reload changes, and what it cannot change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gateway.config.pool_file import PoolFile
from gateway.config.settings import PoolSettings
from gateway.reload.differences import differences, needs_restart
from gateway.service.replicas import plan

SIMULATED = {"method": "baseline", "simulate": {"calibration": "llama-3.1-8b-h100"}}
SERVED = {"method": "ngram", "serve": {"model": "m", "env": {"HF_TOKEN": "hf-1"}}}
SERVED |= {"speculative_config": {"num_speculative_tokens": 3, "prompt_lookup_max": 4}}


def pool(**changes: Any) -> PoolSettings:
    backends = {"a": {"method": "baseline", "url": "http://a:1", "api_key": "sk-1"}, "s": SIMULATED, "v": SERVED}
    model = {"policy": {"name": "random"}, "backends": backends | changes.pop("backends", {})}
    keys = changes.pop("keys", [{"name": "team", "key": "k-1"}])
    return PoolFile.model_validate({"models": {"m": model}, "keys": keys} | changes)


def test_lines_show_keys_and_values_but_no_secrets() -> None:
    later = pool(
        backends={
            "a": {"method": "baseline", "url": "http://b:1", "api_key": "sk-2"},
            "n": {"method": "suffix", "url": "http://n:1"},
            "v": SERVED | {"serve": {"model": "m", "env": {"HF_TOKEN": "hf-2"}}},
        },
        keys=[{"name": "team", "key": "k-2", "max_in_flight": 3}, {"name": "new", "key": "k-3"}],
        recorder={"path": "/tmp/records", "hash_salt": "salt"},
        cors={"origins": ["https://a.example"]},
    )
    assert differences(pool(), pool()) == []
    assert differences(pool(), later) == [
        "models.m.backends.a.url: http://a:1 -> http://b:1",
        "models.m.backends.a.api_key: changed",
        "models.m.backends.v.serve.env.HF_TOKEN: changed",
        "models.m.backends.n: added (suffix, http://n:1)",
        "keys[team].sha256: changed",
        "keys[team].max_in_flight: not set -> 3",
        "keys[new]: added",
        "cors: not set -> set",
        "recorder: not set -> set",
    ]
    assert differences(pool(), pool(keys=[])) == [
        "keys[team]: removed",
        "keys: none is left, so anyone who can reach this address can use it",
    ]
    assert differences(later, pool())[3:4] == ["models.m.backends.n: removed"]


def test_a_rule_that_changes_is_named_and_so_is_another_order() -> None:
    def ruled(*rules: dict[str, Any]) -> PoolSettings:
        model = {"policy": {"name": "thresholds", "rules": rules}, "backends": {"a": SIMULATED}}
        return PoolFile.model_validate({"models": {"m": model}})

    code, chat = ({"name": name, "when": {"workload": [name]}, "prefer": ["suffix"]} for name in ("code", "chat"))
    path, other = "models.m.policy.rules", {"when": {"workload": ["chat", "talk"]}, "prefer": ["eagle"]}
    assert differences(ruled(code, chat), ruled(code, chat | other)) == [
        f"{path}[chat].when.workload: [chat] -> [chat, talk]",
        f"{path}[chat].prefer: [suffix] -> [eagle]",
    ]
    assert differences(ruled(code, chat), ruled(chat, code)) == [f"{path}: [code, chat] -> [chat, code]"]
    assert differences(ruled(code), ruled(chat)) == [f"{path}[code]: removed", f"{path}[chat]: added"]


def test_what_a_process_is_started_with_needs_a_restart_but_not_its_weight() -> None:
    weighed = pool(backends={"s": SIMULATED | {"weight": 2.0}, "v": SERVED | {"weight": 3.0}})
    assert needs_restart(pool(), weighed, ()) == []
    assert needs_restart(pool(), pool(timeouts={"idle_s": 3.0}, keys=[]), ()) == []
    head, limited = {"speculative_config": {"model": "h", "num_speculative_tokens": 3}}, {"drafter_limit": 2048}
    for own, lines in ((SERVED, []), (SIMULATED, ["models.m.backends.h.drafter_limit: not set -> set"])):
        eagle = own | head | {"method": "eagle3"}
        assert needs_restart(pool(backends={"h": eagle}), pool(backends={"h": eagle | limited}), ()) == lines
    moved = needs_restart(
        pool(), pool(server={"port": 1}, backends={"w": SERVED, "s": SIMULATED | {"method": "suffix"}}), ()
    )
    assert moved == [
        "server.port: 8080 -> 1",
        "models.m.backends.s.method: baseline -> suffix",
        "models.m.backends.w: added (ngram, started by the gateway)",
    ]


def test_a_served_replica_that_speculates_otherwise_is_started_anew_at_its_port(tmp_path: Path) -> None:
    later = pool(backends={"v": SERVED | {"method": "suffix", "speculative_config": None}})
    assert needs_restart(pool(), later, ()) == []
    before = plan(pool(), tmp_path)
    after = plan(later, tmp_path, before)
    (own, *simulators), (own_before, *simulators_before) = after.launches, before.launches
    assert simulators == simulators_before
    assert (own.name, own.health_urls) == (own_before.name, own_before.health_urls)
    assert '{"method": "suffix"}' in own.argv
    assert own != own_before
