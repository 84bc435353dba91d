"""Methods for masked diffusion models: what a pass lays out, and which predictions it settles."""
