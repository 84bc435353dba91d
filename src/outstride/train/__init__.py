"""Recipes: how the weights that belong to this project were trained."""
