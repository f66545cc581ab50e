"""Which replica a request goes to, and what experience says about it.

Nothing in here does network I/O: a decision is a pure function of the request and the candidates.
"""
