"""A policy behind HTTP: `jaxrl serve`.

Read `protocol` (what may be asked), `reply` (what is answered), `worker` (the thread that drives the engine), `app`
(the routes), `run` (from a config to a listening server). Only `app` and `run` import the extra `[serve]`.
"""
