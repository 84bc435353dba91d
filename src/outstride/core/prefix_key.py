"""`PrefixKey`: what a prefix depends on besides its tokens; the key of all that requests share."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from outstride.core.contracts import CAUSAL, AttentionPattern, Model


@dataclass(frozen=True, slots=True)
class PrefixKey:
    """What the KV of a prefix, and the text after it, depend on besides the tokens.

    Requests share something only under equal keys: cached prefixes, and what drafters remember of
    earlier texts. KV under another key is wrong KV. A memory under another key would only draft
    badly, but the time that an answer takes reveals what was drafted: so tenants are part of the key.

    weights: the fingerprint of the model.
    pattern: how its settled tokens attend to each other.
    adapter: the digest of the request's LoRA adapter; empty: none.
    tenant: the salt of the request.
    """

    weights: str = ""
    pattern: AttentionPattern = CAUSAL
    adapter: str = ""
    tenant: str = ""


ANY = PrefixKey()
"""The key of caches with one model and one tenant, as in unit tests."""


def fingerprint_of(model: Model, adapter: str) -> str:
    """The fingerprint of requests with this LoRA adapter; empty: without one.

    It contains the digest of the adapter. Loading an adapter does not change the model's own.
    """
    if not adapter:
        return model.fingerprint
    with_it = f"{model.fingerprint} adapter {model.adapters[adapter]}"
    return hashlib.sha256(with_it.encode()).hexdigest()[:16]
