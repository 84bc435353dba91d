"""The handful of operations that a pass needs."""
