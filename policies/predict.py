"""What a request takes on each backend, and what it takes from the requests already there.

Time per token is time per step, which is the backend's and depends on its load, over tokens per step, which is the
request's and the method's. They are learned apart, so that their quotient holds at loads that were not seen.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from backends.backend import Candidate
from policies.acceptance import AcceptanceModel, arm_of
from policies.backlog import Backlog, Share
from policies.cells import Key
from policies.length import LengthModel
from policies.load import LoadMeter
from policies.prefixes import PrefixMemory
from policies.prior import DEFAULT_CALIBRATION, StepCost, expected_step, known_k
from policies.request import RequestFeatures


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


@dataclass(slots=True)
class Knowledge:
    """Everything that was fitted; replaced whole by the next fit.

    Parameters
    ----------
    steps
        By backend; one that is not there is expected to be as its method on the calibration's machine.
    observed
        By backend, how many requests `steps` were fitted to.
    """

    acceptance: AcceptanceModel = field(default_factory=AcceptanceModel)
    length: LengthModel = field(default_factory=LengthModel)
    steps: Mapping[str, StepCost] = field(default_factory=dict)
    observed: Mapping[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class Known:
    """What is known of one backend.

    Attributes
    ----------
    prior
        Its step costs on the calibration's machine.
    slowness
        By how much its latest steps were slower than its fit has it; 1 where nothing is noted.
    """

    name: str
    arm: str
    prior: StepCost
    knowledge: Knowledge
    backlog: Backlog = field(default_factory=Backlog)
    slowness: float = 1.0

    def learn(self, knowledge: Knowledge) -> None:
        """Take over what was fitted."""
        self.knowledge = knowledge

    @property
    def cost(self) -> StepCost:
        """Its step costs, as far as they were learned."""
        return self.knowledge.steps.get(self.name, self.prior)

    def acceptance(self, key: Key) -> tuple[float, float]:
        """Return the tokens per step to be expected, and how often requests like this one were seen on its arm."""
        model = self.knowledge.acceptance
        return model.tokens_per_step(self.arm, self.name, key), model.seen(self.arm, key)


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
        self.known: dict[str, Known] = {}
        self._knowledge = Knowledge(AcceptanceModel(calibration=calibration))
        self._alike: dict[Key, dict[str, tuple[float, float]]] = {}  # acceptance of a key, by backend

    @property
    def knowledge(self) -> Knowledge:
        """What was fitted."""
        return self._knowledge

    def learn(self, knowledge: Knowledge) -> None:
        """Take over what was fitted."""
        self._knowledge = knowledge
        self._alike = {}
        for known in self.known.values():
            known.learn(knowledge)

    def rehearsal(self) -> Predictor:
        """Return a copy whose predictions, and what is sent by them, change nothing here."""
        other = Predictor(self.meter, self.calibration)
        other._knowledge = self._knowledge
        other.prefixes = self.prefixes.rehearsal()
        other.known = {name: replace(known, backlog=copy.copy(known.backlog)) for name, known in self.known.items()}
        return other

    def of(self, candidate: Candidate) -> Known:
        """Return what is known of a backend; of a new one that is what the calibration says."""
        known = self.known.get(candidate.name)
        if known is None:
            k = known_k(candidate.method, candidate.num_speculative_tokens)
            prior = expected_step(self.calibration, candidate.method, k)
            known = Known(candidate.name, arm_of(candidate), prior, self._knowledge)
            self.known[candidate.name] = known
        return known

    def tokens_per_step(self, backend: str, key: Key) -> float:
        """Return the tokens per step to be expected of a backend that is known."""
        alike = self._acceptance_of(key)
        told = alike.get(backend)
        if told is None:
            told = alike[backend] = self.known[backend].acceptance(key)
        return told[0]

    def _acceptance_of(self, key: Key) -> dict[str, tuple[float, float]]:
        """Return what was worked out for a key already, by backend."""
        alike = self._alike.get(key)
        if alike is None:
            alike = {}
            if len(self._alike) < _REMEMBERED:
                self._alike[key] = alike
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
        tokens = self._knowledge.length.tokens(request, key) / sequences
        context = request.prompt_tokens + tokens / 2
        alike = self._acceptance_of(key)
        predictions = []
        for candidate, requests in zip(candidates, self.meter.counts(candidates), strict=True):
            name = candidate.name
            known = self.known.get(name) or self.of(candidate)
            load, backlog, slow = candidate.load, known.backlog, known.slowness
            backlog.look(now_s, requests)
            base_s, per_request_s, per_context_s, per_prompt_s = known.cost
            acceptance = alike.get(name)
            if acceptance is None:
                acceptance = alike[name] = known.acceptance(key)
            per_step, seen = acceptance
            steps = tokens / per_step if tokens > per_step else 1.0
            mine_s = slow * sequences * (per_request_s + per_context_s * context)
            sent = backlog.sent
            if sent:
                left = backlog.steps / sent
                theirs_s = slow * (per_request_s + per_context_s * backlog.context_tokens / sent)
            else:
                left, theirs_s = steps, mine_s
            shared = requests * steps * left / (steps + left)
            prompt = float(request.prompt_tokens)
            if request.prefix:
                prompt = max(1.0, prompt - self.prefixes.cached_tokens(name, request))
            prefill_s = slow * per_prompt_s * prompt
            alone_s = slow * base_s + mine_s
            step_s = alone_s + requests * theirs_s
            ttft_s = 1.5 * step_s + prefill_s  # the step under way is half done, on average
            if load.waiting:
                # Who waits gets in as those inside leave: each after what is left of it, all of them at once.
                ttft_s += load.waiting / max(1, requests - load.waiting) * left * step_s
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
                    seen,
                )
            )
        return predictions


_REMEMBERED = 10_000
