"""Rule: replicas that the traffic needs, or could do without."""

from __future__ import annotations

from collections import Counter

from gateway.advice.evidence import ModelEvidence
from gateway.advice.finding import Finding


def fleet(model: ModelEvidence) -> list[Finding]:
    """Return which methods to add replicas of, or to take them away from."""
    present = Counter(backend.method.value for backend in model.backends)
    changes = [
        f"{abs(more)} {method} {'more' if more > 0 else 'less'}"
        for method, needed in sorted(model.needed.items())
        if (more := needed - present[method])
    ]
    if not changes:
        return []
    total = sum(model.needed.values())
    title = f"the traffic needs {total} replica{'' if total == 1 else 's'}: {', '.join(changes)}"
    evidence = "the step times learned, the targets of `slo`, and the traffic of the last hour and of a day ago"
    how = "# Begin those to add first; `gateway drain` those to take away, and stop them once they are idle."
    return [Finding("fleet", model.name, "", title, None, evidence, how)]
