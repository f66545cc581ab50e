"""A stream outlives its backend: what a stream has passed on, and how another backend goes on with it.

A request that qualifies (`request`) is sent with `return_token_ids`, so that the engine reports the ids of all tokens.
They are taken out of what the client gets (`passed`). When the backend fails or is drained, the stream is handed over
(`handover`): another one gets the same tokens as its prompt (`calls`), and its events are made those of the stream that
has begun (`continued`).
"""

from gateway.relay.rescue.handover import Handover, count_impossible, handover_for

__all__ = ["Handover", "count_impossible", "handover_for"]
