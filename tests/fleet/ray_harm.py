"""A run with Ray's workers, some of which it kills, stops or sends damaged weights; prints what was done to whom.

A program of its own, since Ray starts processes by forking, which is best done before JAX has threads.
"""

import json
import os
import pathlib
import random
import signal
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from fleet.standins import damaged

from jaxrl_llm.config import load_config
from jaxrl_llm.fleet import Patience
from jaxrl_llm.fleet.messages import Load, Work
from jaxrl_llm.fleet.ray_actors import RayActors
from jaxrl_llm.fleet.workers import Workers
from jaxrl_llm.train import train


class Killing(RayActors):
    """Damages the first weights on their way; kills one process and stops another, both right after they got prompts."""

    def __init__(self):
        super().__init__(3, {"CPU": 1.0}, 0)
        self.works, self.harmed, self.processes = 0, {}, set()

    def receive(self, timeout):
        replies = super().receive(timeout)
        self.processes |= {process for _, process in self._at.values()}
        return replies

    def send(self, worker, request):
        if isinstance(request, Load) and not self.harmed:
            self.harmed["refused_weights"] = worker
            bad = self._ray.put(damaged(request.package, "flip", random.Random(0)))
            self._actors[worker].load.options(concurrency_group="post").remote(bad, request.attempt)
            return
        super().send(worker, request)
        if isinstance(request, Work):
            self.works += 1
            kind, number = ("died", signal.SIGKILL) if "died" not in self.harmed else ("hung", signal.SIGSTOP)
            if self.works >= 3 and kind not in self.harmed and worker not in self.harmed.values():
                self.harmed[kind] = worker
                os.kill(self._at[worker][1], number)


def main(folder, file, *overrides):
    transports = []

    def killing():
        transports.append(Killing())
        return transports[-1]

    workers = Workers(3, transport=killing, patience=Patience(silence=10.0))
    code = train(load_config(file, overrides), pathlib.Path(folder), workers=workers)
    print(json.dumps({"harmed": transports[0].harmed, "processes": sorted(transports[0].processes)}))
    sys.exit(code)


if __name__ == "__main__":
    main(*sys.argv[1:])
