"""Loads what every driver loads, once, and forks drivers from there, each in a session of its own.

A fresh interpreter with torch costs a second; a test that watches thirty drivers die cannot afford that. This process
runs no torch operation and starts no thread. It reads a JSON request a line and answers each with a line.
"""

import json
import os
import runpy
import signal
import sys
import tempfile

import headrace  # noqa: F401  with torch


def requests():
    kept = b""
    while data := os.read(0, 65536):
        *lines, kept = (kept + data).split(b"\n")
        yield from map(json.loads, lines)


def start(request):
    pid = os.fork()
    if pid:
        return pid
    os.setsid()
    with open(os.devnull) as nothing, open(request["output"], "wb") as output:
        os.dup2(nothing.fileno(), 0)
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.environ.update(request["environ"])
    tempfile.tempdir = None
    sys.argv = request["command"]
    sys.path[0] = os.path.dirname(sys.argv[0])
    runpy.run_path(sys.argv[0], run_name="__main__")
    sys.exit(0)  # through the interpreter's own end, like any script


signal.signal(signal.SIGINT, signal.default_int_handler)
sys.stdout.write("ready\n")
sys.stdout.flush()
for request in requests():
    if "poll" in request:
        pid, status = os.waitpid(request["poll"], os.WNOHANG)
        answer = os.waitstatus_to_exitcode(status) if pid else None
    else:
        answer = start(request)
    os.write(1, json.dumps(answer).encode() + b"\n")
