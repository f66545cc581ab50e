"""The smallest picker that conforms, and broken ones."""
