"""Programs that do the same sampling work with different libraries; `bench.compare` runs each as a process of its own.

Each is given the path of a JSON file, the work:

    model    folder with config.json and safetensors
    dtype    "float32" or "bfloat16"
    threads  CPU threads to compute with
    prompts  lists of token ids, all of one length
    lengths  {name: how many new tokens each completion has, those of a prompt consecutive}
    probe    token ids

and ends with one JSON line on standard output, the result:

    logprobs  of every token of the probe but the first, in nats
    seconds   {name: how long the completions of that name took, after a warm-up that is not counted}
    tokens    {name: how many wanted tokens were sampled}

Sampling is at temperature 1 without truncation, and the end-of-sequence token ends nothing. The peers' programs import nothing
of this package, so that they run in a Python environment in which it is not installed.
"""
