"""The longest context that a replica's drafter can serve, and what happens to requests beyond it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from backends.speculation import MODELLESS, Method, release_of


class Beyond(StrEnum):
    """What happens when a request's context exceeds the drafter's limit."""

    WORSE = "worse"  # fewer and fewer of its drafts are accepted
    NONE = "none"  # only this request gets no drafts
    BATCH = "batch"  # the whole batch verifies dummies, and none is accepted
    CRASH = "crash"  # the engine crashes


@dataclass(frozen=True, slots=True)
class DrafterLimit:
    """The limit of one replica's drafter.

    Examples
    --------
    >>> DrafterLimit(2048).harms_others, DrafterLimit(2048, Beyond.WORSE).harms_others
    (True, False)
    """

    tokens: int  # of prompt and answer together
    beyond: Beyond = Beyond.BATCH

    @property
    def harms_others(self) -> bool:
        """Whether one request beyond the limit harms others in its batch."""
        return self.beyond in (Beyond.BATCH, Beyond.CRASH)

    @property
    def consequence(self) -> str:
        """What happens beyond the limit, in words."""
        return {
            Beyond.WORSE: "the drafts of such a request are accepted less and less",
            Beyond.NONE: "such a request gets no drafts",
            Beyond.BATCH: "no draft of the whole batch is accepted while such a request runs",
            Beyond.CRASH: "such a request may end the engine",
        }[self.beyond]

    def note_on(self, prompt_tokens: int, answer_tokens: int = 0) -> str:
        """Return a warning about a request with a prompt and, at most, an answer of this length; "" if it fits.

        Examples
        --------
        >>> DrafterLimit(2048, Beyond.NONE).note_on(1900, 200)
        "the request may grow beyond its drafter's 2,048 tokens: such a request gets no drafts"
        """
        if prompt_tokens + answer_tokens <= self.tokens:
            return ""
        verb = "is" if prompt_tokens > self.tokens else "may grow"
        return f"the request {verb} beyond its drafter's {self.tokens:,} tokens: {self.consequence}"


_RUNNER_V1 = frozenset({Method.MEDUSA, Method.MLP_SPECULATOR, Method.CUSTOM_CLASS})
"""Methods that vLLM's newer model runner lacks, so that the older one runs them."""


def beyond_of(method: Method, version: str = "") -> Beyond:
    """Return what a version of vLLM does beyond a drafter's limit; for an unknown version, what the latest does.

    Up to 0.10 the drafter read beyond its rotary embeddings (pull request 22935). Since then the model runner checks
    whether the longest sequence of a batch fits (24662). The newer runner, the default for heads since 0.24 and for all
    since 0.29, does not check (issues 48894, 57941). Since 0.27 the embeddings of EAGLE heads are as long as the
    target's (49343).

    Examples
    --------
    >>> [beyond_of(Method.EAGLE3, version).value for version in ("0.10.1.1", "0.19.0", "0.24.0", "0.32.0")]
    ['crash', 'batch', 'crash', 'worse']
    >>> beyond_of(Method.MTP, "0.28.1").value, beyond_of(Method.MEDUSA, "0.32.0").value
    ('batch', 'batch')
    """
    if method in MODELLESS:
        return Beyond.WORSE  # nothing is limited
    release = release_of(version) or (1, 0)
    is_eagle = method in (Method.EAGLE, Method.EAGLE3)
    if release < (0, 11):
        return Beyond.CRASH
    if method in _RUNNER_V1 or release < ((0, 24) if is_eagle else (0, 29)):
        return Beyond.BATCH
    return Beyond.WORSE if is_eagle and release >= (0, 27) else Beyond.CRASH
