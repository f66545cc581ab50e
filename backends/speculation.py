"""The ways of speculating, and their `--speculative-config`, checked before anything starts."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ModelWrapValidatorHandler, ValidationError, model_validator

from backends.validation import Issue, error_of, issues_of


class Method(StrEnum):
    """How a replica speculates; vLLM's own names, and `baseline` for not at all."""

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
_ONLY_WITH = {
    "use_heterogeneous_vocab": Method.DRAFT_MODEL,
    "dspark_draft_topk": Method.DSPARK,
    "index_share_for_mtp_iteration": Method.MTP,
}
_MAY_BE_FALSE = frozenset({"use_heterogeneous_vocab"})
# Keys of other vLLM versions: right for a replica that runs one of those, refused by the one that we start.
_OTHER_VERSIONS = {
    "disable_by_batch_size": "use num_speculative_tokens_per_batch_size, such as [[1, 16, 5], [17, 256, 0]]",
    "synthetic_acceptance_rate": "use synthetic_acceptance_rates, one for each position",
    "speculative_token_tree": "leave it out: trees of drafts are gone",
}
_NEAR = 0.8  # difflib's ratio: `num_spec_tokens` is near `num_speculative_tokens`, `draft_temperature` near nothing

PositiveInt = Annotated[int, Field(ge=1)]
BatchRange = tuple[PositiveInt, PositiveInt, Annotated[int, Field(ge=0)]]


class SpeculativeConfig(BaseModel):
    """vLLM's `--speculative-config`: the keys of vLLM 0.32 typed as there, any other key passed on as it stands.

    A key that is nearly one of these is taken for a slip and refused. What a key means is vLLM's to say
    (`vllm/config/speculative.py`, whose rules between keys are checked here too); a key that is not set is left to
    vLLM's default.

    Parameters
    ----------
    num_speculative_tokens
        Tokens drafted a step at most.
    num_speculative_tokens_per_batch_size
        `[first, last, tokens]` for ranges of batch sizes, both ends included, the first from 1.
    synthetic_acceptance_rates
        For each position the probability that it and all before it are accepted, 0 to 1, never rising.
    synthetic_acceptance_length
        Mean tokens per step (accepted + 1), 1 to `num_speculative_tokens` + 1.
    """

    model_config = ConfigDict(extra="allow", frozen=True, hide_input_in_errors=True, protected_namespaces=())

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
    draft_sample_method: Literal["greedy", "probabilistic"] = "greedy"
    draft_tensor_parallel_size: PositiveInt | None = None
    draft_load_config: dict[str, Any] | None = None
    use_heterogeneous_vocab: bool = False
    use_local_argmax_reduction: bool = False
    disable_padded_drafter_batch: bool = False
    disable_eagle_block_drop: bool = False
    index_share_for_mtp_iteration: bool | None = None
    dspark_draft_topk: PositiveInt | None = None
    enable_adaptive_verification: bool = False

    rejection_sample_method: Literal["standard", "synthetic", "block"] = "standard"
    synthetic_acceptance_rates: list[Annotated[float, Field(ge=0, le=1)]] | None = None
    synthetic_acceptance_length: Annotated[float, Field(ge=1)] | None = None

    quantization: str | None = None
    moe_backend: str | None = None
    attention_backend: str | None = None
    kv_cache_dtype: str | None = None
    max_model_len: PositiveInt | None = None
    revision: str | None = None
    code_revision: str | None = None
    enforce_eager: bool | None = None

    @model_validator(mode="wrap")
    @classmethod
    def _all_at_once(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        slips = list(_slips(data)) if isinstance(data, Mapping) else []
        try:
            config = handler(data)
        except ValidationError as error:
            raise error_of(cls.__name__, issues_of(error, cls) + slips) from None
        if found := slips + list(_contradictions(config)):
            raise error_of(cls.__name__, found)
        return config


def method_faults(method: Method, config: Mapping[str, Any] | None, *, served: bool) -> list[Issue]:
    """Return what `method` lacks in `config`, or cannot have there.

    Parameters
    ----------
    config
        The raw `speculative_config`, typed rightly or not; None where there is none.
    served
        True for an engine that the gateway starts, which must be told all; one that runs already knows its draft.
    """
    if method is Method.BASELINE:
        if config is None:
            return []
        return [Issue((), "a baseline does not speculate", "leave it out, or give the method", at_key=True)]
    given = {key: value for key, value in (config or {}).items() if value is not None}
    issues = []
    if "num_speculative_tokens" not in given and method is not Method.SUFFIX:
        hint = "say how many tokens it drafts a step; policies and vLLM count on it"
        issues.append(Issue(("num_speculative_tokens",), f"missing, and {method} needs it", hint))
    if served and method in _NEEDS_MODEL and "model" not in given:
        what = "the class, as package.module.Class" if method is Method.CUSTOM_CLASS else "the draft's name or path"
        issues.append(Issue(("model",), f"missing, and {method} needs it", f"give {what}"))
    if not _is_name_of(method, given.get("method", method)):
        issues.append(Issue(("method",), f"differs from the backend's method, {method}", "leave it out"))
    issues += [
        Issue((key,), f"goes only with {owner}", "leave it out", at_key=True)
        for key, owner in _ONLY_WITH.items()
        if key in given and method is not owner and (given[key] is not False or key not in _MAY_BE_FALSE)
    ]
    if served:
        issues += [
            Issue((key,), "not known to vLLM 0.32", hint, at_key=True)
            for key, hint in _OTHER_VERSIONS.items()
            if key in given
        ]
    return issues


def num_speculative_tokens(method: Method, config: SpeculativeConfig | None) -> int:
    """Return how many tokens a step drafts at most; 0 for a baseline.

    Raises
    ------
    ValueError
        If `config` does not say, and the method has no default.
    """
    if method is Method.BASELINE:
        return 0
    config = config or SpeculativeConfig()
    if config.num_speculative_tokens is not None:
        return config.num_speculative_tokens
    if method is Method.SUFFIX:
        return config.suffix_decoding_max_tree_depth  # vLLM's own default
    raise ValueError(f"{method} needs num_speculative_tokens")


def serve_config(method: Method, config: SpeculativeConfig | None) -> dict[str, Any]:
    """Return what vLLM is given as `--speculative-config`: what was set, and the method; empty for a baseline."""
    if method is Method.BASELINE:
        return {}
    given = config.model_dump(mode="json", exclude_unset=True, exclude_none=True) if config else {}
    return {"method": method.value, **given}


def _is_name_of(method: Method, name: object) -> bool:
    """Whether vLLM's `name` is `method`: the same word, the n-gram proposer on the GPU, or an MTP's older name."""
    if method is Method.NGRAM and name == "ngram_gpu":
        return True
    return name == method or (method is Method.MTP and str(name).endswith("_mtp"))


def _slips(data: Mapping[str, Any]) -> Iterator[Issue]:
    known = SpeculativeConfig.model_fields
    for key in data:
        if key == "tensor_parallel_size":
            yield Issue((key,), "not a key of vLLM's", "did you mean 'draft_tensor_parallel_size'?", at_key=True)
        elif key not in known and key not in _OTHER_VERSIONS:
            near = difflib.get_close_matches(str(key), known, n=1, cutoff=_NEAR)
            if near:
                yield Issue((key,), "unknown key", f"did you mean '{near[0]}'?", at_key=True)


def _contradictions(config: SpeculativeConfig) -> Iterator[Issue]:
    """Yield what vLLM would refuse at start although every value by itself is right."""
    low, high = config.prompt_lookup_min, config.prompt_lookup_max
    if low is not None and high is not None and low > high:
        yield Issue(("prompt_lookup_min",), f"greater than prompt_lookup_max, {high}")
    if config.use_heterogeneous_vocab and config.draft_sample_method != "greedy":
        yield Issue(("draft_sample_method",), "must be 'greedy' with use_heterogeneous_vocab")
    yield from _schedule_faults(config.num_speculative_tokens_per_batch_size or [])
    yield from _synthetic_faults(config)


def _schedule_faults(schedule: list[BatchRange]) -> Iterator[Issue]:
    key = "num_speculative_tokens_per_batch_size"
    order = sorted(range(len(schedule)), key=lambda index: schedule[index][0])
    end = 0
    for index in order:
        first, last, _ = schedule[index]
        if first > last:
            yield Issue((key, index), f"the range runs backwards, {first} to {last}", f"[{last}, {first}, tokens]")
        elif end == 0 and first != 1:
            yield Issue((key, index), f"the first range starts at {first}", "start it at 1")
        elif first <= end:
            yield Issue((key, index), f"overlaps the range before it, which ends at {end}", f"start it at {end + 1}")
        end = max(end, first, last)


def _synthetic_faults(config: SpeculativeConfig) -> Iterator[Issue]:
    rates, length, tokens = (
        config.synthetic_acceptance_rates,
        config.synthetic_acceptance_length,
        config.num_speculative_tokens,
    )
    if config.rejection_sample_method != "synthetic":
        for key, value in (("synthetic_acceptance_rates", rates), ("synthetic_acceptance_length", length)):
            if value is not None:
                yield Issue((key,), "goes only with rejection_sample_method: synthetic", at_key=True)
        return
    if "synthetic_acceptance_rate" not in (config.model_extra or {}) and (rates is None) == (length is None):
        hint = "give one of synthetic_acceptance_rates and synthetic_acceptance_length"
        yield Issue(("rejection_sample_method",), "synthetic acceptance needs to be told how much", hint)
    if rates is not None and tokens is not None and len(rates) != tokens:
        yield Issue(("synthetic_acceptance_rates",), f"has {len(rates)} rates for {tokens} tokens", "one for each")
    if rates is not None and any(later > earlier for earlier, later in itertools.pairwise(rates)):
        yield Issue(("synthetic_acceptance_rates",), "rises", "a position is accepted only if those before it are")
    if length is not None and tokens is not None and length > tokens + 1:
        yield Issue(
            ("synthetic_acceptance_length",), f"greater than {tokens + 1}", "num_speculative_tokens + 1 at most"
        )
