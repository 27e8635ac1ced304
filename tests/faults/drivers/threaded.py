"""A driver with four threads that hold a lock, and threaded torch operations behind it, before its first crew."""

import threading
import time

import torch

from headrace import Processes

lock = threading.Lock()
stop = threading.Event()


def hold():
    while not stop.is_set():
        with lock:
            time.sleep(0.01)
            torch.ones(300, 300) @ torch.ones(300, 300)


def work(lane):
    product = torch.ones(500, 500) @ torch.ones(500, 500)
    lane.put((float(product.sum()), torch.get_num_threads(), torch.cuda.is_initialized(), threading.active_count()))


torch.set_num_threads(4)
torch.ones(1000, 1000) @ torch.ones(1000, 1000)
threads = [threading.Thread(target=hold) for _ in range(4)]
for thread in threads:
    thread.start()
try:
    with Processes().crew(seed=1) as crew:
        lanes = crew.lanes(4, like=(0.0, 0, False, 0))
        for rank, number in enumerate([1, 2, 2, 4]):
            crew.start(work, lanes[rank], name=f"work{rank}", threads=number)
        for rank, item in enumerate(lanes.take_each(timeout=30)):
            print(f"role{rank}", *item, flush=True)
    print("done", flush=True)
finally:
    stop.set()
