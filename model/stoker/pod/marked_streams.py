"""Names that engine and router share for streams that can go on at another engine. Values only.

A router that sends `X-Stoker-Resume: 1` gets one more field in the last chunk of each update,
`"stoker": {"tokens": [...], "seed": 7, "end": 2}`: the choice's output tokens since its last such chunk, the seed with
its first one, the end token with its last. The chunks of one update belong together: a stream is cut behind a marked
chunk alone. From the marks the router writes the body of `POST /streams/resume`: one line of JSON (the engine's
`ResumeState`), then the body of the client's request, byte for byte. The answer is the rest of the stream.
"""

from __future__ import annotations

RESUME_PATH = "/streams/resume"
RESUME_HEADER = b"x-stoker-resume"
"""In a request: `1` asks for marked chunks. In an answer: `1` says that they are marked, and the stream can go on."""
MARK = "stoker"
"""The field of a marked chunk; its last one."""
RESUMABLE_PATHS = ("/v1/completions", "/v1/chat/completions")
