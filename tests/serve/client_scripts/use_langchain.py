"""LangChain's OpenAI classes against the server at the URL of the first argument."""

# mypy: ignore-errors

import sys

from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings

URL = sys.argv[1] + "/v1"
OPTIONS = {"model": "tiny", "base_url": URL, "api_key": "none"}


@tool
def paint(name: str, size: int) -> str:
    """Paints something."""
    return f"{name} {size}"


chat = ChatOpenAI(**OPTIONS, max_tokens=16, temperature=0)
messages = [SystemMessage("Be brief."), HumanMessage("say the thing")]
answer = chat.invoke(messages)
assert isinstance(answer, AIMessage)
assert answer.usage_metadata["output_tokens"] > 0
assert "".join(chunk.content for chunk in chat.stream(messages)) == answer.content
assert len(chat.batch([messages, messages])) == 2

bound = chat.bind_tools([paint], tool_choice="any")
called = (
    ChatOpenAI(**OPTIONS, max_tokens=120).bind_tools([paint], tool_choice="any").invoke(messages)
)
assert called.tool_calls[0]["name"] == "paint", called
after = [*messages, called, ToolMessage("painted", tool_call_id=called.tool_calls[0]["id"])]
assert isinstance(chat.bind_tools([paint]).invoke(after), AIMessage)

schema = {
    "title": "Thing",
    "type": "object",
    "properties": {"size": {"type": "integer", "enum": [1, 2]}},
    "required": ["size"],
    "additionalProperties": False,
}
shaped = ChatOpenAI(**OPTIONS, max_tokens=60).with_structured_output(schema, method="json_schema")
assert shaped.invoke(messages)["size"] in (1, 2)

responses = ChatOpenAI(**OPTIONS, max_tokens=16, temperature=0, use_responses_api=True)
found = responses.invoke("say the thing")
assert found.text
assert "".join(chunk.text for chunk in responses.stream("say the thing")) == found.text

assert OpenAI(**OPTIONS, max_tokens=8).invoke("in the")
embeddings = OpenAIEmbeddings(**OPTIONS, check_embedding_ctx_length=False)
assert len(embeddings.embed_documents(["a", "b"])) == 2
assert abs(sum(x * x for x in embeddings.embed_query("a")) - 1) < 1e-4
print("ok")
