"""Run with the Python of an environment that has verifiers 0.4: BASE_URL MODEL TOKENIZER_FOLDER; prints JSON."""

import asyncio
import json
import sys

from verifiers.v1.clients.eval import EvalClient
from verifiers.v1.clients.train import TrainClient
from verifiers.v1.configs.client import EvalClientConfig, TrainClientConfig
from verifiers.v1.dialects import ChatDialect
from verifiers.v1.types import SamplingConfig


async def main(base, name, folder):
    """What the train client and the eval client make of the server's answers."""
    dialect, out = ChatDialect(), {}
    body = {"model": name, "messages": [{"role": "user", "content": "hi there"}], "max_tokens": 16}
    overlong = body | {"messages": [{"role": "user", "content": "x " * 3000}]}
    sampling = SamplingConfig(temperature=1.0, max_tokens=16)
    train = TrainClient(TrainClientConfig(base_url=base, api_key_var="NO_KEY", renderer_model_name=folder))
    evaluate = EvalClient(EvalClientConfig(base_url=base, api_key_var="NO_KEY"))
    for kind, client in (("train", train), ("eval", evaluate)):
        answer = await client.get_response(dialect, body, sampling, session_id="s")
        out[kind] = answer.model_dump(mode="json", exclude={"raw"})
        try:
            await client.get_response(dialect, overlong, sampling)
        except Exception as error:  # its type is the client's affair, its words are the server's
            out[f"{kind} overlong"] = str(error)
    streamed = body | {"stream": True, "stream_options": {"include_usage": True}}
    relayed = await evaluate.relay(dialect, streamed, "s")
    out["stream"] = [event.decode() async for event in relayed.chunks]
    await relayed.close()
    await train.close()
    await evaluate.close()
    print(json.dumps(out))


asyncio.run(main(*sys.argv[1:]))
