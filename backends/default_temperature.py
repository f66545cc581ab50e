"""The temperature that an engine takes for a request that gives none.

vLLM reads it from the model's `generation_config.json`, unless `--generation-config` or
`--override-generation-config` say otherwise; without any it is 1.0 (`ModelConfig.get_diff_sampling_param` in
`vllm/config/model.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import httpx
import orjson

from backends.http.bounded import PLAIN, parts_of

VLLM_DEFAULT = 1.0
"""What vLLM takes where neither the model nor a flag says anything."""

_FILE = "generation_config.json"
_MOST_ANSWER_BYTES: Final = 1 << 20


def configured_temperature(model: str, flags: Sequence[str], env: Mapping[str, str]) -> float | None:
    """Return the default temperature of `vllm serve MODEL FLAGS`, read from the files that vLLM reads.

    Examples
    --------
    >>> configured_temperature("org/model", ["--override-generation-config", '{"temperature": 0.3}'], {})
    0.3
    >>> configured_temperature("org/model", ["--generation-config=vllm"], {})
    1.0
    """
    given = _flag_values(flags)
    override = _temperature_in(given.get("--override-generation-config", "{}"))
    dotted = given.get("--override-generation-config.temperature")
    if dotted is not None:
        override = _temperature_in(f'{{"temperature": {dotted}}}')
    if override is not None:
        return override
    source = given.get("--generation-config", "auto")
    if source == "vllm":
        return VLLM_DEFAULT
    text = _generation_config(model if source == "auto" else source, given, env)
    if text is None:
        return None
    found = _temperature_in(text)
    return VLLM_DEFAULT if found is None else found


async def reported_temperature(client: httpx.AsyncClient, model: str) -> float | None:
    """Ask an engine for its default temperature, with a request for one token.

    The Responses API repeats the sampling parameters that a request was given. Nothing is stored at the engine.
    """
    body = {"model": model, "input": "Hi", "max_output_tokens": 1, "store": False}
    try:
        async with client.stream("POST", "/v1/responses", json=body, headers=PLAIN) as answer:
            text = b"".join([part async for part in parts_of(answer, _MOST_ANSWER_BYTES)])
        return _temperature_in(text.decode("utf-8", "replace")) if answer.status_code == httpx.codes.OK else None
    except httpx.HTTPError:
        return None


def _flag_values(flags: Sequence[str]) -> dict[str, str]:
    """Return the value of each `--flag value` and `--flag=value`; an empty text for a flag without one."""
    values: dict[str, str] = {}
    for index, flag in enumerate(flags):
        name, equals, value = flag.partition("=")
        if not name.startswith("--"):
            continue
        following = flags[index + 1] if index + 1 < len(flags) else ""
        values[name.replace("_", "-")] = value if equals else "" if following.startswith("--") else following
    return values


def _generation_config(model: str, given: Mapping[str, str], env: Mapping[str, str]) -> str | None:
    """Return the text of a model's generation config, `{}` if it has none, None if the model is not on this machine."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        file = folder / _FILE
        return file.read_text("utf-8") if file.is_file() else "{}"
    return _from_hub_cache(model, given, env)


def _from_hub_cache(model: str, given: Mapping[str, str], env: Mapping[str, str]) -> str | None:
    home = Path(env.get("HF_HOME") or "~/.cache/huggingface")
    cache = Path(given.get("--download-dir") or env.get("HF_HUB_CACHE") or home / "hub").expanduser()
    repository = cache / f"models--{model.replace('/', '--')}"
    revision = given.get("--revision") or "main"
    try:
        commit = (repository / "refs" / revision).read_text("utf-8").strip()
    except OSError:
        commit = revision  # a commit needs no reference
    snapshot = repository / "snapshots" / commit
    if not (snapshot / "config.json").exists():
        return None
    file = snapshot / _FILE
    return file.read_text("utf-8") if file.is_file() else "{}"


def _temperature_in(text: str) -> float | None:
    """Return the temperature of a JSON object; None if there is none, or if it is no temperature."""
    try:
        document: Any = orjson.loads(text)
    except ValueError:
        return None
    value = document.get("temperature") if isinstance(document, dict) else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        return None
    return float(value)
