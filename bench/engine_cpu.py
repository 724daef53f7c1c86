"""Tokens per second of the engine on the CPU against transformers and llama.cpp.

SmolLM2-135M-Instruct, 64 greedy tokens unless `--tokens` says otherwise.

16 requests together against `generate` with one padded batch of 16; one request against `generate` alone; fp32 and
bf16, all cores. llama.cpp takes part, one stream with f16 weights, where llama-cpp-python is installed and `--gguf`
names an f16 file. Times go from the call to the last token, prompts included. Ours and theirs take turns, so that a
change of the machine's speed meets both, and the best round of each counts; the ratios of medians are given too. Each
round is timed twice, by the clock on the wall and by the process's processor time: on a busy machine only the second
can be compared, best with one thread. Both sides must give the same number of tokens: end tokens are ignored.

    make model                                             # once: brings the weights
    python bench/engine_cpu.py                             # about 3 minutes on two cores
    python bench/engine_cpu.py --dtype bfloat16 --rounds 5
    OMP_NUM_THREADS=1 python bench/engine_cpu.py --dtype bfloat16 --threads 1 --requests 1 --tokens 16    # busy machine

The last line is JSON.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from stoker.engine.config import CacheConfig, EngineConfig, SchedulerConfig, ServedModelConfig
from stoker.engine.llm import LLM
from stoker.engine.sampling import SamplingParams

FOLDER = Path(os.environ.get("STOKER_CACHE", Path.home() / ".cache/stoker")) / "models/smollm2-135m-instruct"
TOPICS = (
    "the sea", "a lighthouse", "bread", "the moon", "a train", "chess", "rain", "an old oak", "a violin", "winter",
    "a library", "coffee", "a bridge", "the desert", "a clock", "salt",
)  # fmt: skip
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "processor": time.process_time}
Run = Callable[[], int]
"""A function that generates once and returns the number of tokens."""


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    lines: dict[str, Any] = {
        "model": arguments.model.name,
        "output_tokens": arguments.tokens,
        "threads": arguments.threads,
    }
    for dtype in arguments.dtype:
        ours = open_llm(arguments.model, dtype, arguments.kernels, arguments.threads)
        theirs = open_twin(arguments.model, dtype)
        prompts = [prompt_of(ours, topic) for topic in TOPICS]
        for count in arguments.requests:
            name, batch = f"{count} request{'s' * (count > 1)}", prompts[:count]
            runs = {
                "stoker": run_ours(ours, batch, arguments.tokens),
                "transformers": run_theirs(theirs, batch, arguments.tokens),
            }
            lines[f"{name}, {dtype}"] = compare(runs, arguments.rounds)
            report(f"{name}, {dtype}", lines[f"{name}, {dtype}"])
        if arguments.gguf and dtype != "float32" and importlib.util.find_spec("llama_cpp"):
            llama = run_llama_cpp(arguments.gguf, prompts[0], arguments.tokens)
            runs = {"stoker": run_ours(ours, prompts[:1], arguments.tokens), "llama.cpp": llama}
            lines[f"1 request, {dtype}, llama.cpp f16"] = compare(runs, arguments.rounds)
            report(f"1 request, {dtype}, llama.cpp f16", lines[f"1 request, {dtype}, llama.cpp f16"])
        ours.close()
    print(json.dumps(lines))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=FOLDER)
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--requests", nargs="+", type=int, default=[16, 1], choices=range(1, 17), metavar="1..16")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kernels", default="auto", choices=["auto", "reference"], help="the engine's")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--gguf", type=Path, help="f16 file of the same model, for llama.cpp")
    return parser.parse_args()


def compare(runs: dict[str, Run], rounds: int) -> dict[str, Any]:
    """Return rates and ratios by the wall's clock; below `processor` the same by processor time."""
    rates: dict[str, dict[str, list[float]]] = {clock: {name: [] for name in runs} for clock in CLOCKS}
    for turn in range(rounds + 1):
        for name, run in runs.items():
            begins = {clock: read() for clock, read in CLOCKS.items()}
            num_tokens = run()
            for clock, read in CLOCKS.items():
                if turn > 0:  # the first turn warms up
                    rates[clock][name].append(num_tokens / (read() - begins[clock]))
    return summary(rates["wall"]) | {"processor": summary(rates["processor"])}


def summary(rates: dict[str, list[float]]) -> dict[str, Any]:
    """Return best and median tokens per second of both sides, and the ratios of the first to the second."""
    best = {name: round(max(values), 1) for name, values in rates.items()}
    median = {name: round(statistics.median(values), 1) for name, values in rates.items()}
    ours, theirs = rates
    ratio, ratio_of_medians = best[ours] / best[theirs], median[ours] / median[theirs]
    return {"best": best, "median": median, "ratio": round(ratio, 2), "ratio_of_medians": round(ratio_of_medians, 2)}


def report(name: str, line: dict[str, Any]) -> None:
    for clock, figures in (("wall", line), ("processor", line["processor"])):
        rates = ", ".join(f"{side} {rate:.1f} tokens/s" for side, rate in figures["best"].items())
        ratios = f"ratio {figures['ratio']:.2f} (of medians {figures['ratio_of_medians']:.2f})"
        print(f"{name}, {clock} time: {rates}; {ratios}", flush=True)


def open_llm(folder: Path, dtype: str, kernels: Any, threads: int) -> LLM:
    config = EngineConfig(
        model=ServedModelConfig(path=str(folder), dtype=dtype),
        device="cpu",
        kernels=kernels,
        threads=threads,
        cache=CacheConfig(num_blocks=400, prefix_cache=False),
        scheduler=SchedulerConfig(max_requests=16),
    )
    return LLM(config)


def open_twin(folder: Path, dtype: str) -> Any:
    twin = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    twin.generation_config.eos_token_id = None
    return twin


def prompt_of(llm: LLM, topic: str) -> list[int]:
    return llm.tokenizer.encode_chat([{"role": "user", "content": f"Tell me a short story about {topic}."}])


def run_ours(llm: LLM, prompts: list[list[int]], num_tokens: int) -> Run:
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)

    def run() -> int:
        return sum(len(answer.completions[0].tokens) for answer in llm.generate(prompts, params, progress=False))

    return run


def run_theirs(twin: Any, prompts: list[list[int]], num_tokens: int) -> Run:
    longest = max(map(len, prompts))
    padded = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])

    @torch.inference_mode()
    def run() -> int:
        output = twin.generate(padded, attention_mask=mask, do_sample=False, max_new_tokens=num_tokens, pad_token_id=0)
        return int(output[:, longest:].numel())

    return run


def run_llama_cpp(gguf: Path, prompt: list[int], num_tokens: int) -> Run:
    import llama_cpp  # a peer, measured only where it is installed

    threads = torch.get_num_threads()
    model = llama_cpp.Llama(str(gguf), n_ctx=512, n_threads=threads, n_threads_batch=threads, verbose=False)

    def run() -> int:
        model.reset()
        tokens = model.generate(prompt, temp=0.0)
        return sum(1 for _, _ in zip(range(num_tokens), tokens, strict=False))

    return run


if __name__ == "__main__":
    main()
