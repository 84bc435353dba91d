"""LlamaIndex's OpenAI classes against the server at the URL of the first argument."""

# mypy: ignore-errors

import sys

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

URL = sys.argv[1] + "/v1"


def paint(name: str, size: int) -> str:
    """Paints something."""
    return f"{name} {size}"


options = {"model": "tiny", "api_base": URL, "api_key": "none", "context_window": 4096}
llm = OpenAILike(
    **options, is_chat_model=True, is_function_calling_model=True, max_tokens=16, temperature=0
)
messages = [
    ChatMessage(role="system", content="Be brief."),
    ChatMessage(role="user", content="say the thing"),
]
answer = llm.chat(messages)
assert answer.message.content
streamed = list(llm.stream_chat(messages))
assert streamed[-1].message.content == answer.message.content
assert llm.complete("in the").text

long = OpenAILike(**options, is_chat_model=True, is_function_calling_model=True, max_tokens=120)
found = long.chat_with_tools([FunctionTool.from_defaults(paint)], "paint", tool_required=True)
calls = long.get_tool_calls_from_response(found)
assert calls[0].tool_name == "paint", found

plain = OpenAILike(**options, is_chat_model=False, max_tokens=8, temperature=0)
assert plain.complete("in the").text == "".join(
    c.delta or "" for c in plain.stream_complete("in the")
)
print("ok")
