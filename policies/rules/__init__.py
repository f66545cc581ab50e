"""The `thresholds` policy: rules on request features, written in YAML."""
