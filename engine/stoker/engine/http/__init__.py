"""The front of an engine: OpenAI's API over HTTP, text in and out, and vLLM's metrics.

Owns: routes, API keys, request bodies and their limits, chat templates and tokenising (in threads), detokenising and
stop texts, answers whole and as events, errors in OpenAI's shape.
Imports: `stoker.pod`, and of the engine the client of the core and its messages, `sampling` and `errors`. Never torch;
the tokenizer is passed in.

Read `server` (HTTP), `front` (body to jobs; `served_model` says whether it takes them), `generation` and `job_follower`
(jobs to updates), `text` (tokens to text), then `openai`. A handler takes a `call`; `reply` and `event_stream` send its
answer. `errors` is below all of them; `metrics`, `core_metrics` and `api_document` stand alone.
"""
