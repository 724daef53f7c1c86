"""OpenAI's wire: bodies, parameters, answers, chunks and usage of completions and chat.

Owns: the shape of requests and answers. It neither sends nor receives.
Imports: `generation` (updates of a run), `errors`, `text`; nothing above them, so not `front` and not `server`.

Read `protocol` (bodies), `params` (bodies to sampling parameters), `answer`, `completions`, `chat`; then `logprobs`,
`usage` and `sse`.
"""
