"""What a backend is at work on, as far as this gateway knows: the batch that a request would join."""

from __future__ import annotations

from dataclasses import dataclass


# Made for each request, as what `policies.decision` has.
@dataclass(slots=True, init=False)
class Mark:
    """How far a backend's sums had come when a request was sent there; see `Backlog.since`."""

    at_s: float
    requests: float
    context: float
    prompt_tokens: float

    def __init__(self, at_s: float, requests: float, context: float, prompt_tokens: float) -> None:
        self.at_s = at_s
        self.requests = requests
        self.context = context
        self.prompt_tokens = prompt_tokens


@dataclass(slots=True, init=False)
class Share:
    """What one request was expected to add to its backend's work.

    Parameters
    ----------
    steps
        Engine steps for its answer.
    context_tokens
        Of its prompt and half its answer: what its steps read on average.
    prompt_tokens
        To be computed, less what is cached.
    """

    steps: float
    context_tokens: float
    prompt_tokens: float

    def __init__(self, steps: float, context_tokens: float, prompt_tokens: float) -> None:
        self.steps = steps
        self.context_tokens = context_tokens
        self.prompt_tokens = prompt_tokens


@dataclass(slots=True)
class Backlog:
    """Keeps count of the work on one backend, and of its mean over time.

    The number of requests is not kept here: the gateway knows it exactly, and other gateways' requests come with the
    engine's report. Only what a request means on average is taken from those sent and not yet ended; so a request of
    which the end was never heard does no lasting harm.

    Attributes
    ----------
    sent
        Requests sent and not yet ended.
    steps, context_tokens
        What those were expected to take, all together. The mean number of steps stands for what is left of them, too:
        whoever looks in at any time finds long answers more often than short ones.
    """

    sent: int = 0
    steps: float = 0.0
    context_tokens: float = 0.0
    _at_s: float = 0.0
    _requests: int = 0
    _request_s: float = 0.0
    _context_s: float = 0.0
    _prompt_tokens: float = 0.0

    @property
    def requests(self) -> int:
        """Requests there, when last noted."""
        return self._requests

    def look(self, now_s: float, requests: int) -> None:
        """Note how many requests are there now."""
        elapsed_s = now_s - self._at_s
        if elapsed_s > 0:
            self._request_s += elapsed_s * self._requests
            if self.sent:
                self._context_s += elapsed_s * self._requests * self.context_tokens / self.sent
            self._at_s = now_s
        self._requests = requests
        if requests == 0 and self.sent:
            self.sent, self.steps, self.context_tokens = 0, 0.0, 0.0

    def send(self, share: Share, now_s: float) -> Mark:
        """Note that a request is sent there."""
        self.sent += 1
        self.steps += share.steps
        self.context_tokens += share.context_tokens
        self._prompt_tokens += share.prompt_tokens
        self._requests += 1
        return Mark(now_s, self._request_s, self._context_s, self._prompt_tokens - share.prompt_tokens)

    def end(self, share: Share) -> None:
        """Note that a request has ended there."""
        self._requests = max(0, self._requests - 1)
        if self.sent:
            self.sent -= 1
            self.steps = max(0.0, self.steps - share.steps)
            self.context_tokens = max(0.0, self.context_tokens - share.context_tokens)

    def since(self, mark: Mark, now_s: float) -> tuple[float, float, float]:
        """Return mean requests and mean context tokens since a mark, and the prompt tokens sent there from it on."""
        elapsed_s = max(1e-6, now_s - mark.at_s)
        return (
            max(1.0, (self._request_s - mark.requests) / elapsed_s),
            (self._context_s - mark.context) / elapsed_s,
            self._prompt_tokens - mark.prompt_tokens,
        )
