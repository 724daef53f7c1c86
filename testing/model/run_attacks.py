"""A process that renders every attack and prints one JSON line for each, with its cost."""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path

from stoker.model.chat_template import ChatTemplate, ChatTemplateError
from testing.model.chat_template_attacks import ATTACKS

TIME_LIMIT_S = 0.3
MESSAGES = [{"role": "user", "content": "a\nb"}, {"role": "assistant", "content": "<c>"}]


def main() -> None:
    for name in sys.argv[1:] or ATTACKS:
        before = cpu_s()
        try:
            outcome = f"rendered {len(ChatTemplate(ATTACKS[name], time_limit_s=TIME_LIMIT_S).render(MESSAGES))}"
        except ChatTemplateError as error:
            outcome = f"refused: {error}"
        print(json.dumps({"name": name, "outcome": outcome, "cpu_s": cpu_s() - before}), flush=True)
    print(
        json.dumps({"peak_bytes": max(own_peak_bytes(), resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)})
    )


BOTH = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)


def cpu_s() -> float:
    """Return the CPU seconds of this process and of its children that ended."""
    return sum(usage.ru_utime + usage.ru_stime for usage in map(resource.getrusage, BOTH))


def own_peak_bytes() -> int:
    """Return this process's own peak memory; `ru_maxrss` starts with the peak of the parent."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


if __name__ == "__main__":
    main()
