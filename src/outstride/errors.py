"""Every error that Outstride raises on purpose.

OutstrideError
├── ModelError                the model cannot be had
│   ├── ModelNotFound         no such file, folder, alias or hub id
│   ├── UnsupportedModel      an architecture or format that is not implemented
│   ├── CorruptModel          cut-off file, missing or unused tensors, wrong checksum
│   └── DownloadFailed        the network gave out; trying again resumes
├── RequestError              one request is wrong; others are not touched
│   ├── InvalidParams         a sampling value out of range
│   ├── InvalidPrompt         empty, or longer than the context
│   ├── InvalidGrammar        a schema or grammar that cannot be read or followed
│   ├── UnknownMethod         no method of that name, or an option it does not have
│   ├── VocabularyMismatch    a draft model that speaks another vocabulary
│   └── OutOfMemory           the request alone needs more cache than there is
├── InvalidData               words or a trained part that cannot be read, or belong to another model
├── MethodFailed              a drafter or acceptor raised; only its own request ends
└── IntegrityError            the cache contradicts itself: a bug, please report it
"""

from __future__ import annotations


class OutstrideError(Exception):
    """Base of all errors of this package."""


class ModelError(OutstrideError):
    """The model cannot be loaded."""


class ModelNotFound(ModelError):
    """Nothing of that name exists here or where it was looked for."""


class UnsupportedModel(ModelError):
    """The file is sound, but its architecture or format is not implemented."""


class CorruptModel(ModelError):
    """The file is cut off, does not match its checksum, or lacks or has unknown tensors."""


class DownloadFailed(ModelError):
    """A download broke off; what arrived is kept and the next attempt resumes."""


class RequestError(OutstrideError, ValueError):
    """One request cannot be served as it was given."""


class InvalidParams(RequestError):
    """A sampling parameter is out of its range."""


class InvalidPrompt(RequestError):
    """The prompt is empty, holds unknown token ids, or does not fit into the context."""


class InvalidGrammar(RequestError):
    """A schema, a regular expression or a grammar cannot be read, or asks for what is not supported."""


class UnknownMethod(RequestError):
    """No such method, or no such option of it."""


class VocabularyMismatch(RequestError):
    """Target and draft model do not share one vocabulary."""


class OutOfMemory(RequestError):
    """Even alone the request would need more cache pages than the engine has."""


class InvalidData(OutstrideError):
    """Training data, a checkpoint or a trained part is damaged, or belongs to another model."""


class MethodFailed(OutstrideError):
    """A drafter or an acceptor raised an exception; its request ended with it."""


class IntegrityError(OutstrideError):
    """The cache contradicts itself."""
