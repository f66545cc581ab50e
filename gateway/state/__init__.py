"""State that outlives a process and is shared between processes: statistics, and documents such as pinned rules.

None of it is on the request path. A `Store` (an SQLite file or Redis) is called from one thread that may block; a
`State` synchronises with it once a second, and is all that the rest of the gateway uses.
"""
