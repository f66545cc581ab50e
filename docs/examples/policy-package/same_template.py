"""Sends the requests of one application to the same backend, whose prefix cache then holds their system prompt."""

from collections.abc import Sequence
from zlib import crc32

from pydantic import Field

from backends.backend import Candidate
from policies.features.request import RequestFeatures
from policies.policy import Decision, Policy, PolicySettings, register


class SameTemplateSettings(PolicySettings):
    """Settings of `same_template`."""

    most: int = Field(default=16, ge=1, description="Requests in flight at which a backend is passed over.")


@register
class SameTemplate(Policy):
    """Chooses by rendezvous hashing of the template and the backends' names."""

    name = "same_template"
    Settings = SameTemplateSettings
    settings: SameTemplateSettings
    text_features = frozenset({"template"})

    def choose(self, request: RequestFeatures, candidates: Sequence[Candidate]) -> Decision:
        """Choose the first backend in the template's order that has room, else the first of all."""
        order = sorted(candidates, key=lambda candidate: crc32(f"{request.template} {candidate.name}".encode()))
        free = [candidate for candidate in order if candidate.in_flight < self.settings.most]
        return Decision((free or order)[0].name, self.name, "template" if free else "all_full")
