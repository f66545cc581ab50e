"""Rescue: another backend resumes a stream whose backend fails.

A request that qualifies (`request`) is sent with `return_token_ids`, so that the engine reports the ids of all tokens.
They are removed from what the client gets (`passed`). When the backend fails, another one gets the same tokens as its
prompt (`rescue`), and its events are rewritten as those of the stream that has begun (`continued`).
"""
