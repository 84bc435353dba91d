"""All errors that Outstride raises deliberately.

OutstrideError
├── ModelError                the model cannot be loaded
│   ├── ModelNotFound         no such file, folder, alias or hub id
│   ├── UnsupportedModel      an architecture or format that is not implemented
│   │   └── UnknownArchitecture  an architecture without a native family
│   ├── CorruptModel          cut-off file, missing or unused tensors, wrong checksum
│   └── DownloadFailed        the network failed; another attempt resumes
├── RequestError              one request is wrong; others are not affected
│   ├── InvalidParams         a sampling value out of range
│   ├── InvalidPrompt         empty, or longer than the context
│   ├── InvalidGrammar        a schema or grammar that cannot be read or followed
│   ├── UnknownMethod         no method of that name, or an option it does not have
│   ├── UnknownAdapter        no LoRA adapter of that name
│   ├── VocabularyMismatch    a draft model with another vocabulary
│   └── OutOfMemory           the request alone needs more cache than there is
├── InvalidData               a corpus or draft head that is damaged or of another model
├── MethodFailed              a drafter or acceptor raised; only its own request ends
└── IntegrityError            the KV cache is inconsistent: a bug, please report it
"""

from __future__ import annotations


class OutstrideError(Exception):
    """Base of all errors of this package."""


class ModelError(OutstrideError):
    """The model cannot be loaded."""


class ModelNotFound(ModelError):
    """No file, folder, alias or hub id of that name exists."""


class UnsupportedModel(ModelError):
    """The file is valid, but its architecture or format is not implemented."""


class UnknownArchitecture(UnsupportedModel):
    """There is no native family for the architecture; transformers may run it (`models.bridge`)."""


class CorruptModel(ModelError):
    """The file is truncated, fails its checksum, or has missing or unknown tensors."""


class DownloadFailed(ModelError):
    """A download failed; the part that arrived is kept, and the next attempt resumes."""


class RequestError(OutstrideError, ValueError):
    """One request cannot be served as it is."""


class InvalidParams(RequestError):
    """A sampling parameter is out of its range."""


class InvalidPrompt(RequestError):
    """The prompt is empty, holds unknown token ids, or does not fit into the context."""


class InvalidGrammar(RequestError):
    """A schema, a regular expression or a grammar cannot be read, or is not supported."""


class UnknownMethod(RequestError):
    """No such method, or no such option of it."""


class UnknownAdapter(RequestError):
    """No LoRA adapter of that name is loaded."""


class VocabularyMismatch(RequestError):
    """Target and draft model do not share one vocabulary."""


class OutOfMemory(RequestError):
    """The request alone needs more KV pages than the engine has."""


class InvalidData(OutstrideError):
    """Training data, a checkpoint or a draft head is damaged, or belongs to another model."""


class MethodFailed(OutstrideError):
    """A drafter or an acceptor raised an exception; only its own request ended."""


class IntegrityError(OutstrideError):
    """The KV cache is inconsistent. This is a bug: please report it."""
