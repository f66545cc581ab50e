"""The `thresholds` policy: rules on request features, in YAML."""
