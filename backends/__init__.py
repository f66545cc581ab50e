"""What stands behind the gateway: engine replicas and everything known about them.

Nothing in here knows of policies or of FastAPI.
"""
