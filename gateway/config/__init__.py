"""The pool file: settings, loading, checks and schema."""
