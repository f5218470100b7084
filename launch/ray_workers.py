"""Runs a command on every host of TPU slices in a Ray cluster; the entry point of the job that `ray_job` submits.

Ray reserves whole slices; on each host an actor runs the command under `supervise.py`. Ray shows what actors print under
their name and address. When one fails, or the job is stopped, all are told to end; after a preemption, or when a host is
lost, slices are reserved again and the command is started again.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

PREEMPTED = frozenset({75, 143})  # exit codes of a run that was told to end and has nothing wrong with it
LOST = "lost"  # instead of an exit code: the host went away


class Host:
    """On one host: the command, and what Ray knows of the place. Made an actor by `_reserve`."""

    def __init__(self) -> None:
        self.process: subprocess.Popen | None = None
        self.stopped = False

    def place(self) -> tuple[str, str]:
        """Address of the host, and which of its slice it is ("" where the cluster does not say)."""
        import ray

        return ray.util.get_node_ip_address(), os.environ.get("TPU_WORKER_ID", "")

    def run(self, arguments: Sequence[str], variables: Mapping[str, str]) -> int:
        """Runs Python with these arguments to its end. Returns its exit code."""
        if self.stopped:
            return 143
        code = os.getcwd()  # Ray's copy of the code, which comes before an installed one
        path = os.pathsep.join(filter(None, [code, os.environ.get("PYTHONPATH", "")]))
        self.process = subprocess.Popen(
            [sys.executable, *arguments], env={**os.environ, **variables, "PYTHONPATH": path}
        )
        return self.process.wait()

    def stop(self) -> None:
        """Tells the command to end; the supervisor kills it after the grace."""
        self.stopped = True
        if self.process is not None:
            self.process.terminate()


def first_failure(results: Sequence[int | str]) -> int | str:
    """0 when all ended with 0; a fault comes before a loss or preemption, which others suffer from it."""
    faults = [result for result in results if result not in (0, LOST) and result not in PREEMPTED]
    return faults[0] if faults else next((result for result in results if result != 0), 0)


def coordinator(places: Sequence[tuple[str, str]]) -> str:
    """Address of the first worker of the first slice; `places` is that of its hosts."""
    return next((address for address, worker in places if worker == "0"), places[0][0])


def main(argv: Sequence[str] | None = None) -> int:
    """ray_workers.py [options] -- COMMAND ..."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    cut = arguments.index("--")
    parser = argparse.ArgumentParser(prog="ray_workers.py", description=__doc__)
    parser.add_argument("--generation", required=True)
    parser.add_argument("--shape", required=True)
    parser.add_argument("--chips-per-host", type=int, required=True)
    parser.add_argument("--slices", type=int, default=1)
    parser.add_argument("--grace", type=int, default=120)
    parser.add_argument("--max-restarts", type=int, default=0)
    parser.add_argument("--resume-folder")
    parser.add_argument("--secret", action="append", default=[])
    options = parser.parse_args(arguments[:cut])
    command = ["launch/supervise.py", "--grace", str(options.grace)]
    if options.resume_folder:
        command += ["--resume-folder", options.resume_folder]
    for name in options.secret:
        command += ["--secret", name]
    command += arguments[cut:]

    import ray

    ray.init()
    stops: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda n, _: stops.append(n))
    for attempt in range(options.max_restarts + 1):
        results = _attempt(options, command, stops)
        code = first_failure(results)
        if stops or (code != LOST and code not in PREEMPTED) or attempt == options.max_restarts:
            return 75 if code == LOST else int(code)
        print(f"[launch] preempted ({code}); restart {attempt + 1} of {options.max_restarts}", flush=True)
    raise AssertionError("unreachable")


def _attempt(options: argparse.Namespace, command: Sequence[str], stops: Sequence[int]) -> list[int | str]:
    """Reserves the slices, runs the command on all hosts, gives the slices back. Returns what they ended with, in that order."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
    from ray.util.tpu import SlicePlacementGroup, get_tpu_coordinator_env_vars

    slices = SlicePlacementGroup(
        topology=options.shape,
        accelerator_version=options.generation,
        num_slices=options.slices,
        chips_per_vm=options.chips_per_host,
        resources_per_bundle={"TPU": options.chips_per_host},
        head_reservation_timeout_s=None,  # as long as it takes
    )
    try:
        ray.get(slices.placement_group.ready())
        actor = ray.remote(num_cpus=0, resources={"TPU": options.chips_per_host}, max_concurrency=4)(Host)
        hosts = [
            actor.options(
                name=f"host-{index}",
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    slices.placement_group, placement_group_bundle_index=index
                ),
            ).remote()
            for index in range(slices.num_hosts)
        ]
        variables: list[dict[str, Any]] = [{} for _ in hosts]
        if options.slices > 1:
            each = slices.num_hosts // options.slices
            address = coordinator(ray.get([host.place.remote() for host in hosts[:each]]))
            variables = [
                get_tpu_coordinator_env_vars(address, options.slices, index // each)
                for index in range(len(hosts))
            ]
        runs = [host.run.remote(command, extra) for host, extra in zip(hosts, variables, strict=True)]
        return _wait(hosts, runs, stops)
    finally:
        slices.shutdown()


def _wait(hosts: Sequence[Any], runs: Sequence[Any], stops: Sequence[int]) -> list[int | str]:
    """What the hosts ended with, first come first. The first failure, or a stop, tells all others to end."""
    import ray

    results: dict[int, int | str] = {}
    told = False
    while len(results) < len(runs):
        open_runs = [run for index, run in enumerate(runs) if index not in results]
        ready, _ = ray.wait(open_runs, timeout=1.0)
        for run in ready:
            try:
                results[runs.index(run)] = ray.get(run)
            except ray.exceptions.RayError as error:
                print(f"[launch] host-{runs.index(run)} is lost: {error}", flush=True)
                results[runs.index(run)] = LOST
        if not told and (stops or any(results.values())):
            told = True
            for index, host in enumerate(hosts):
                if index not in results:
                    host.stop.remote()
    return list(results.values())


if __name__ == "__main__":
    raise SystemExit(main())
