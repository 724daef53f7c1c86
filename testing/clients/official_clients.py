"""The clients that people use, each as it is: `python official_clients.py NAME MODEL TOKENIZER_FOLDER URL...`.

Runs in an environment of its own (`make clients`), in which nothing of this project is installed. Each client asks
every URL the same questions and prints one JSON object per URL with what it was answered.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

QUESTION = "The quick brown fox"
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "measure",
        "description": "Measure a place.",
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"enum": ["roof", "cellar"]},
                "metres": {"type": "integer", "minimum": 0, "maximum": 9},
            },
            "required": ["place", "metres"],
            "additionalProperties": False,
        },
    },
}
"""A tool whose arguments end soon, also where a model without knowledge chooses them."""


def langchain(model: str, _tokenizer: str, url: str) -> dict[str, Any]:
    from langchain_openai import ChatOpenAI, OpenAI

    chat = ChatOpenAI(model=model, base_url=url, api_key="x", temperature=0, max_tokens=6, max_retries=0)
    whole = chat.invoke(QUESTION)
    chunks = list(chat.stream(QUESTION, stream_usage=True))
    schema = {"title": "measure", **TOOL["function"]["parameters"]}
    longer = ChatOpenAI(model=model, base_url=url, api_key="x", temperature=0, max_tokens=120, max_retries=0)
    called = longer.bind_tools([TOOL], tool_choice="measure").invoke(QUESTION)
    typed = longer.with_structured_output(schema, method="json_schema").invoke(QUESTION)
    text = OpenAI(model=model, base_url=url, api_key="x", temperature=0, max_tokens=6, max_retries=0)
    return {
        "whole": whole.content,
        "streamed": "".join(str(chunk.content) for chunk in chunks),
        "usage": dict(whole.usage_metadata or {})["total_tokens"],
        "streamed_usage": max(dict(chunk.usage_metadata or {"total_tokens": 0})["total_tokens"] for chunk in chunks),
        "tool": [called.tool_calls[0]["name"], sorted(called.tool_calls[0]["args"])],
        "typed": sorted(typed),
        "batch": [found.content for found in chat.batch([QUESTION, QUESTION])],
        "completion": text.invoke(QUESTION),
    }


def litellm(model: str, _tokenizer: str, url: str) -> dict[str, Any]:
    import litellm as client

    messages = [{"role": "user", "content": QUESTION}]
    common: dict[str, Any] = {"model": f"openai/{model}", "api_base": url, "api_key": "x", "temperature": 0}
    whole = client.completion(messages=messages, max_tokens=6, **common)
    chunks = client.completion(messages=messages, max_tokens=6, stream=True, **common)
    choice = {"type": "function", "function": {"name": "measure"}}
    called = client.completion(messages=messages, max_tokens=120, tools=[TOOL], tool_choice=choice, **common)
    later = asyncio.run(client.acompletion(messages=messages, max_tokens=6, **common))
    text = client.text_completion(
        **{**common, "model": f"text-completion-openai/{model}"}, prompt=QUESTION, max_tokens=6
    )
    try:
        client.completion(messages=messages, max_tokens=-1, **common)
        refused = ""
    except client.BadRequestError as error:
        refused = str(error)
    return {
        "whole": whole.choices[0].message.content,
        "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in chunks),
        "usage": whole.usage.total_tokens,
        "tool": [
            called.choices[0].message.tool_calls[0].function.name,
            sorted(json.loads(called.choices[0].message.tool_calls[0].function.arguments)),
        ],
        "later": later.choices[0].message.content,
        "completion": text.choices[0].text,
        "refused": refused,
    }


def llama_index(model: str, _tokenizer: str, url: str) -> dict[str, Any]:
    from llama_index.core.llms import ChatMessage
    from llama_index.llms.openai_like import OpenAILike

    common: dict[str, Any] = {"model": model, "api_base": url, "api_key": "x", "temperature": 0, "max_tokens": 6}
    llm = OpenAILike(is_chat_model=True, is_function_calling_model=True, context_window=256, max_retries=0, **common)
    asked = [ChatMessage(role="user", content=QUESTION)]
    text = OpenAILike(is_chat_model=False, context_window=256, max_retries=0, **common)
    return {
        "whole": llm.chat(asked).message.content,
        "streamed": "".join(str(part.delta or "") for part in llm.stream_chat(asked)),
        "completion": text.complete(QUESTION).text,
        "streamed_completion": "".join(str(part.delta or "") for part in text.stream_complete(QUESTION)),
    }


def instructor(model: str, _tokenizer: str, url: str) -> dict[str, Any]:
    from enum import Enum

    import instructor as client
    import openai
    from pydantic import BaseModel, Field

    class Place(Enum):
        ROOF = "roof"
        CELLAR = "cellar"

    class Measure(BaseModel):
        place: Place
        metres: int = Field(ge=0, le=9)

    found: dict[str, Any] = {}
    with openai.OpenAI(base_url=url, api_key="x", max_retries=0) as http:
        for mode in (client.Mode.TOOLS, client.Mode.JSON_SCHEMA):
            answer = client.from_openai(http, mode=mode).chat.completions.create(
                model=model,
                response_model=Measure,
                messages=[{"role": "user", "content": QUESTION}],
                max_tokens=120,
                temperature=0,
                max_retries=0,
            )
            found[mode.name.lower()] = sorted(answer.model_dump(mode="json"))
    return found


def lm_eval(model: str, tokenizer: str, url: str) -> dict[str, Any]:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "data.jsonl")
        rows = [
            {"text": QUESTION, "good": " jumps", "bad": " 3"},
            {"text": "Naive cafes", "good": " serve", "bad": "x"},
        ]
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        common = f"dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {data}\ntest_split: test\n"
        Path(folder, "choose.yaml").write_text(
            f"task: choose\n{common}output_type: multiple_choice\n"
            'doc_to_text: "{{text}}"\ndoc_to_choice: "{{[good, bad]}}"\ndoc_to_target: 0\n'
            "target_delimiter: ''\nmetric_list:\n  - metric: acc\n"
        )
        Path(folder, "write.yaml").write_text(
            f"task: write\n{common}output_type: generate_until\n"
            'doc_to_text: "{{text}}"\ndoc_to_target: "{{good}}"\n'
            'generation_kwargs:\n  until: ["\\n\\n"]\n  max_gen_toks: 6\n  temperature: 0\n'
            "metric_list:\n  - metric: exact_match\n"
        )
        result = simple_evaluate(
            model="local-completions",
            model_args={
                "model": model,
                "base_url": f"{url}/completions",
                "tokenizer": tokenizer,
                "tokenizer_backend": "huggingface",
                "num_concurrent": 1,
                "max_length": 256,
            },
            tasks=["choose", "write"],
            task_manager=TaskManager(include_path=folder, include_defaults=False),
            log_samples=True,
            bootstrap_iters=0,
        )
    return {
        "loglikelihoods": [[float(a[0]) for a in s["filtered_resps"]] for s in result["samples"]["choose"]],
        "written": [s["filtered_resps"][0] for s in result["samples"]["write"]],
    }


CLIENTS: dict[str, Callable[[str, str, str], dict[str, Any]]] = {
    "langchain": langchain,
    "litellm": litellm,
    "llama_index": llama_index,
    "instructor": instructor,
    "lm_eval": lm_eval,
}


def main() -> None:
    gc.disable()  # a third of the time that some clients need for their imports
    name, model, tokenizer, *urls = sys.argv[1:]
    for url in urls:
        print(json.dumps(CLIENTS[name](model, tokenizer, url)))


if __name__ == "__main__":
    main()
