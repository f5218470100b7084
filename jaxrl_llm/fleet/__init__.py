"""Sampling by workers in other processes, or on other machines; training goes on in one.

Read in this order: `messages` (what is said between the two sides), `assignments` (which prompt is with whom),
`worker` (the other side), `dispatcher` (this side: hands out, watches, replaces), `stream` (what the training loop
sees), `in_process` and `ray_actors` (two ways to carry the messages).

A prompt of the fleet is answered under the weights of one version, which is decided when it is submitted, and
groups are trained on in the order in which they were submitted. Since a sample is a function of (seed, uid, index,
position, weights), neither the number of workers, nor who answers when, nor who dies changes what is trained on.
"""

from jaxrl_llm.fleet.dispatcher import Event, Fleet, FleetError, Patience
from jaxrl_llm.fleet.stream import FleetStream
from jaxrl_llm.fleet.worker import Worker

__all__ = ["Event", "Fleet", "FleetError", "FleetStream", "Patience", "Worker"]
