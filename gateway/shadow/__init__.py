"""Replaying lookups on finished texts: what n-gram and suffix decoding would have done, whoever wrote them.

The request path keeps the bytes of an answer and appends them to a bounded queue; a thread hands them to a process of
its own (`python -m gateway.shadow`), which reads the text and replays it, so that nothing of that holds up the event
loop; the policy observes the result there, half a second later at most. When the queue is full, texts are left out and
counted.
"""

from gateway.shadow.finished import Kept
from gateway.shadow.replay import ShadowDrafting

__all__ = ["Kept", "ShadowDrafting"]
