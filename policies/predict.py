"""What a request takes on each backend, and what it takes from the requests already there.

Time per token is time per step, which is the backend's and depends on its load, over tokens per step, which is the
request's and the method's. They are learned apart, so that their quotient holds at loads that were not seen.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Self

from backends.backend import Candidate
from policies.acceptance import AcceptanceModel, arm_of
from policies.backlog import Backlog, Share
from policies.cells import Key
from policies.length import LengthModel
from policies.load import LoadMeter
from policies.prefixes import PrefixMemory
from policies.prior import DEFAULT_CALIBRATION, StepCost, expected_step, known_k
from policies.request import RequestFeatures


class Prediction(NamedTuple):
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

    @property
    def own_s(self) -> float:
        """What the request itself takes."""
        return self.ttft_s + self.decode_s

    @property
    def share(self) -> Share:
        """What it adds to the backend's work."""
        return Share(self.steps, self.context_tokens, self.prompt_tokens)


@dataclass(frozen=True, slots=True)
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
    _acceptance: dict[Key, tuple[float, float]] = field(default_factory=dict)

    def learn(self, knowledge: Knowledge) -> None:
        """Take over what was fitted."""
        self.knowledge = knowledge
        self._acceptance.clear()

    @property
    def cost(self) -> StepCost:
        """Its step costs, as far as they were learned."""
        return self.knowledge.steps.get(self.name, self.prior)

    def acceptance(self, key: Key) -> tuple[float, float]:
        """Return the tokens per step to be expected, and how often requests like this one were seen on its arm."""
        known = self._acceptance.get(key)
        if known is None:
            model = self.knowledge.acceptance
            known = model.tokens_per_step(self.arm, self.name, key), model.seen(self.arm, key)
            if len(self._acceptance) < _REMEMBERED:
                self._acceptance[key] = known
        return known


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

    @property
    def knowledge(self) -> Knowledge:
        """What was fitted."""
        return self._knowledge

    def learn(self, knowledge: Knowledge) -> None:
        """Take over what was fitted."""
        self._knowledge = knowledge
        for known in self.known.values():
            known.learn(knowledge)

    def rehearsal(self) -> Self:
        """Return a copy whose predictions, and what is sent by them, change nothing here."""
        other = copy.copy(self)
        other.prefixes = self.prefixes.rehearsal()
        other.known = {
            name: replace(known, backlog=copy.copy(known.backlog), _acceptance={}) for name, known in self.known.items()
        }
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
        predictions = []
        for candidate in candidates:
            known = self.known.get(candidate.name) or self.of(candidate)
            load, backlog, slow = candidate.load, known.backlog, known.slowness
            requests = self.meter.requests(candidate) if load.others else candidate.in_flight
            backlog.look(now_s, requests)
            base_s, per_request_s, per_context_s, per_prompt_s = known.cost
            per_step = known.acceptance(key)[0]
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
                prompt = max(1.0, prompt - self.prefixes.cached_tokens(known.name, request))
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
                )
            )
        return predictions


_REMEMBERED = 10_000
