"""Models small enough to travel with the package, and the language that they speak."""
