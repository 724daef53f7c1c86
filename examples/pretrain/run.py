"""`make pretrain`: train a small model from random weights on the standard library's source, then complete code.

It prints the loss over time.

Every step is a command that a person can type; it is printed before it runs. Nothing is fetched: the corpus is what
this Python brings.

    python examples/pretrain/run.py                # 1,200 steps, minutes
    python examples/pretrain/run.py --steps 60     # only to see it run
    python examples/pretrain/run.py --parallel     # four ranks: two pipeline stages of two tensor-parallel ranks
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import yaml

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PROGRAM = Path(sys.executable).parent / "stoker"
STATE = ROOT / ".stoker" / "pretrain"
LOGS = ROOT / ".stoker" / "pretrain-logs"
CACHE = Path(os.environ.get("STOKER_CACHE", Path.home() / ".cache" / "stoker")).expanduser()
PROMPTS = ("import os\nimport ", "def __init__(self", 'class Error(Exception):\n    """', "for key, value in ")
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
JOB = "20-train.yaml"
LIMIT_S = 1800


def main() -> int:
    """Run the example; return 0 when the last validation loss is below the first one."""
    given = arguments()
    job = HERE.parent / "pretrain-parallel" / JOB if given.parallel else HERE / JOB
    started = time.monotonic()
    try:
        corpus = collect()
        run("local", "down", "--purge", quiet=True)
        shutil.rmtree(LOGS, ignore_errors=True)
        LOGS.mkdir(parents=True)
        train(corpus, job, given.steps)
        losses = show_losses()
        wait_for("30-serve.yaml")
        complete()
    except KeyboardInterrupt:
        run("local", "down", quiet=True)
        return 130
    say(f"\nin all {time.monotonic() - started:.0f} s")
    return finish(losses)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, help="train for so many steps instead of the manifest's")
    parser.add_argument("--parallel", action="store_true", help="train with tensor and pipeline parallel ranks")
    return parser.parse_args()


def collect() -> Path:
    """Copy the standard library's modules, without tests, into one folder, once per version of Python."""
    folder = CACHE / "corpora" / f"python-{platform.python_version()}"
    if not folder.is_dir():
        aside = folder.with_name(f"{folder.name}.part")
        shutil.rmtree(aside, ignore_errors=True)
        library = Path(sysconfig.get_path("stdlib"))
        for name, content in modules(library):
            (aside / name).parent.mkdir(parents=True, exist_ok=True)
            (aside / name).write_bytes(content)
        aside.rename(folder)
    size = sum(file.stat().st_size for file in folder.rglob("*.py"))
    say(f"corpus: {size / 1e6:.1f} MB of Python in {folder}")
    return folder


def modules(library: Path) -> Iterator[tuple[Path, bytes]]:
    """Yield relative path and content of each module that is UTF-8."""
    for file in sorted(library.rglob("*.py")):
        name = file.relative_to(library)
        content = file.read_bytes()
        if not LEFT_OUT & set(name.parts) and is_text(content):
            yield name, content


def is_text(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


def train(corpus: Path, job: Path, steps: int | None) -> None:
    """Apply the job and wait until it has completed."""
    say("\n=== train from random weights")
    claims = ("--claim", f"corpus={corpus}", "--claim", f"logs={relative(LOGS)}")
    if steps is None:
        wait_for("10-claims.yaml", job, more=claims)
        return
    with tempfile.TemporaryDirectory() as folder:
        shorter = Path(folder) / JOB
        whole = yaml.safe_load(job.read_text())
        shorter.write_text(json.dumps(shortened(whole, steps)))  # JSON is YAML, and keeps "2e-3" a text
        wait_for("10-claims.yaml", shorter, more=claims)


def shortened(job: dict[str, Any], steps: int) -> dict[str, Any]:
    """Return the same job with fewer steps, still validated and saved a few times."""
    job["spec"]["training"]["totalSteps"] = steps
    job["spec"]["optimization"]["warmupSteps"] = steps // 10
    job["spec"]["data"]["validation"]["everySteps"] = max(1, steps // 4)
    job["spec"]["checkpoint"]["intervalSteps"] = max(1, steps // 2)
    return job


def wait_for(*manifests: str | Path, more: tuple[str, ...] = ()) -> None:
    """Apply and wait until everything has completed or serves."""
    files = [part for name in manifests for part in ("-f", relative(HERE / name))]
    code = run("local", "apply", *files, *more, "--detach", "--wait", "--timeout", str(LIMIT_S))
    if code != 0:
        say("\nThe run failed. The job's log: .venv/bin/stoker local logs tj/small-coder --state .stoker/pretrain")
        run("local", "down", quiet=True)
        sys.exit(code)


def show_losses() -> list[tuple[int, float]]:
    """Print the validation loss by step, as the job logged it, with a bar for each."""
    lines = [json.loads(line) for line in (LOGS / "small-coder.jsonl").read_text().splitlines()]
    speeds = [line["tokens_per_s"] for line in lines if line["kind"] == "step"]
    losses = [(line["step"], line["loss"]) for line in lines if line["kind"] == "validation"]
    first = next(line for line in lines if line["kind"] == "step")
    say(
        f"\n=== validation loss (the training loss of step 1 was {first['loss']:.2f}; "
        f"{sorted(speeds)[len(speeds) // 2]:,.0f} tokens/s)"
    )
    for step, loss in losses:
        say(f"  step {step:4}  {loss:6.3f}  {'█' * round(8 * loss)}")
    return losses


def complete() -> None:
    """Print a few completions from the endpoint, at a low temperature."""
    url = endpoint()
    say(f"\n=== completions from {url}/v1/completions")
    for prompt in PROMPTS:
        body = {"model": "small-coder", "prompt": prompt, "max_tokens": 48, "temperature": 0.3, "seed": 1}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120)
        answer.raise_for_status()
        say("\n" + indented(f"\033[1m{prompt}\033[0m" if sys.stdout.isatty() else prompt + "|"), end="")
        say(indented(answer.json()["choices"][0]["text"]).lstrip(" "))


def indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.split("\n"))


def endpoint() -> str:
    """Return the address of the deployment's Service on this machine."""
    status = json.loads(subprocess.check_output([str(PROGRAM), "local", "status", "--json", *state()], cwd=ROOT))
    found: dict[str, str] = status["endpoints"]
    return next(url for name, url in found.items() if name.startswith("default/small-coder:"))


def finish(losses: list[tuple[int, float]]) -> int:
    learned = losses[-1][1] < losses[0][1]
    if not learned:
        say("The validation loss did not fall.")
    say("  look at objects   .venv/bin/stoker local get ckpt --state .stoker/pretrain")
    say("  stop and delete   .venv/bin/stoker local down --purge --state .stoker/pretrain")
    if "CI" in os.environ:
        run("local", "down", "--purge", quiet=True)
    return 0 if learned else 1


def run(*arguments: str, quiet: bool = False) -> int:
    """Run a verb of the program, after printing it."""
    if not quiet:
        say(f"$ .venv/bin/stoker {' '.join([*arguments, '--state', relative(STATE)])}")
    sink = subprocess.DEVNULL if quiet else None
    return subprocess.call([str(PROGRAM), *arguments, *state()], cwd=ROOT, stdout=sink, stderr=sink)


def state() -> list[str]:
    return ["--state", str(STATE)]


def relative(path: Path) -> str:
    return os.path.relpath(path, ROOT) if path.is_relative_to(ROOT) else str(path)


def say(text: str, end: str = "\n") -> None:
    print(text, end=end, flush=True)


if __name__ == "__main__":
    sys.exit(main())
