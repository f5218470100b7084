"""Planning a run with the simulator (`jaxrl_llm.simulate`): what `jaxrl simulate` does.

`lengths` draws the tokens of samples, `recorded` takes lengths and speeds from a run, `study` simulates schedules and
reports them.
"""
