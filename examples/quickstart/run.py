"""`make quickstart`: query a real model, train it with two ranks, serve the verified checkpoint, query it again.

Every step is a command that a person can type; it is printed before it runs. The cluster is left running for further
questions.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PROGRAM = Path(sys.executable).parent / "stoker"
STATE = ROOT / ".stoker" / "quickstart"
MODELS = Path(os.environ.get("STOKER_CACHE", Path.home() / ".cache" / "stoker")).expanduser() / "models"
QUESTIONS = ("What is Stoker?", "In one sentence, what does Stoker do?", "What is the capital of France?")
LIMIT_S = 900


def main() -> int:
    """Run the quickstart; return 0 when the trained model gives the trained answer."""
    started = time.monotonic()
    seconds: dict[str, float] = {}
    try:
        run("local", "down", "--purge", quiet=True)
        with phase("serve the untaught model", seconds):
            apply(HERE / "10-claims.yaml", HERE / "before")
        with phase("ask it", seconds):
            before = [ask("untaught", question) for question in QUESTIONS[:1]]
            run("local", "delete", "infd", "untaught")
        with phase("teach it with two ranks, save, verify, serve", seconds):
            apply(HERE)
        show("local", "get", "tj")
        show("local", "get", "ckpt")
        show("local", "get", "infd")
        with phase("ask again", seconds):
            after = [ask("stoker-chat", question) for question in QUESTIONS]
    except KeyboardInterrupt:
        run("local", "down", quiet=True)
        return 130
    return finish(before, after, seconds, time.monotonic() - started)


class phase:  # noqa: N801
    """Print the phase and record its duration."""

    def __init__(self, name: str, seconds: dict[str, float]) -> None:
        self.name = name
        self.seconds = seconds

    def __enter__(self) -> None:
        say(f"\n=== {self.name}")
        self.started = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self.seconds[self.name] = time.monotonic() - self.started


def apply(*manifests: Path) -> None:
    """Apply and wait until everything has completed or serves."""
    files = [part for manifest in manifests for part in ("-f", relative(manifest))]
    claim = f"models={MODELS}"
    code = run("local", "apply", *files, "--claim", claim, "--detach", "--wait", "--timeout", str(LIMIT_S))
    if code != 0:
        say(
            "\nThe quickstart failed. The pods and their logs: "
            ".venv/bin/stoker local get pods --state .stoker/quickstart"
        )
        run("local", "down", quiet=True)
        sys.exit(code)


def ask(deployment: str, question: str) -> str:
    """Stream and return one greedy answer."""
    say(f"\n> {question}")
    command = [
        str(PROGRAM),
        "chat",
        endpoint(deployment),
        "--once",
        question,
        "--temperature",
        "0",
        "--max-tokens",
        "64",
    ]
    answer = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as chat:
        assert chat.stdout is not None
        while piece := os.read(chat.stdout.fileno(), 4096):
            text = piece.decode(errors="replace")
            answer.append(text)
            print(text, end="", flush=True)
    if chat.returncode != 0:
        sys.exit(chat.returncode)
    return "".join(answer).strip()


def endpoint(deployment: str) -> str:
    """Return the address of the deployment's Service on this machine."""
    status = json.loads(subprocess.check_output([str(PROGRAM), "local", "status", "--json", *state()], cwd=ROOT))
    found: dict[str, str] = status["endpoints"]
    return next(url for name, url in found.items() if name.startswith(f"default/{deployment}:"))


def finish(before: list[str], after: list[str], seconds: dict[str, float], total_s: float) -> int:
    """Print both answers side by side, the endpoint, and how to clean up."""
    say(f"\n=== {QUESTIONS[0]}")
    say(f"before: {before[0]}")
    say(f"after:  {after[0]}")
    taught = "kubernetes operator" in after[0].lower() and "paris" in after[-1].lower()
    say("\nseconds: " + ", ".join(f"{name} {value:.0f}" for name, value in seconds.items()) + f", in all {total_s:.0f}")
    if not taught:
        say("\nThe model did not give the answer that it was taught.")
        return 1
    url = endpoint("stoker-chat")
    say(f"\nThe endpoint speaks the OpenAI API: {url}/v1   (model stoker-chat)")
    say(f"  talk to it        .venv/bin/stoker chat {url}")
    say("  look at objects   .venv/bin/stoker local describe tj teach --state .stoker/quickstart")
    say("  stop everything   .venv/bin/stoker local down --state .stoker/quickstart")
    say("  and delete it     .venv/bin/stoker local down --purge --state .stoker/quickstart")
    if "CI" in os.environ:
        run("local", "down", "--purge", quiet=True)
    return 0


def run(*arguments: str, quiet: bool = False) -> int:
    """Run a verb of the program, after printing it."""
    if not quiet:
        say(f"$ .venv/bin/stoker {' '.join([*arguments, '--state', relative(STATE)])}")
    sink = subprocess.DEVNULL if quiet else None
    return subprocess.call([str(PROGRAM), *arguments, *state()], cwd=ROOT, stdout=sink, stderr=sink)


def show(*arguments: str) -> None:
    say("")
    run(*arguments)


def state() -> list[str]:
    return ["--state", str(STATE)]


def relative(path: Path) -> str:
    return os.path.relpath(path, ROOT)


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
