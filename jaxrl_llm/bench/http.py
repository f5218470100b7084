"""A small HTTP/1.1 client for load tests: what a connection does, and when it is dropped, is in the caller's hands."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any
from urllib.parse import urlsplit

import h11

from jaxrl_llm.errors import InputError

__all__ = ["Connection", "Reply", "events_of", "split_url"]

_READ = 2**16  # bytes


def split_url(url: str) -> tuple[str, int]:
    """(host, port) of a server's address; a path such as /v1 is ignored.

    Raises:
      InputError: it is no http address.
    """
    try:
        parts = urlsplit(url)
        scheme, host, user = parts.scheme, parts.hostname, parts.username
        port = 80 if parts.port is None else parts.port
    except ValueError:  # a port, or an address in brackets, that is none
        scheme, host, user, port = "", None, None, 0
    if scheme != "http" or not host or not url.isprintable() or " " in url or not port:
        raise InputError(f"--url must be like http://127.0.0.1:8000, got {url!a}.")
    if user is not None:
        raise InputError(
            "--url holds a user or password, which the server does not know. Give its key by JAXRL_API_KEY."
        )
    return host, port


class Reply:
    """Status and headers of an answer; the body comes with `read` or `parts`."""

    def __init__(self, connection: Connection, status: int, headers: Mapping[str, str]):
        self._connection, self.status, self.headers = connection, status, headers

    async def parts(self) -> AsyncIterator[bytes]:
        """The body as it comes."""
        while (data := await self._connection.body()) is not None:
            yield data

    async def read(self) -> bytes:
        """The whole body."""
        return b"".join([data async for data in self.parts()])

    async def json(self) -> Any:
        """The value of a JSON body."""
        return json.loads(await self.read())


class Connection:
    """One connection, for one request after the other. Leaving its context without an end of the body drops it.

    Raises (every method):
      OSError: the other side cannot be reached or has gone.
      h11.RemoteProtocolError: what it sends is not HTTP.
    """

    def __init__(self, host: str, port: int, headers: Mapping[str, str] | None = None):
        self._host, self._port = host, port
        self._headers = {"host": f"{host}:{port}", **(headers or {})}
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._state = h11.Connection(h11.CLIENT)

    async def _open(self) -> asyncio.StreamWriter:
        if self._streams is None or self._state.our_state is not h11.IDLE or self._streams[0].at_eof():
            self.drop()
            self._streams = await asyncio.open_connection(self._host, self._port)
            self._state = h11.Connection(h11.CLIENT)
        return self._streams[1]

    async def request(self, method: str, path: str, body: Any = None) -> Reply:
        """Sends a request, `body` as JSON unless it is bytes, and waits for the head of the answer."""
        writer = await self._open()
        raw = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = [*self._headers.items(), ("content-length", str(len(raw)))]
        events = [h11.Request(method=method, target=path, headers=headers), h11.EndOfMessage()]
        if raw:
            events.insert(1, h11.Data(data=raw))
        writer.write(b"".join(self._state.send(event) or b"" for event in events))
        await writer.drain()
        while not isinstance(event := await self._event(), h11.Response):
            if not isinstance(event, h11.InformationalResponse):
                raise ConnectionResetError("the server closed the connection without an answer")
        return Reply(self, event.status_code, {k.decode(): v.decode() for k, v in event.headers})

    async def send_part(self, path: str, raw: bytes, length: int) -> None:
        """Sends the beginning of a request whose body is said to have `length` bytes."""
        writer = await self._open()
        head = h11.Request(
            method="POST", target=path, headers=[*self._headers.items(), ("content-length", str(length))]
        )
        writer.write((self._state.send(head) or b"") + (self._state.send(h11.Data(data=raw)) or b""))
        await writer.drain()

    async def body(self) -> bytes | None:
        """The next part of a body; None at its end."""
        event = await self._event()
        if isinstance(event, h11.Data):
            return bytes(event.data)
        if self._state.our_state is h11.DONE and self._state.their_state is h11.DONE:
            self._state.start_next_cycle()
        return None

    async def _event(self) -> Any:
        if self._streams is None:
            raise ConnectionResetError("the connection is closed")
        while (event := self._state.next_event()) is h11.NEED_DATA:
            self._state.receive_data(await self._streams[0].read(_READ))
        return event

    def drop(self) -> None:
        """Cuts the connection, whatever is under way."""
        if self._streams is not None:
            self._streams[1].transport.abort()
            self._streams = None

    async def close(self) -> None:
        """Closes the connection."""
        if self._streams is None:
            return
        _, writer = self._streams
        self._streams = None
        writer.close()
        try:
            await writer.wait_closed()
        except OSError:  # the other side was faster
            return

    async def __aenter__(self) -> Connection:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()


async def events_of(reply: Reply) -> AsyncIterator[Any]:
    """The values of a body of server-sent events, the end mark `[DONE]` as None.

    Raises:
      ValueError: something that is no event, or no JSON.
    """
    rest = b""
    async for data in reply.parts():
        *whole, rest = (rest + data).split(b"\n\n")
        for event in whole:
            if not event.startswith(b"data: "):
                raise ValueError(f"the stream holds {event[:80]!r}, which is no event")
            text = event.removeprefix(b"data: ")
            yield None if text == b"[DONE]" else json.loads(text)
    if rest:
        raise ValueError(f"the stream ends within an event: {rest[:80]!r}")
