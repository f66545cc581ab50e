"""The model of each backend: its fitted costs, and its present work."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from backends.backend import EngineLoad
from backends.calibration.parameters import ASYNCHRONOUS
from backends.drafter_limit import DrafterLimit
from policies.learned.models.acceptance import AcceptanceModel, at_max_k, by_level, most_per_step
from policies.learned.models.depth import Counted, Depth, Place, between
from policies.learned.models.keys import Key
from policies.learned.models.length import LengthModel
from policies.learned.models.prefix_memory import BackendPrefixes
from policies.learned.models.prior import StepCost
from policies.learned.models.step_time import Load, PromptTime, weighed
from policies.learned.models.undrafted import Reach
from policies.learned.shadow_drafting import SHADOWED

Mark = tuple[float, float, float, float]
"""When a request was sent, and the integrals of its backlog then: of requests, context and weighed prompt tokens."""


class Prediction:
    """The predicted performance of a request on one backend, and the work that it adds there."""

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
        observations: float = 0.0,
        prefill_s: float = 0.0,
        weighed_tokens: float = 0.0,
        undrafted: float = 0.0,
        room: float = math.inf,
    ) -> None:
        self.steps = steps  # engine steps of its answer
        self.context_tokens = context_tokens  # mean context of a step: the prompt and half of the answer, in tokens
        self.prompt_tokens = prompt_tokens  # prompt tokens to compute, without cached ones
        self.weighed_tokens = weighed_tokens  # the same with the attention to those before them, see `weighed`
        self.prefill_s = prefill_s  # seconds that computing them takes
        self.ttft_s = ttft_s  # seconds to the first token: waiting, and computing the prompt
        self.decode_s = decode_s  # seconds from the first token to the last
        # Total delay in seconds of the requests already on the backend, and of later ones whose prefixes are evicted.
        self.others_s = others_s
        self.step_s = step_s  # seconds per engine step at the present load with this request added
        self.tokens_per_step = tokens_per_step  # tokens per engine step
        self.output_tokens = output_tokens  # output tokens per sequence
        self.requests = requests  # requests on the backend at present
        # undrafted: tokens beyond the drafter's limit, each of which is a step; room: tokens after which it may take
        # the drafts of all, infinite if it cannot.
        self.undrafted, self.room = undrafted, room
        self.observations = observations  # number of similar requests observed on the backend's arm

    @property
    def own_s(self) -> float:
        """Predicted seconds from start to end of the request."""
        return self.ttft_s + self.decode_s


@dataclass(slots=True)
class Backlog:
    """The work on one backend, and its mean over time.

    The number of requests comes from the caller, who also knows those of other gateways. Only the mean work per request
    is taken from the requests sent here, so a request whose end is never reported does no lasting harm.

    """

    sent: int = 0  # number of requests sent and not yet ended
    # steps, context_tokens: total steps and mean context expected of those. The mean number of steps also serves as the
    # mean number of steps left: at a random time, a running answer is more likely to be a long one (the inspection
    # paradox).
    steps: float = 0.0
    context_tokens: float = 0.0
    prefill_s: float = 0.0  # total seconds of computing their prompts
    undrafted: float = 0.0  # steps in which those beyond the drafter's limit take the drafts of all
    _beyond_from_s: dict[Prediction, float] = field(default_factory=dict)  # those that may get there, and when
    _undrafted_at_s: float = -math.inf
    _at_s: float = 0.0
    _requests: int = 0
    _request_s: float = 0.0
    _context_s: float = 0.0
    _prompt_tokens: float = 0.0
    _prefill_until_s: float = 0.0
    _told_until_s: float = 0.0  # until the prompts that other gateways have sent are computed

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
            self.undrafted, self._beyond_from_s = 0.0, {}

    def send(self, prediction: Prediction, now_s: float) -> Mark:
        """Add a request."""
        self.sent += 1
        self.steps += prediction.steps
        self.context_tokens += prediction.context_tokens
        self._prompt_tokens += prediction.weighed_tokens
        self._requests += 1
        self._prefill_until_s = now_s + self.prefill_left_s(now_s) + prediction.prefill_s
        if self._told_until_s > now_s:
            self._told_until_s = self._prefill_until_s
        self.prefill_s += prediction.prefill_s
        if prediction.room < math.inf:
            self.undrafted += prediction.undrafted
            after_s = prediction.room * prediction.step_s / prediction.tokens_per_step / _FASTER
            self._beyond_from_s[prediction] = now_s + after_s
        return now_s, self._request_s, self._context_s, self._prompt_tokens - prediction.weighed_tokens

    def prefill_left_s(self, now_s: float) -> float:
        """Return the seconds until the prompts sent here are computed, one after another, in order of arrival."""
        own_s = min(self.prefill_s, max(0.0, self._prefill_until_s - now_s))
        return max(own_s, self._told_until_s - now_s)

    def hear(self, prefill_s: float, now_s: float) -> None:
        """Add a prompt that another gateway has sent, which is not computed at once while there are others."""
        self._told_until_s = now_s + self.prefill_left_s(now_s) + prefill_s

    def end(self, prediction: Prediction, is_beyond: bool = False) -> None:
        """Remove a request that has ended, beyond the drafter's limit or not."""
        self._requests = max(0, self._requests - 1)
        if self.sent:
            self.sent -= 1
            self.steps = max(0.0, self.steps - prediction.steps)
            self.context_tokens = max(0.0, self.context_tokens - prediction.context_tokens)
            self.prefill_s = max(0.0, self.prefill_s - prediction.prefill_s)
        if is_beyond:
            self._undrafted_at_s = self._at_s
        if self._beyond_from_s.pop(prediction, None) is not None:
            self.undrafted = max(0.0, self.undrafted - prediction.undrafted)

    def was_drafted(self, since_s: float) -> bool:
        """Return whether no request can have been beyond the drafter's limit from a time until the last update."""
        from_s = min(self._beyond_from_s.values(), default=math.inf)
        return self._undrafted_at_s <= since_s and self._at_s < from_s

    def since(self, mark: Mark, now_s: float) -> tuple[float, float, float]:
        """Return the mean requests and context tokens since a mark, and the weighed prompt tokens sent from it on."""
        at_s, request_s, context_s, prompt_tokens = mark
        elapsed_s = max(1e-6, now_s - at_s)
        return (  # the mark may be that of another backend which had the name before
            max(1.0, (self._request_s - request_s) / elapsed_s),
            max(0.0, self._context_s - context_s) / elapsed_s,
            max(0.0, self._prompt_tokens - prompt_tokens),
        )


@dataclass(slots=True)
class FittedModels:
    """The result of a fit; the next fit replaces it as a whole."""

    acceptance: AcceptanceModel = field(default_factory=AcceptanceModel)
    length: LengthModel = field(default_factory=LengthModel)
    # Step costs by backend; a backend that is missing has the calibration's.
    steps: Mapping[str, StepCost] = field(default_factory=dict)
    # Number of requests that each entry of `steps` was fitted to.
    observed: Mapping[str, float] = field(default_factory=dict)
    templates: frozenset[str] = frozenset()  # templates that the statistics tell apart
    # Step costs by backend and level of its depth, in terms of its maximum k.
    levels: Mapping[Key, StepCost] = field(default_factory=dict)


class BackendModel:
    """The model of one backend.

    The costs and load figures that every prediction reads are kept as separate attributes: mypyc compiles them to
    native fields, while an attribute of an interpreted object costs as much as five multiplications.
    """

    def __init__(
        self,
        name: str,
        arm: str,
        prior: StepCost,
        fitted: FittedModels,
        prefixes: BackendPrefixes,
        depth: Depth | None = None,
        level_priors: Sequence[StepCost] = (),
    ) -> None:
        self.name = name
        self.arm = arm
        method = arm.partition(":")[0]
        self.has_shadow = method in SHADOWED  # whether shadow drafting tells what its method gives on a text
        self.most_per_step = most_per_step(arm)  # tokens that a step of its arm can give: all that are drafted, and one
        self.prior = prior  # step cost from the calibration
        # The k in force by batch size; None where it is always the maximum, for which `prior` and `cost` hold.
        self.depth = depth
        # Step cost at each level of `depth`, over that at the maximum k, and as fitted.
        self.level_ratios = [one.over(prior) for one in level_priors]
        # What its engine counts by position, where that tells its tokens per step at each level of `depth`.
        self.counted = Counted(depth) if depth is not None and not depth.adaptive and not self.has_shadow else None
        self.backlog = Backlog()
        self.prefixes = prefixes
        self.prompt_time = PromptTime()
        # Whether its drafter is silent; it then counts as giving one token per step, and as little known.
        self.silent = False
        self.is_asynchronous = method in ASYNCHRONOUS
        self.slowness = 1.0  # observed over fitted step time of late, at least 1
        self.reach = Reach(self.most_per_step - 1.0, may_have_limit=self.most_per_step > 1.0 and not self.has_shadow)
        self.learn(fitted)
        self.read(_NO_REPORT, None)

    def learn(self, fitted: FittedModels) -> None:
        """Replace the fitted models."""
        self.fitted = fitted
        self.cost = fitted.steps.get(self.name, self.prior)
        self.observed = fitted.observed.get(self.name, 0.0)
        self.spread = fitted.acceptance.spread(self.arm)
        self.base_s, self.per_request_s, self.per_context_token_s, self.per_prompt_token_s = self.cost
        levels = [] if self.depth is None else self.depth.levels
        self.level_costs = [
            fitted.levels.get((self.name, str(k)), self.cost).times(ratios)
            for k, ratios in zip(levels, self.level_ratios, strict=True)
        ]

    def read(self, load: EngineLoad, limit: DrafterLimit | None) -> None:
        """Replace the engine report and the drafter's limit."""
        self.reach.read(limit)
        self.load = load
        self.drafts = load.drafts, load.accepted_tokens  # as its engine counts them since its start
        self.waiting, self.others, self.reported_s = load.waiting, load.others, load.at_s
        self.prefixes.resize(load.kv_tokens)
        if self.counted is not None and load.accepted_per_position:
            self.counted.read(load.drafts, load.draft_tokens, load.accepted_per_position)

    def joins(self, requests: int) -> float:
        """Return the steps until the one that gives the first token has ended; the present one is half done."""
        return 2.5 if self.is_asynchronous and requests else 1.5

    def hear(self, prefixes: Sequence[int], lengths: Sequence[int], now_s: float, attention: float) -> None:
        """Add a prompt that another gateway has sent: it is computed, and cached then."""
        cached = self.prefixes.known_tokens(prefixes, lengths)
        work = weighed(lengths[-1] - cached, cached, attention) if lengths else 0.0
        self.backlog.hear(self.slowness * self.prompt_time.token_s(self.per_prompt_token_s) * work, now_s)
        self.prefixes.remember(prefixes, lengths, now_s)

    def possible(self, per_step: float | None) -> float | None:
        """Return the tokens per step of an answer within what the arm can give; None if they are far beyond it.

        Chunks that were joined, and the rounding of their number, show some more.
        """
        if per_step is None or not per_step <= _FAR * self.most_per_step:
            return None
        return min(max(1.0, per_step), self.most_per_step)

    def acceptance(self, key: Key, context_tokens: float = 0.0) -> tuple[float, float]:
        """Return the expected tokens per step for a request key, and the number of similar requests observed."""
        if self.silent:
            return 1.0, 0.0
        model = self.fitted.acceptance
        return model.tokens_per_step(self.arm, self.name, key, context_tokens), model.observations(self.arm, key)

    def acceptance_by_level(self, key: Key, context_tokens: float) -> list[float]:
        """Return the expected tokens per step for a request key at each level of `depth`; empty without one."""
        if self.depth is None:
            return []
        return [1.0] * len(self.depth.levels) if self.silent else self._by_level(key, self.depth, context_tokens)

    def _by_level(self, key: Key, depth: Depth, context_tokens: float) -> list[float]:
        per_step = self.fitted.acceptance.tokens_per_step(self.arm, self.name, key, context_tokens)
        return by_level(self._depths(key, context_tokens), per_step, depth.levels)

    def _depths(self, key: Key, context_tokens: float) -> tuple[float, ...]:
        """Return log(tokens per step) at each k up to the arm's: as its engine counts them, else the calibration's."""
        expected = self.fitted.acceptance.depths(self.arm, key, context_tokens)
        return expected if self.counted is None else self.counted.depths(expected)

    def tokens_per_step(self, key: Key, place: Place | None, context_tokens: float = 0.0) -> float:
        """Return the expected tokens per step for a request key at a place of `depth`; None for the maximum k."""
        if place is None:
            return self.acceptance(key, context_tokens)[0]
        return between(self.acceptance_by_level(key, context_tokens), place)

    def place(self, batch: float) -> Place | None:
        """Return the place of the k that a batch has; None for one that is fixed."""
        return None if self.depth is None else self.depth.place(batch)

    def meet(self, batch: int, by_level: Sequence[float]) -> float:
        """Set the costs to those of a batch of so many requests, and return the tokens per step of one of them."""
        assert self.depth is not None
        place = self.depth.place(batch)
        self.base_s, self.per_request_s, self.per_context_token_s, self.per_prompt_token_s = self.cost_at(place)
        return between(by_level, place)

    def without_s(self, requests: int, per_step: float, by_level: Sequence[float]) -> float:
        """Return the seconds that the requests here would need, without another one, for what a step gives them now.

        Joining a batch may lower its k, which changes the tokens per step of all others.
        """
        assert self.depth is not None
        place = self.depth.place(requests - self.waiting)
        cost, backlog = self.cost_at(place), self.backlog
        context_s = cost.per_context_token_s * backlog.context_tokens / backlog.sent
        return per_step / between(by_level, place) * (cost.base_s + requests * (cost.per_request_s + context_s))

    def cost_at(self, place: Place | None) -> StepCost:
        """Return the step cost at a place of `depth`; None for the maximum k."""
        if place is None:
            return self.cost
        lower, share = place
        low, high = self.level_costs[lower], self.level_costs[lower + 1]
        return StepCost(
            low.base_s + share * (high.base_s - low.base_s),
            low.per_request_s + share * (high.per_request_s - low.per_request_s),
            low.per_context_token_s + share * (high.per_context_token_s - low.per_context_token_s),
            low.per_prompt_token_s + share * (high.per_prompt_token_s - low.per_prompt_token_s),
        )

    def as_learned(self, key: Key, place: Place | None, per_step: float, context_tokens: float) -> tuple[float, float]:
        """Return an answer's tokens per step at the maximum k and a typical context, and the weight of that."""
        weight = 1.0
        if self.depth is not None and place is not None:
            depths = self._depths(key, context_tokens)
            per_step, weight = at_max_k(depths, self.depth.levels, place, per_step)
        return per_step * self.fitted.acceptance.typical(self.arm, key, context_tokens), weight

    def load_at_max_k(self, load: Load, place: Place | None) -> Load:
        """Return a load in whose terms `cost` holds, from one at another k: each weighs as it costs there."""
        if place is None:
            return load
        ratios = [between(column, place) for column in zip(*self.level_ratios, strict=True)]
        ones, requests, context, prompts = load
        return ones * ratios[0], requests * ratios[1], context * ratios[2], prompts * ratios[3]

    def steps_key(self, place: Place | None) -> Key:
        """Return the key of the statistics of steps at a place: the backend, and the level if it is near one."""
        if self.depth is None or place is None or _NEAR < place[1] < 1.0 - _NEAR:
            return (self.name,)
        return self.name, str(self.depth.levels[place[0] + (place[1] > 0.5)])

    def usual_acceptance(self, key: Key, place: Place | None, context_tokens: float) -> float | None:
        """Return the tokens per step of a drafter in order; None if similar requests are not known well enough."""
        model = self.fitted.acceptance
        if model.observations_of_kind(self.arm, key) < _MIN_OBSERVATIONS:
            return None
        if self.depth is None or place is None:
            return model.tokens_per_step(self.arm, self.name, key, context_tokens)
        return between(self._by_level(key, self.depth, context_tokens), place)


_FASTER: Final = 1.5
"""How much faster than expected an answer may get to the limit."""
_MIN_OBSERVATIONS: Final = 20.0
_FAR: Final = 1.5
"""Share of the most that an arm can give beyond which an answer is not believed."""
_NEAR: Final = 0.15
"""Distance from a level up to which an answer counts as one of that level."""
_NO_REPORT: Final = EngineLoad()
