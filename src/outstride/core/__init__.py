"""The nouns, the contracts and the sampling rule. Standard library and numpy only."""
