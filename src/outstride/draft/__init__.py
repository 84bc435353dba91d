"""Methods that draft tokens for an autoregressive target, one family of drafts per file."""
