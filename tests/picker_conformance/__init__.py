"""A black-box suite for endpoint pickers: services that Envoy asks, over ext_proc, which endpoint a request goes to."""
