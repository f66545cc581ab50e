"""What is kept of a client goes by its id, which is made from its key: names move from one key to another."""

from __future__ import annotations

import ast
import gc
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.routing.keys import ANONYMOUS, Client, Keyring, digest
from tests.gateway.conftest import Start
from tests.gateway.reload.test_change import change

ROOT = Path(__file__).parents[3]
SHOWN = {
    ("gateway/rooms/batches/api.py", "add_batches"): 1,
    ("gateway/rooms/batches/api.py", "answer"): 1,  # of the record of a batch, by which its key is found again
    ("gateway/rooms/batches/run.py", "settings_of"): 1,  # names of the same pool file, as it is now
    ("gateway/rooms/recorder/document.py", "_document"): 2,
    ("gateway/relay/accounting.py", "_charge"): 1,  # a label of a series
    ("gateway/relay/admission.py", "_refuse"): 1,  # the access log
    ("gateway/relay/limits.py", "enter"): 1,  # an error
    ("gateway/relay/limits.py", "_check"): 1,  # an error
    ("gateway/routing/lookups.py", "place"): 1,  # an error
    ("gateway/rooms/reports/trail.py", "on_end"): 1,
    ("gateway/routing/keys.py", "__init__"): 1,
    ("gateway/routing/keys.py", "check_admin"): 1,
    ("gateway/routing/router.py", "_requested"): 1,
    ("gateway/service/change.py", "commit"): 3,  # the labels of series that are gone
}
"""Where the name of a client is used, reviewed: to show it. What is kept, shared or compared goes by `id`."""


def uses() -> Iterator[tuple[str, str]]:
    """Yield file and function of each use of a client's name."""
    for path in [*ROOT.glob("gateway/**/*.py"), *ROOT.glob("policies/**/*.py")]:
        text = path.read_text()
        for function in ast.walk(ast.parse(text)) if ".name" in text else ():
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                for node in ast.walk(function):
                    if isinstance(node, ast.Attribute) and node.attr == "name" and _is_client(node.value):
                        yield str(path.relative_to(ROOT)), function.name


def _is_client(node: ast.expr) -> bool:
    """Return whether an expression is a client, by its name: `client`, `ended.client`, or what identifies one."""
    if isinstance(node, ast.Call):
        return _is_client(node.func)
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return "client" in name.lower() or name in {"identify", "named", "with_id", "ANONYMOUS", "UNAUTHENTICATED"}


@pytest.mark.slow
def test_the_name_of_a_client_is_only_shown() -> None:
    assert Counter(uses()) == SHOWN


def test_an_id_is_that_of_the_key_and_tells_nothing_of_its_digest() -> None:
    one = Keyring([(digest("alpha"), Client("key-1")), (digest("beta"), Client("key-2"))])
    two = Keyring([(digest("beta"), Client("key-1")), (digest("gamma"), Client("key-2"))])
    assert one.clients[1].id == two.clients[0].id
    assert len({each.id for each in one.clients + two.clients} | {ANONYMOUS.id}) == 4
    assert digest("alpha").hex()[:8] not in one.clients[0].id
    assert two.with_id(one.clients[0].id) is None
    assert two.with_id(one.clients[1].id) is two.clients[0]


NAME = "a-name-of-a-key"


@pytest.mark.slow
async def test_nothing_that_is_kept_goes_by_a_name(gateway_of: Start) -> None:
    """What the process keeps after requests of all kinds, whoever keeps it: no mapping has the name as a key."""
    keys = [{"name": NAME, "key": "alpha", "requests_per_minute": 99, "tenant_header": "x-tenant"}]
    policy, queue = {"name": "learned"}, {"max_in_flight_per_backend": 1}
    async with gateway_of(policy=policy, queue=queue, keys=keys) as running:
        for path, body in (
            ("/v1/chat/completions", {"messages": [], "response_format": {"type": "json_object"}}),
            ("/v1/chat/completions", {"messages": [], "stream": True, "tools": [{"type": "function"}]}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 100_000}]}),
            ("/v1/responses", {"input": "hi"}),
            ("/tokenize", {"prompt": "hi"}),
        ):
            headers = {"authorization": "Bearer alpha", "x-tenant": "t"}
            await running.client.post(path, json={"model": "m", **body}, headers=headers)
        kept = [each for each in gc.get_objects() if type(each) in {dict, set} and _is_kept_by_name(each)]
        allowed = (running.gateway.relay.access.keyring._by_name,)
        assert [each for each in kept if not any(each is one for one in allowed) and not _is_label(each)] == []


def _is_kept_by_name(kept: Any) -> bool:
    """Return whether a key is the name, or a tuple with it; where the first key is no tuple, none is."""
    return NAME in kept or (isinstance(next(iter(kept), None), tuple) and any(map(_has_name, kept)))


def _has_name(key: Any) -> bool:
    return key == NAME if isinstance(key, str) else isinstance(key, tuple) and NAME in key


def _is_label(kept: Any) -> bool:
    return all(key == (NAME,) for key in kept if _has_name(key))


@pytest.mark.slow
async def test_no_key_sees_what_another_has_used_after_any_order_of_reloads(gateway_of: Start) -> None:
    rng, used, kept = random.Random(0), Counter[str](), ["alpha", "beta"]
    settings: dict[str, Any] = {"policy": {"name": "learned"}, "queue": {"max_in_flight_per_backend": 4}}
    async with gateway_of(**settings, keys=keys(kept)) as running:
        for _ in range(30):
            if rng.random() < 0.4:
                later = rng.sample(["alpha", "beta", "gamma", "delta"], rng.choice([1, 2, 3]))
                await change(running, keys=keys(later))
                for gone in {*kept} - {*later}:
                    del used[gone]
                kept = later
            key = rng.choice(kept)
            (await running.chat(headers={"authorization": f"Bearer {key}"})).raise_for_status()
            used[key] += 1
            relay = running.gateway.relay
            clients = {each: relay.access.keyring.identify({b"x-api-key": each.encode()}) for each in kept}
            accounts = {each: relay.limits._accounts.get(client.id) for each, client in clients.items()}
            assert {each: account.sum_requests for each, account in accounts.items() if account} == used
            assert relay.limits._accounts.keys() == {clients[each].id for each in used}
        await running.until(lambda: not running.gateway.leaving)  # of keys that are gone
        page = (await running.client.get("/metrics")).text
        lines = [line for line in page.splitlines() if line.startswith("gateway_key_tokens_total")]
        assert {line.split('"')[1] for line in lines} <= {client.name for client in clients.values()}


def keys(secrets: list[str]) -> list[dict[str, Any]]:
    """Return keys as the pool file names those without a name: by position."""
    return [{"name": f"key-{at}", "key": secret, "requests_per_minute": 9999} for at, secret in enumerate(secrets, 1)]
