"""Answers for many random JSON schemas, from a running server with a real model.

    OUTSTRIDE_URL=http://127.0.0.1:8000 OUTSTRIDE_SCHEMAS=1000 pytest tests/serve/test_many_schemas.py

It is too slow to run with the other tests: without OUTSTRIDE_URL it is skipped.
"""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import openai
import pytest

from tests.serve.test_robust import bounded

URL = os.environ.get("OUTSTRIDE_URL")
COUNT = int(os.environ.get("OUTSTRIDE_SCHEMAS", "100"))
CLIENTS = 16
MAX_TOKENS = 256


@pytest.mark.skipif(not URL, reason="OUTSTRIDE_URL names no server")
def test_every_answer_ends_and_matches_its_schema(capsys: pytest.CaptureFixture[str]) -> None:
    outcomes: Counter[str] = Counter()
    wrong: list[Any] = []
    client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=600)
    model = client.models.list().data[0].id

    def one(number: int) -> None:
        numbers = random.Random(10_000 + number)
        schema = bounded(numbers)
        try:
            found = client.chat.completions.create(
                model=model,
                messages=[{"role": "user", "content": f"Give me example {number} as JSON."}],
                temperature=numbers.choice([0, 1]),
                seed=number,
                max_tokens=MAX_TOKENS,
                response_format={
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": schema},
                },
                extra_body={"outstride": {"method": "auto"}},
            )
        except openai.BadRequestError as error:
            outcomes["refused"] += 1
            if not ("Unsatisfiable" in str(error) or "empty" in str(error)):
                wrong.append((schema, str(error)))
            return
        except openai.OpenAIError as error:
            outcomes["failed"] += 1
            wrong.append((schema, str(error)))
            return
        [choice] = found.choices
        outcomes[choice.finish_reason] += 1
        try:
            jsonschema.validate(json.loads(choice.message.content or ""), schema)
        except (ValueError, jsonschema.ValidationError) as error:
            outcomes["invalid"] += 1
            wrong.append((schema, choice.finish_reason, choice.message.content, str(error)[:200]))

    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(one, range(COUNT)))
    with capsys.disabled():
        print(f"\n{COUNT} schemas, {CLIENTS} at a time: {dict(outcomes)}")
    assert not wrong, wrong[:5]
    assert set(outcomes) <= {"stop", "refused"}, "none may be cut: each schema has short documents"
    assert outcomes["stop"] > 0.9 * COUNT
