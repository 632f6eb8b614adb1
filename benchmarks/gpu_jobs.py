"""Runs jobs, each in a process of its own with a time of its own, and keeps their lines as they come.

A GPU that has met a bad address answers nothing more in that process, and a kernel may hang: so a job takes no other with it,
and what it has measured up to there is in the files.
"""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Job:
    """A function that yields the lines of a file, for at most so many seconds."""

    file: str
    lines: Callable[[], Iterator[dict[str, Any]]]
    seconds: float


class Files:
    """Appends lines to CSV files as they come, from any thread, and keeps them."""

    def __init__(self, folder: Path):
        self.folder, self.lines, self.lock = folder, dict[str, list[dict[str, Any]]](), threading.Lock()
        folder.mkdir(parents=True, exist_ok=True)

    def add(self, name: str, line: dict[str, Any]) -> None:
        """Adds a line to the file of that name, and shows it."""
        with self.lock:
            kept = self.lines.setdefault(name, [])
            with (self.folder / f"{name}.csv").open("a" if kept else "w", newline="") as file:
                writer = csv.DictWriter(file, fieldnames=list(line))
                if not kept:
                    writer.writeheader()
                writer.writerow(line)
            kept.append(line)
            print("  ".join(str(value) for value in line.values() if value not in ("", None)), flush=True)


def run_job(name: str, job: Job, files: Files, command: list[str], end: float) -> None:
    """Runs a command that prints the job's lines as JSON, at most until `end`; how it went is a line of jobs.csv."""
    start = time.monotonic()
    limit = min(job.seconds, end - start)
    if limit <= 0:
        files.add("jobs", {"job": name, "lines": 0, "seconds": 0.0, "outcome": "not begun: no time was left"})
        return
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
    timer = threading.Timer(limit, os.killpg, (process.pid, signal.SIGKILL))
    timer.start()
    errors: list[str] = []
    reader = threading.Thread(target=lambda: errors.extend(process.stderr or ()))
    reader.start()
    lines = 0
    for text in process.stdout or ():
        if text.startswith("{"):
            files.add(job.file, json.loads(text))
            lines += 1
    code = process.wait()
    in_time = timer.is_alive()
    timer.cancel()
    reader.join()
    last = errors[-1].strip()[:300] if errors else ""
    outcome = "done" if code == 0 else f"failed with {code}: {last}" if in_time else f"stopped after {limit:.0f} s"
    if code and in_time:
        print("".join(errors[-30:]), file=sys.stderr, flush=True)
    files.add("jobs", {"job": name, "lines": lines, "seconds": round(time.monotonic() - start, 1), "outcome": outcome})
