"""`python -m benchmarks WORKLOAD [--json] [--rounds N]`: see docs/benchmarks.md."""

import argparse
import importlib
import signal
import sys

from benchmarks.harness import compare

WORKLOADS = ["toy", "transport", "weights", "counting", "ppo-cartpole", "overlap", "rollout"]
WORKLOADS += ["ppo-sb3-defaults", "ppo-halfcheetah", "ppo-pong", "impala-cartpole", "straggler"]
WORKLOADS += ["replay", "dqn-cartpole", "sac-pendulum", "gradients"]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Headrace beside its peers.")
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--json", action="store_true", help="JSON lines only, no table")
    parser.add_argument("--rounds", type=int, default=5, help="how often each system is measured (default: 5)")
    given = parser.parse_args()
    if given.rounds < 1:
        parser.error("--rounds: give at least 1")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as an exception, so that what was started is ended
    module = importlib.import_module(f"benchmarks.{given.workload.replace('-', '_')}")
    compare(module.workload(), given.rounds, given.json)


if __name__ == "__main__":
    main()
