"""Pages, the prefix tree and commit. Bookkeeping only: the tensors belong to the models."""
