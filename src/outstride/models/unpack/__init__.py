"""Quantized safetensors checkpoints: one file per method, each of which gives tensors by rows."""
