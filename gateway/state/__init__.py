"""State that outlives a process and is shared between processes: statistics, and documents such as pinned rules.

None of it is on the request path. One thread that may block calls a `Store` (an SQLite file or Redis); a `State`
synchronizes with it once a second, and is all that the rest of the gateway uses.
"""
