"""What open dashboards cost the gateway."""
