"""A policy behind HTTP: `jaxrl serve`.

Read `protocol` (what may be asked), `reply` (what is answered), `worker` (the thread that drives the engine), `service`
(who is admitted, what is counted), `completing` and `admin` (the routes), `app` (the application), `run` (from a config
to a listening server). Only `transport`, the routes, `app` and `run` import the extra `[serve]`.
"""
