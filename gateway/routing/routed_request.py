"""A request with its model and its features, which are computed lazily."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gateway.routing.access import NO_ROUTING_HEADERS, RoutingHeaders
from gateway.routing.keys import ANONYMOUS, Client
from gateway.routing.model import Model
from policies.features.parts import Unseen
from policies.features.prompt import Prompt
from policies.features.request import RARE_FIELDS, RequestFeatures
from policies.roles import Price


class RoutedRequest:
    """A request with its model and its features."""

    def __init__(
        self,
        model: Model,
        features: RequestFeatures | Callable[[], RequestFeatures],
        response_id: str = "",
        home: str | None = None,
        *,
        client: Client = ANONYMOUS,
        headers: RoutingHeaders = NO_ROUTING_HEADERS,
        document: dict[str, Any] | None = None,
        baseline_only: tuple[str, ...] = (),
        prompt: Prompt | None = None,
        usage_options: Mapping[str, object] | None = None,
        adapter: str = "",
        has_choices: bool = False,
        items: int = 0,
    ) -> None:
        self.model = model
        self.adapter = adapter  # name of the requested LoRA adapter; empty for the model itself
        self.client = client
        self.headers = headers
        self.response_id = response_id  # of the stored response that the request refers to; empty without one
        # Name of the backend with the stored response that the request refers to; None without such a reference.
        self.home = home
        self.document = document  # the parsed body, while the request is admitted
        self.prompt = prompt  # the prompt, if it was read and must be kept for the recorder
        self.priority: object = None if document is None else document.get("priority")
        # The `stream_options` that ask an engine for usage; None not to ask.
        self.usage_options = usage_options
        self.has_choices = has_choices  # whether it is for several choices
        self.items = items  # inputs of a request for embeddings; 0 for others
        self.baseline_only = baseline_only  # the parameters that only a baseline backend supports
        self._price: Price | None = None
        # The features; None until `_describe` has computed them.
        self._features: RequestFeatures | None = None
        self._describe: Callable[[], RequestFeatures] | None = None
        if isinstance(features, RequestFeatures):
            self._features, self.baseline_only = features, features.baseline_only
        else:
            self._describe = features

    @property
    def features(self) -> RequestFeatures:
        """The features of the request."""
        if self._features is None:
            assert self._describe is not None
            self._features = self._describe()
        return self._features

    def price(self) -> Price:
        """Return the expected cost of the request, as of the first call."""
        if self._price is None:
            self._price = self.model.price(self.features)
        return self._price

    def parsed(self) -> None:
        """Drop the parsed body, once the request has been admitted."""
        self.document = None

    def found_at(self, backend: str) -> None:
        """Set the backend that holds the stored response to which the request refers."""
        self.home = backend

    @property
    def unseen(self) -> Unseen | None:
        """Parts of the prompt that its text does not show, if the features are computed; None if there are none."""
        return None if self._features is None else self._features.unseen

    @property
    def shape(self) -> tuple[str, ...]:
        """The shape of the request; computes its features only if it may have one."""
        document = self.document
        if self._features is None and document is not None and "n" not in document and RARE_FIELDS.isdisjoint(document):
            return ()
        return self.features.shape
