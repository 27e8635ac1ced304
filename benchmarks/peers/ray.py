"""Ray: the toy as method calls of an actor. Runs in Ray's own environment."""

import sys
import tempfile

import ray

from benchmarks.founding import Actor, learn
from benchmarks.report import report


@ray.remote
class RayActor(Actor):
    pass


def main(steps: int) -> None:
    with tempfile.TemporaryDirectory(prefix="hr-ray-", ignore_cleanup_errors=True) as folder:
        ray.init(
            address="local", num_cpus=2, include_dashboard=False, log_to_driver=False,
            object_store_memory=100 * 2**20, _temp_dir=folder,
        )  # fmt: skip
        actor = RayActor.remote()
        answer = None

        def put(item):
            nonlocal answer
            done, policy = item
            answer = None if done else actor.act.remote(policy)

        policy, speed = learn(put, lambda: ray.get(answer, timeout=60), steps, warm_up=200)
        ray.shutdown()
    report("ray", speed, ray.__version__, api="actor method calls", num_cpus=2, steps=steps, policy=policy)


if __name__ == "__main__":
    main(int(sys.argv[1]))
