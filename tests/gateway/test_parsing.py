"""Every place of the gateway that parses, with what bounds it: a new one fails until it is listed."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.support.paths import ROOT

_PARSERS: Final = frozenset(
    {
        "json.loads",
        "json.load",
        "orjson.loads",
        "decoded_body",
        "msgspec.json.decode",
        "msgspec.json.Decoder",
        "msgspec.msgpack.Decoder",
        "msgspec.msgpack.decode",
        "yaml.safe_load",
        "yaml.load",
        "pickle.loads",
        "pickle.load",
        "read_form",
        "raw_decode",
        "model_validate_json",
        "validate_json",
        "request.json",
        "request.form",
        "response.json",
        "literal_eval",
        "fromstring",
    }
)
_NAMES: Final = {each.rpartition(".")[2] for each in _PARSERS}
OWN: Final = "written by a gateway"
TYPED: Final = "an argument of a command"
OPERATOR: Final = "given by the operator"
CHECKED: Final = "a request that `Router.check` has let pass"
EVENTS: Final = "events of an engine, of which 1 MiB is held"
BOUNDS: Final = {
    ("rooms/advice/advise.py", "known_troubles"): OWN,
    ("rooms/batches/api.py", "create"): "64 KiB, check_cost",
    ("rooms/batches/api.py", "upload"): "max_file_mib; 64 fields, whose heads have 8 KiB",
    ("rooms/batches/lines.py", "_custom_id"): "a string of the first 8 KiB of a line",
    ("rooms/batches/lines.py", "parsed"): "a line of 8 MiB or an answer of an engine of 32 MiB, check_cost",
    ("rooms/batches/lines.py", "_spans"): "a line that check_cost has let pass",
    ("rooms/batches/storage.py", "read"): "1 MiB, written by a gateway",
    ("cli/admin.py", "_request"): OWN,
    ("cli/explain.py", "explain"): OPERATOR,
    ("config/short_forms.py", "_replica"): OPERATOR,
    ("dialects/asked_usage.py", "_without_usage"): EVENTS,
    ("dialects/draft_depth.py", "with_draft_tokens"): CHECKED,
    ("dialects/ending.py", "take"): EVENTS,
    ("dialects/json_body.py", "decoded_body"): CHECKED,
    ("dialects/json_body.py", "set_field"): CHECKED,
    ("dialects/sse.py", "last_documents"): EVENTS,
    ("dialects/transcript.py", "_events"): "an answer as it is kept, of at most 1 MiB or the recorder's bound",
    ("dialects/transcript.py", "_whole"): "the same",
    ("discovery/api_server.py", "_events"): "32 MiB of the API server",
    ("discovery/api_server.py", "_list"): "32 MiB of the API server",
    ("discovery/inference_pool.py", "_config"): "an annotation within them",
    ("rooms/recorder/document.py", "_parsed"): CHECKED,
    ("relay/answers.py", "_usage_of_events"): "the last 64 KiB",
    ("relay/answers.py", "_usage_of_json"): "the last 64 KiB",
    ("relay/answers.py", "take"): "1 MiB of an engine",
    ("rooms/rescue/continued.py", "feed"): CHECKED,
    ("rooms/rescue/passed.py", "is_exact"): "numbers of tokens of an event of which 1 MiB is held",
    ("rooms/rescue/passed.py", "_read_piece"): EVENTS,
    ("rooms/rescue/request.py", "continuation"): CHECKED,
    ("rooms/rescue/rescue.py", "_continue"): "8 MiB of an engine",
    ("routing/router.py", "_parse"): "check_cost, if above 32 KiB",
    ("admin/routes.py", "_explain"): OWN,
    ("admin/policy_versions.py", "_apply"): OWN,
    ("rooms/compare/canary.py", "_wanted"): TYPED,
    ("rooms/compare/room.py", "_apply"): OWN,
    ("rooms/compare/room.py", "of"): OWN,
    ("admin/policy_versions.py", "pin"): OWN,
    ("admin/policy_versions.py", "settings_of"): OWN,
    ("service/stores.py", "read_launched"): OWN,
    ("service/worker.py", "messages"): OWN,
    ("rooms/shadow/__main__.py", "main"): OWN,
    ("rooms/shadow/__main__.py", "replayed_text"): OWN,
    ("rooms/shadow/replay.py", "_request"): OWN,
    ("state/documents.py", "_history"): OWN,
    ("state/ledger.py", "_decode"): OWN,
    ("state/ledger.py", "_decode_head"): OWN,
    ("peers/report.py", "decode"): "4 MiB",
    ("telemetry/registry.py", "_catalogue"): OWN,
    ("rooms/trouble/answer.py", "_is_json"): "a call within an answer of at most 256 KiB",
}
"""By file and function."""


def name_of(node: ast.expr) -> str:
    return f"{name_of(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def places(root: Path) -> Iterator[tuple[str, str, str]]:
    """Yield file, function and what it calls, also where the parser is only passed on."""
    for path in sorted(root.rglob("*.py")):
        text = path.read_text()
        if not any(each in text for each in _NAMES):
            continue
        tree = ast.parse(text)
        functions = [each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
        for node in ast.walk(tree):
            if not isinstance(node, ast.Name | ast.Attribute):
                continue
            name = name_of(node)
            if any(name == each or name.endswith(f".{each}") for each in _PARSERS):
                around = [each for each in functions if each.lineno <= node.lineno <= (each.end_lineno or 0)]
                yield str(path.relative_to(root)), around[-1].name if around else "", name


@pytest.mark.slow
def test_every_place_that_parses_is_listed_with_its_bound() -> None:
    found = {(file, function) for file, function, _ in places(ROOT / "gateway")}
    assert found == BOUNDS.keys()
