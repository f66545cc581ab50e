"""Shadow drafting: replays n-gram and suffix drafting on finished texts, whichever backend produced them.

The request path puts the bytes of an answer into a bounded queue. A thread passes them to a separate process
(`python -m gateway.rooms.shadow`), which parses the text and replays drafting on it, so the event loop is never
blocked. The policy observes the result on the event loop, at most half a second later. Texts are dropped while the
queue is full.
"""
