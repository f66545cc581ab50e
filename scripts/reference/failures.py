"""The table of docs/reliability.md: what follows from each kind of failure, as the code decides it."""

from __future__ import annotations

import re

from gateway.relay.failures import RULES, Has, Outlook, Retried, Situation, verdict_on
from scripts.reference.tables import table

_HEAD = ("what fails", "kind", "nothing sent", "no other", "stream begun", "strike", "the pool")
_PLACE = re.compile(r"(?<=<!-- failures -->\n).*?(?=<!-- /failures -->)", re.DOTALL)


def failures_page(page: str) -> str:
    """Return the page with the table."""
    return _PLACE.sub(lambda _: table(_HEAD, [_row(kind) for kind in RULES]), page)


def _row(kind: str) -> list[str]:
    rule = RULES[kind]
    first = verdict_on(kind, Situation(Has.NOTHING, is_proof=True))
    alone = verdict_on(kind, Situation(Has.NOTHING, has_other=False))
    begun = verdict_on(kind, Situation(Has.PART, outlook=Outlook.ELSEWHERE))
    step = first.step.value
    if rule.retried is Retried.ALWAYS:
        step += ", whatever its effect"
    if rule.is_free:
        step += ", free"
    return [
        rule.what,
        f"`{kind}`",
        step,
        alone.step.value,
        begun.step.value,
        first.blame.value if first.step is not alone.step else "no",
        rule.report.value,
    ]
