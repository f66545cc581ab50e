"""The backlog of a backend: the batch that a new request would join, as far as this gateway knows."""

from __future__ import annotations

from dataclasses import dataclass


class Mark:
    """The state of a backlog's time integrals when a request was sent; see `Backlog.since`."""

    def __init__(self, at_s: float, requests: float, context: float, prompt_tokens: float) -> None:
        self.at_s = at_s
        self.requests = requests
        self.context = context
        self.prompt_tokens = prompt_tokens


class Share:
    """The work that one request is expected to add to a backend."""

    def __init__(self, steps: float, context_tokens: float, prompt_tokens: float, prefill_s: float = 0.0) -> None:
        self.steps = steps  # engine steps of its answer
        self.context_tokens = context_tokens  # mean context of a step: the prompt and half of the answer, in tokens
        self.prompt_tokens = prompt_tokens  # prompt tokens to compute, without cached ones
        self.prefill_s = prefill_s  # seconds that computing them takes


@dataclass(slots=True)
class Backlog:
    """The work on one backend, and its mean over time.

    The number of requests comes from the caller, who also knows those of other gateways. Only the mean work per request
    is taken from the requests sent here, so a request whose end is never reported does no lasting harm.

    Examples
    --------
    >>> backlog = Backlog()
    >>> mark = backlog.send(Share(steps=50.0, context_tokens=400.0, prompt_tokens=300.0), now_s=0.0)
    >>> backlog.update(now_s=2.0, requests=3)
    >>> backlog.since(mark, now_s=2.0)
    (1.0, 400.0, 300.0)
    """

    sent: int = 0  # number of requests sent and not yet ended
    # steps, context_tokens: total steps and mean context expected of those. The mean number of steps also serves as the
    # mean number of steps left: at a random time, a running answer is more likely to be a long one (the inspection
    # paradox).
    steps: float = 0.0
    context_tokens: float = 0.0
    prefill_s: float = 0.0  # total seconds of computing their prompts
    _at_s: float = 0.0
    _requests: int = 0
    _request_s: float = 0.0
    _context_s: float = 0.0
    _prompt_tokens: float = 0.0
    _prefill_until_s: float = 0.0

    @property
    def requests(self) -> int:
        """Number of requests on the backend at the last update."""
        return self._requests

    def update(self, now_s: float, requests: int) -> None:
        """Integrate the load up to now, and set the present number of requests."""
        elapsed_s = now_s - self._at_s
        if elapsed_s > 0:
            self._request_s += elapsed_s * self._requests
            if self.sent:
                self._context_s += elapsed_s * self._requests * self.context_tokens / self.sent
            self._at_s = now_s
        self._requests = requests
        if requests == 0 and self.sent:
            self.sent, self.steps, self.context_tokens, self.prefill_s = 0, 0.0, 0.0, 0.0

    def send(self, share: Share, now_s: float) -> Mark:
        """Add a request."""
        self.sent += 1
        self.steps += share.steps
        self.context_tokens += share.context_tokens
        self._prompt_tokens += share.prompt_tokens
        self._requests += 1
        self._prefill_until_s = now_s + self.prefill_left_s(now_s) + share.prefill_s
        self.prefill_s += share.prefill_s
        return Mark(now_s, self._request_s, self._context_s, self._prompt_tokens - share.prompt_tokens)

    def prefill_left_s(self, now_s: float) -> float:
        """Return the seconds until the prompts sent here are computed, one after another, in order of arrival."""
        return min(self.prefill_s, max(0.0, self._prefill_until_s - now_s))

    def end(self, share: Share) -> None:
        """Remove a request that has ended."""
        self._requests = max(0, self._requests - 1)
        if self.sent:
            self.sent -= 1
            self.steps = max(0.0, self.steps - share.steps)
            self.context_tokens = max(0.0, self.context_tokens - share.context_tokens)
            self.prefill_s = max(0.0, self.prefill_s - share.prefill_s)

    def since(self, mark: Mark, now_s: float) -> tuple[float, float, float]:
        """Return the mean requests and mean context tokens since a mark, and the prompt tokens sent from it on."""
        elapsed_s = max(1e-6, now_s - mark.at_s)
        return (  # the mark may be that of another backend which had the name before
            max(1.0, (self._request_s - mark.requests) / elapsed_s),
            max(0.0, self._context_s - mark.context) / elapsed_s,
            max(0.0, self._prompt_tokens - mark.prompt_tokens),
        )
