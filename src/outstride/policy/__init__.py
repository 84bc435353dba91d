"""How much to draft: joined drafters, acceptance estimates, calibration, and the cost of passes."""
