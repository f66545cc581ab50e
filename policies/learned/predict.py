"""What a request takes on each backend, and what it takes from the requests already there.

Time per token is time per step, which is the backend's and depends on its load, over tokens per step, which is the
request's and the method's. They are learned apart, so that their quotient holds at loads that were not seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from backends.backend import Candidate
from policies.features.request import RequestFeatures
from policies.learned.models.acceptance import AcceptanceModel, arm_of
from policies.learned.models.backend_model import BackendModel, FittedModels
from policies.learned.models.backlog import Share
from policies.learned.models.buckets import Key
from policies.learned.models.prefix_memory import PrefixMemory
from policies.learned.models.prior import DEFAULT_CALIBRATION, expected_step, known_k
from policies.load import LoadMeter


# Made for each candidate, as what `policies.decision` has.
@dataclass(slots=True, init=False)
class Prediction:
    """What is expected of a request on one backend.

    Parameters
    ----------
    ttft_s
        Until its first token: waiting, and computing its prompt.
    decode_s
        From there to its last token.
    others_s
        Delay to the requests already there, all together.
    step_s
        Of the engine while it runs there, at the load of now.
    steps
        For its answer.
    tokens_per_step
        For this request on this backend.
    output_tokens
        Of each of its sequences.
    context_tokens
        That its steps read on average.
    prompt_tokens
        To be computed: those that are not in the backend's prefix cache.
    requests
        That are there now.
    seen
        How often requests like this one were seen on the backend's arm.
    """

    ttft_s: float
    decode_s: float
    others_s: float
    step_s: float
    steps: float
    tokens_per_step: float
    output_tokens: float
    context_tokens: float
    prompt_tokens: float
    requests: int
    seen: float

    def __init__(  # noqa: PLR0917 -- a record
        self,
        ttft_s: float,
        decode_s: float,
        others_s: float,
        step_s: float,
        steps: float,
        tokens_per_step: float,
        output_tokens: float,
        context_tokens: float,
        prompt_tokens: float,
        requests: int,
        seen: float = 0.0,
    ) -> None:
        self.ttft_s = ttft_s
        self.decode_s = decode_s
        self.others_s = others_s
        self.step_s = step_s
        self.steps = steps
        self.tokens_per_step = tokens_per_step
        self.output_tokens = output_tokens
        self.context_tokens = context_tokens
        self.prompt_tokens = prompt_tokens
        self.requests = requests
        self.seen = seen

    @property
    def own_s(self) -> float:
        """What the request itself takes."""
        return self.ttft_s + self.decode_s

    @property
    def share(self) -> Share:
        """What it adds to the backend's work."""
        return Share(self.steps, self.context_tokens, self.prompt_tokens)


class _Expected:
    """What is expected of requests of one key on one backend."""

    def __init__(self, known: BackendModel, per_step: float, seen: float) -> None:
        self.known = known
        self.per_step = per_step
        self.seen = seen


class Predictor:
    """Evaluates what was learned: no fit, no array, nothing that waits.

    Parameters
    ----------
    meter
        Counts the requests on a backend, other gateways' included.
    calibration
        What is expected of backends of which nothing is known.
    """

    def __init__(self, meter: LoadMeter, calibration: str = DEFAULT_CALIBRATION) -> None:
        self.meter = meter
        self.calibration = calibration
        self.prefixes = PrefixMemory()
        self.known: dict[str, BackendModel] = {}
        self._fitted = FittedModels(AcceptanceModel(calibration=calibration))
        self._alike: dict[Key, dict[str, _Expected]] = {}  # what is expected of a key, by backend
        self.slow: set[str] = set()
        """Backends whose slowness is above 1."""

    @property
    def fitted(self) -> FittedModels:
        """What was fitted."""
        return self._fitted

    def learn(self, fitted: FittedModels) -> None:
        """Take over what was fitted."""
        self._fitted = fitted
        self._alike = {}
        for known in self.known.values():
            known.learn(fitted)

    def dry_run_copy(self) -> Predictor:
        """Return a copy whose predictions, and what is sent by them, change nothing here."""
        other = Predictor(self.meter, self.calibration)
        other._fitted = self._fitted
        other.prefixes = self.prefixes.dry_run_copy()
        other.known = {name: known.dry_run_copy() for name, known in self.known.items()}
        other.slow = set(self.slow)
        return other

    def note_slowness(self, backend: str, slowness: float) -> None:
        """Take over how many times as long as its fit has it the steps of a backend take, at least 1."""
        self.known[backend].slowness = slowness
        if slowness > 1.0:
            self.slow.add(backend)
        else:
            self.slow.discard(backend)

    def of(self, candidate: Candidate) -> BackendModel:
        """Return what is known of a backend; of a new one that is what the calibration says."""
        known = self.known.get(candidate.name)
        if known is None:
            k = known_k(candidate.method, candidate.num_speculative_tokens)
            prior = expected_step(self.calibration, candidate.method, k)
            prefixes = self.prefixes.of_another_backend()
            known = BackendModel(candidate.name, arm_of(candidate), prior, self._fitted, prefixes)
            self.known[candidate.name] = known
        return known

    def tokens_per_step(self, backend: str, key: Key) -> float:
        """Return the tokens per step to be expected of a backend that is known."""
        alike = self._alike_to(key)
        expected = alike.get(backend)
        if expected is None:
            expected = alike[backend] = self._expected(self.known[backend], key)
        return expected.per_step

    def _expected(self, known: BackendModel, key: Key) -> _Expected:
        per_step, seen = known.acceptance(key)
        return _Expected(known, per_step, seen)

    def _alike_to(self, key: Key) -> dict[str, _Expected]:
        """Return what was worked out for a key already, by backend."""
        alike = self._alike.get(key)
        if alike is None:
            if len(self._alike) >= _REMEMBERED:
                self._alike.clear()  # what is asked now is asked again, rather than what was asked first
            alike = self._alike[key] = {}
        return alike

    def predict(
        self, request: RequestFeatures, key: Key, candidates: Sequence[Candidate], now_s: float
    ) -> list[Prediction]:
        """Predict for each candidate.

        The others are delayed, and delay it, for the steps that both share. Of answers that take R steps on average and
        were begun at any time, `S R / (S + R)` are shared with one of S steps: S if they are long beside it, R if they
        are short.
        """
        sequences = request.n
        tokens = self._fitted.length.tokens(request, key) / sequences
        prompt_tokens = float(request.prompt_tokens)
        context = prompt_tokens + tokens / 2
        holders = self.prefixes.holders(request)
        alike = self._alike_to(key)
        oldest_s = self.meter.oldest_s()
        predictions = []
        for candidate in candidates:
            name = candidate.name
            expected = alike.get(name)
            if expected is None:
                expected = alike[name] = self._expected(self.of(candidate), key)
            known = expected.known
            load = candidate.load
            if load is not known.load:  # a report is replaced whole
                known.read(load)
            requests = candidate.in_flight
            if known.reported_s >= oldest_s:
                requests += known.others
            backlog, slow = known.backlog, known.slowness
            backlog.look(now_s, requests)
            per_step = expected.per_step
            steps = tokens / per_step if tokens > per_step else 1.0
            mine_s = slow * sequences * (known.per_request_s + known.per_context_token_s * context)
            sent = backlog.sent
            if sent:
                left = backlog.steps / sent
                theirs_s = slow * (known.per_request_s + known.per_context_token_s * backlog.context_tokens / sent)
            else:
                left, theirs_s = steps, mine_s
            shared = requests * steps * left / (steps + left)
            prompt = prompt_tokens
            if holders:
                prompt = max(1.0, prompt - known.prefixes.cached_tokens(request, holders))
            prefill_s = slow * known.per_prompt_token_s * prompt
            alone_s = slow * known.base_s + mine_s
            step_s = alone_s + requests * theirs_s
            ttft_s = 1.5 * step_s + prefill_s  # the step under way is half done, on average
            if known.waiting:
                # Who waits gets in as those inside leave: each after what is left of it, all of them at once.
                ttft_s += known.waiting / max(1, requests - known.waiting) * left * step_s
            predictions.append(
                Prediction(
                    ttft_s,
                    steps * alone_s + shared * theirs_s,
                    shared * mine_s + requests * prefill_s,
                    step_s,
                    steps,
                    per_step,
                    tokens,
                    context,
                    prompt,
                    requests,
                    expected.seen,
                )
            )
        return predictions


_REMEMBERED: Final = 10_000
