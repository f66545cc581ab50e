"""Speculation methods, and validation of their `--speculative-config` before any engine starts."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Annotated, Any, Final, Self

from pydantic import ConfigDict, Field, model_validator

from backends.validation import CheckedModel, Issue, error_of


class Method(StrEnum):
    """How a replica speculates: vLLM's method names, and `baseline` for no speculation."""

    BASELINE = "baseline"
    NGRAM = "ngram"
    SUFFIX = "suffix"
    DRAFT_MODEL = "draft_model"
    EAGLE = "eagle"
    EAGLE3 = "eagle3"
    MTP = "mtp"
    MEDUSA = "medusa"
    MLP_SPECULATOR = "mlp_speculator"
    DFLASH = "dflash"
    DSPARK = "dspark"
    CUSTOM_CLASS = "custom_class"


_MEANT = {method.replace("_", ""): method for method in Method} | {
    "none": Method.BASELINE,
    "ngramgpu": Method.NGRAM,
    "draft": Method.DRAFT_MODEL,
}


def method_named(word: str) -> Method | None:
    """Return the method that a word means, in any spelling or by another of vLLM's names; None if it means none.

    Examples
    --------
    >>> [str(method_named(word)) for word in ("EAGLE-3", "none", "[ngram]", "deepseek_mtp", "ngarm")]
    ['eagle3', 'baseline', 'ngram', 'mtp', 'None']
    """
    plain = re.sub(r"[^a-z0-9]", "", word.lower())
    return Method.MTP if plain.endswith("mtp") else _MEANT.get(plain)


MODELLESS = frozenset({Method.BASELINE, Method.NGRAM, Method.SUFFIX})
_NEEDS_MODEL = frozenset(
    {
        Method.DRAFT_MODEL,
        Method.EAGLE,
        Method.EAGLE3,
        Method.MEDUSA,
        Method.MLP_SPECULATOR,
        Method.DFLASH,
        Method.CUSTOM_CLASS,
    }
)
# Keys of other vLLM versions: allowed for a running replica, whose version may differ, but not for one that we start.
_OTHER_VERSIONS = {
    "disable_by_batch_size": "use num_speculative_tokens_per_batch_size, such as [[1, 16, 5], [17, 256, 0]]",
    "synthetic_acceptance_rate": "use synthetic_acceptance_rates, one rate per position",
    "speculative_token_tree": "remove it: vLLM no longer drafts trees",
}
_LOSSY: Final = frozenset({"fly", "synthetic"})
"""Values of `rejection_sample_method` with which drafts change answers: 0.33's `fly`, and the one for measurements."""
Release = tuple[int, int]
REMOVED: Final[Mapping[Method, Release]] = {Method.MEDUSA: (0, 33), Method.MLP_SPECULATOR: (0, 33)}
"""The releases of vLLM that removed a method."""
_ADDED: Final[Mapping[str, Release]] = {"enable_adaptive_verification": (0, 30)}
"""Keys of a speculative config, and the first release that knows each."""
PASSED_ON = frozenset(
    {
        *("draft_sample_method", "draft_tensor_parallel_size", "draft_load_config", "use_heterogeneous_vocab"),
        *("use_local_argmax_reduction", "disable_padded_drafter_batch", "disable_eagle_block_drop"),
        *("index_share_for_mtp_iteration", "dspark_draft_topk", "rejection_sample_method"),
        *("synthetic_acceptance_rates", "synthetic_acceptance_length", "quantization", "moe_backend"),
        *("attention_backend", "kv_cache_dtype", "max_model_len", "revision", "code_revision", "enforce_eager"),
    }
)
"""Keys of vLLM 0.32 that the gateway only passes on."""
# vLLM 0.32's proposers of these methods assert that k is `num_speculative_tokens`: any other k crashes the engine.
_NO_SCHEDULE = frozenset({Method.SUFFIX, Method.MEDUSA})
_NEAR = 0.8  # difflib's ratio: `num_spec_tokens` is near `num_speculative_tokens`; `draft_temperature` is near no key

SCHEDULE_KEY: Final = "num_speculative_tokens_per_batch_size"
MIN_P_EPSILON: Final = 1e-5
"""vLLM's `_SAMPLING_EPS`: a `min_p` up to this counts as none, so a speculating engine accepts it."""

PositiveInt = Annotated[int, Field(ge=1)]
BatchRange = tuple[PositiveInt, PositiveInt, Annotated[int, Field(ge=0)]]


class SpeculativeConfig(CheckedModel):
    """vLLM's `--speculative-config`: the keys that the gateway itself reads; all others are passed on unchanged.

    A key close to one of vLLM 0.32's is refused as a typo. Types and rules are those of `vllm/config/speculative.py`,
    which documents the keys and sets the defaults of absent ones.

    Parameters
    ----------
    num_speculative_tokens
        Maximum tokens drafted per step.
    num_speculative_tokens_per_batch_size
        `[first, last, tokens]` for ranges of batch sizes, both ends included; the first range starts at 1.

    Examples
    --------
    >>> config = SpeculativeConfig.model_validate({"num_speculative_tokens": 5, "prompt_lookup_max": 4})
    >>> serve_config(Method.NGRAM, config)
    {'method': 'ngram', 'num_speculative_tokens': 5, 'prompt_lookup_max': 4}
    """

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    method: str | None = None
    model: str | None = None
    num_speculative_tokens: PositiveInt | None = None
    num_speculative_tokens_per_batch_size: Annotated[list[BatchRange], Field(min_length=1)] | None = None

    prompt_lookup_min: PositiveInt | None = None
    prompt_lookup_max: PositiveInt | None = None

    suffix_decoding_max_tree_depth: PositiveInt = 24
    suffix_decoding_max_cached_requests: Annotated[int, Field(ge=0)] = 10_000
    suffix_decoding_max_spec_factor: Annotated[float, Field(ge=0)] = 1.0
    suffix_decoding_min_token_prob: Annotated[float, Field(ge=0, le=1)] = 0.1

    parallel_drafting: bool = False
    enable_adaptive_verification: bool = False

    @classmethod
    def issues(cls, data: Mapping[str, Any]) -> Iterator[Issue]:
        """Yield an issue for each key that looks like a typo of one of vLLM's."""
        known = {*cls.model_fields, *PASSED_ON}
        for key in data:
            if key == "tensor_parallel_size":
                yield Issue((key,), "not a key of vLLM", "did you mean 'draft_tensor_parallel_size'?", at_key=True)
            elif key not in known and key not in _OTHER_VERSIONS:
                near = difflib.get_close_matches(str(key), known, n=1, cutoff=_NEAR)
                if near:
                    yield Issue((key,), "unknown key", f"did you mean '{near[0]}'?", at_key=True)

    @model_validator(mode="after")
    def _vllm_would_start(self) -> Self:
        if issues := list(_contradictions(self)):
            raise error_of(type(self).__name__, issues)
        return self


def method_issues(method: Method, config: Mapping[str, Any] | None, *, served: bool) -> list[Issue]:
    """Return issues for keys that `method` needs but `config` lacks, and for those that it does not allow.

    Parameters
    ----------
    config
        The raw `speculative_config`, not yet validated; None without one.
    served
        True for an engine that the gateway starts, which needs a complete configuration.

    Examples
    --------
    >>> [issue.path for issue in method_issues(Method.EAGLE, {"num_speculative_tokens": 3}, served=True)]
    [('model',)]
    >>> method_issues(Method.EAGLE, {"num_speculative_tokens": 3}, served=False)
    []
    """
    if method is Method.BASELINE:
        if config is None:
            return []
        return [Issue((), "a baseline does not speculate", "remove it, or set the method", at_key=True)]
    values = {key: value for key, value in (config or {}).items() if value is not None}
    issues = []
    if "num_speculative_tokens" not in values and method is not Method.SUFFIX:
        hint = "set the number of tokens drafted per step"
        issues.append(Issue(("num_speculative_tokens",), f"required by {method}", hint))
    if served and method in _NEEDS_MODEL and "model" not in values:
        what = "the class, as package.module.Class" if method is Method.CUSTOM_CLASS else "the draft's name or path"
        issues.append(Issue(("model",), f"required by {method}", f"set it to {what}"))
    if not _is_name_of(method, values.get("method", method)):
        issues.append(Issue(("method",), f"differs from the backend's method, {method}", "remove it"))
    if served and method in _NO_SCHEDULE and SCHEDULE_KEY in values:
        what = f"vLLM 0.32 cannot change k with {method}: the engine would die in its first larger batch"
        issues.append(Issue((SCHEDULE_KEY,), what, "remove it", at_key=True))
    if served:
        issues += [
            Issue((key,), "not supported by vLLM 0.32", hint, at_key=True)
            for key, hint in _OTHER_VERSIONS.items()
            if key in values
        ]
    return issues


def is_lossy(config: Mapping[str, Any]) -> bool:
    """Return whether an engine accepts drafts that its model would not write.

    Examples
    --------
    >>> is_lossy({"rejection_sample_method": "fly"})
    True
    """
    return config.get("rejection_sample_method") in _LOSSY


def release_of(version: str) -> Release | None:
    """Return the release that a version of vLLM belongs to; None if unknown.

    Examples
    --------
    >>> release_of("0.32.1rc2"), release_of("v0.33.0+cpu"), release_of("dev")
    ((0, 32), (0, 33), None)
    """
    numbers = re.match(r"v?(\d+)\.(\d+)", version)
    return (int(numbers[1]), int(numbers[2])) if numbers else None


def release_notes(method: Method, config: Mapping[str, Any], version: str = "") -> Iterator[str]:
    """Yield how a vLLM version differs from others on a method and its config; for an unknown one, later changes.

    Examples
    --------
    >>> list(release_notes(Method.MEDUSA, {}, "0.32.0"))
    ['vLLM 0.33 removes medusa: replace it before the engine is updated']
    >>> list(release_notes(Method.EAGLE3, {"enable_adaptive_verification": True}, "0.29.1"))
    ['vLLM 0.29 does not know enable_adaptive_verification, which begins with 0.30']
    """
    release, removed = release_of(version), REMOVED.get(method)
    if removed is not None:
        name = ".".join(map(str, removed))
        if release is not None and release >= removed:
            yield f"vLLM has {method} no more since {name}: another method is needed"
        else:
            yield f"vLLM {name} removes {method}: replace it before the engine is updated"
    for key, added in _ADDED.items():
        if config.get(key) and release is not None and release < added:
            yield f"vLLM {release[0]}.{release[1]} does not know {key}, which begins with {added[0]}.{added[1]}"
        elif config.get(key):
            yield (
                f"with {key} the engine weighs drafts as if each request had 8,192 tokens of context: start it with "
                "VLLM_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN set to what yours have"
            )


def serve_config(method: Method, config: SpeculativeConfig | None) -> dict[str, Any]:
    """Return the value of vLLM's `--speculative-config`: the method and the keys that were set; {} for a baseline."""
    if method is Method.BASELINE:
        return {}
    values = config.model_dump(mode="json", exclude_unset=True, exclude_none=True) if config else {}
    return {"method": method.value, **values}


def _is_name_of(method: Method, name: object) -> bool:
    """Return whether vLLM's `name` means `method`, including n-gram's GPU proposer and MTP's older names."""
    if method is Method.NGRAM and name == "ngram_gpu":
        return True
    return name == method or (method is Method.MTP and str(name).endswith("_mtp"))


def _contradictions(config: SpeculativeConfig) -> Iterator[Issue]:
    """Yield combinations of valid values that vLLM rejects at start."""
    low, high = config.prompt_lookup_min, config.prompt_lookup_max
    if low is not None and high is not None and low > high:
        yield Issue(("prompt_lookup_min",), f"greater than prompt_lookup_max, {high}")
    yield from _schedule_issues(config.num_speculative_tokens_per_batch_size or [])


def _schedule_issues(schedule: list[BatchRange]) -> Iterator[Issue]:
    key = SCHEDULE_KEY
    order = sorted(range(len(schedule)), key=lambda index: schedule[index][0])
    end = 0
    for index in order:
        first, last, _ = schedule[index]
        if first > last:
            yield Issue((key, index), f"the range is reversed, {first} to {last}", f"[{last}, {first}, tokens]")
        elif end == 0 and first != 1:
            yield Issue((key, index), f"the first range starts at {first}", "start it at 1")
        elif first <= end:
            yield Issue((key, index), f"overlaps the previous range, which ends at {end}", f"start it at {end + 1}")
        end = max(end, first, last)
