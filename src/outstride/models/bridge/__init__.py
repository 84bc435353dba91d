"""The bridge: architectures of transformers that have no native family, over Outstride's KV cache.

A causal model of transformers runs here if every layer attends through its attention interface and
keeps nothing else between passes. A registered attention function writes keys and values into pages
and attends as the token graphs say; the masks and the cache of transformers are not used. The model
is probed and checked against transformers' own attention when it is loaded (`check`).

transformers is imported when a model needs it, never before.
"""

TRUST_VARIABLE = "OUTSTRIDE_TRUST_REMOTE_CODE"
"""Set by `--trust-remote-code`, so that an engine in a process of its own sees it as well."""
