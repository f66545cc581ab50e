"""A stream outlives its backend: what a stream has passed on, and how another backend goes on with it.

A request that qualifies (`request`) is sent with `return_token_ids`, so that the engine reports the ids of all tokens.
They are taken out of what the client gets (`passed`). When the backend fails, another one gets the same tokens as its
prompt (`rescue`), and its events are made those of the stream that has begun (`continued`).
"""
