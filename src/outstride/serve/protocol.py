"""Request bodies: OpenAI's, and the object `outstride` of our own.

A field that is not listed is refused by name: a misspelt one would otherwise be ignored without a word.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Text = Annotated[str, Field(max_length=1_000_000)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=1_000_000)]
Flag = bool | None


class StrictModel(BaseModel):
    """Known fields only, and no numbers written as strings."""

    model_config = ConfigDict(extra="forbid", strict=True)


class OpenModel(BaseModel):
    """An object that may have fields which are not used here."""

    model_config = ConfigDict(extra="allow", strict=True)


class DecodingOptions(BaseModel):
    """How the request is decoded. A field that is not listed is an option of the method."""

    model_config = ConfigDict(extra="allow", strict=True)

    method: str | None = Field(
        default=None, max_length=200, description="a method's name; see /v1/methods"
    )
    trace: bool = Field(
        default=False, description="say which pass and drafter each token came from"
    )
    graphs: bool = Field(
        default=False, description="in streams, show what each pass proposed and what was accepted"
    )
    deadline: float | None = Field(default=None, gt=0, description="seconds after which to give up")


class StreamOptions(StrictModel):
    include_usage: Flag = False
    continuous_usage_stats: Flag = False
    # accepted, without effect
    include_obfuscation: Flag = None


class JsonSchema(StrictModel):
    name: str = Field("answer", max_length=200)
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: Flag = None


class ResponseFormat(StrictModel):
    """Structured output: what the answer must match."""

    type: Literal["text", "json_object", "json_schema", "regex", "ebnf", "lark"]
    json_schema: JsonSchema | None = None
    regex: str | None = None
    grammar: str | None = None


class StructuredOutputs(StrictModel):
    """Structured output in vLLM's notation; one of the fields must be set."""

    json_: dict[str, Any] | bool | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = Field(None, max_length=1000)
    grammar: str | None = None
    json_object: Flag = None
    structural_tag: str | dict[str, Any] | None = None


class Function(StrictModel):
    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Flag = None


class Tool(StrictModel):
    type: Literal["function"]
    function: Function


class FunctionName(OpenModel):
    name: str


class ToolChoice(OpenModel):
    type: Literal["function"]
    function: FunctionName


class ContentPart(OpenModel):
    type: str
    text: Text | None = None


class CalledFunction(OpenModel):
    name: str
    arguments: Text


class ToolCall(OpenModel):
    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(OpenModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | list[ContentPart] | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


class SamplingBody(StrictModel):
    """The fields that chat and text completions share."""

    model: str | None = Field(None, max_length=500)
    stream: Flag = False
    stream_options: StreamOptions | None = None
    n: int | None = Field(1, ge=1)
    seed: int | None = Field(None, ge=0, le=2**63 - 1)
    stop: str | list[str] | None = None
    temperature: float | None = Field(1.0, ge=0, le=100)
    top_p: float | None = Field(1.0, gt=0, le=1)
    presence_penalty: float | None = Field(0.0, ge=-2, le=2)
    frequency_penalty: float | None = Field(0.0, ge=-2, le=2)
    logit_bias: dict[str, float] | None = None
    max_tokens: int | None = Field(None, ge=1)
    response_format: ResponseFormat | None = None
    # not part of OpenAI's API
    top_k: int | None = Field(0, ge=-1)
    min_p: float | None = Field(0.0, ge=0, le=1)
    repetition_penalty: float | None = Field(1.0, gt=0, le=100)
    min_tokens: int | None = Field(0, ge=0)
    stop_token_ids: TokenIds | None = None
    ignore_eos: Flag = False
    include_stop_str_in_output: Flag = False
    skip_special_tokens: Flag = True
    bad_words: list[str] | None = None
    truncate_prompt_tokens: int | None = Field(
        None, ge=-1, description="keep the last tokens of the prompt; -1: as many as fit"
    )
    return_token_ids: Flag = False
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = Field(None, max_length=1000)
    guided_grammar: str | None = None
    prompt_logprobs: int | None = Field(None, ge=0)
    cache_salt: str | None = Field(None, max_length=500)
    priority: int | None = Field(0, ge=-(2**31), le=2**31)
    outstride: DecodingOptions | None = None
    # accepted, without effect
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: Flag = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class ChatBody(SamplingBody):
    """/v1/chat/completions"""

    messages: list[ChatMessage] = Field(min_length=1, max_length=10_000)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: Flag = False
    top_logprobs: int | None = Field(None, ge=0)
    tools: list[Tool] | None = Field(None, max_length=128)
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: Flag = None
    reasoning_effort: str | None = Field(None, description="for chat templates that take it")
    # not part of OpenAI's API
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: Flag = None
    continue_final_message: Flag = False
    # accepted, without effect
    verbosity: str | None = None
    modalities: list[Literal["text"]] | None = None
    prediction: dict[str, Any] | None = None


class CompletionBody(SamplingBody):
    """/v1/completions"""

    prompt: (
        Text
        | Annotated[list[Text], Field(min_length=1)]
        | Annotated[TokenIds, Field(min_length=1)]
        | Annotated[list[TokenIds], Field(min_length=1)]
    )
    max_tokens: int | None = Field(16, ge=0, description="0 needs echo or prompt_logprobs")
    logprobs: int | None = Field(None, ge=0)
    echo: Flag = False
    best_of: int | None = None
    suffix: str | None = None


class EmbeddingBody(StrictModel):
    """/v1/embeddings"""

    input: (
        Text
        | Annotated[list[Text], Field(min_length=1)]
        | Annotated[TokenIds, Field(min_length=1)]
        | Annotated[list[TokenIds], Field(min_length=1)]
    )
    model: str | None = Field(None, max_length=500)
    encoding_format: Literal["float", "base64"] | None = "float"
    dimensions: int | None = Field(None, ge=1, description="keep the first numbers only")
    # not part of OpenAI's API
    pooling: Literal["mean", "last"] | None = Field("mean", description="of hidden states")
    truncate_prompt_tokens: int | None = Field(None, ge=-1)
    cache_salt: str | None = Field(None, max_length=500)
    priority: int | None = Field(0, ge=-(2**31), le=2**31)
    # accepted, without effect
    user: str | None = None


class TokenizeBody(StrictModel):
    """/tokenize: a text as it is, or messages in the model's chat format."""

    model: str | None = None
    prompt: Text | None = None
    messages: list[ChatMessage] | None = Field(None, min_length=1, max_length=10_000)
    add_special_tokens: bool = True
    add_generation_prompt: Flag = None
    continue_final_message: Flag = False
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = Field(None, max_length=128)
    return_token_strs: Flag = False


class DetokenizeBody(StrictModel):
    """/detokenize"""

    model: str | None = None
    tokens: TokenIds
